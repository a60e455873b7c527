"""Whatever bytes come to the JSON face: the answer is JSON, and no log shows a traceback."""

from __future__ import annotations

import asyncio
import json

import pytest

HEAD = b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
SELECT = b"POST /v1/routes:select" + HEAD + b"Content-Type: application/json\r\n"


async def exchange(mesh, raw: bytes) -> tuple[int, dict[str, str], bytes]:
    host, _, port = mesh.addresses.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(raw)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    if head.startswith(b"HTTP/1.1 100"):
        head, _, body = body.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body


@pytest.mark.parametrize(
    ("raw", "want"),
    [
        (b"GARBAGE\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
        (b"GET /v1/nodes HTTP/9.9\r\n\r\n", 400),
        (b"GET /v1/nodes" + HEAD + b"Bad Header: 1\r\n\r\n", 400),
        (b"GET /v1/nodes" + HEAD + b"X-Long: " + b"a" * 9000 + b"\r\n\r\n", 431),
        (b"GET /" + b"a" * 9000 + HEAD + b"\r\n", 431),
        (b"POST /v1/nodes" + HEAD + b"Content-Length: abc\r\n\r\n", 400),
        (SELECT + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", 400),
        (SELECT + b"Content-Encoding: gzip\r\nContent-Length: 3\r\n\r\nabc", 415),
        (SELECT + b"Content-Length: 2000000\r\n\r\n" + b" " * 2_000_000, 413),
        (SELECT + b"Expect: the-worst\r\nContent-Length: 2\r\n\r\n{}", 400),
        (b"GET /v1/nodes" + HEAD + b"Content-Length: 2\r\n\r\n{}", 400),
        (b"GET /nowhere" + HEAD + b"\r\n", 404),
        (b"PROPFIND /v1/nodes" + HEAD + b"\r\n", 405),
        (b"POST /healthz" + HEAD + b"\r\n", 405),
        (b"OPTIONS *" + HEAD + b"\r\n", 404),
        (b"GET /v1/status%" + HEAD + b"\r\n", 400),
    ],
)
async def test_what_cannot_be_served_is_answered_in_json(mesh, caplog, raw, want):
    status, headers, body = await exchange(mesh, raw)
    assert (status, headers["Content-Type"]) == (want, "application/json")
    error = json.loads(body)
    assert set(error) == {"code", "message", "details"}
    assert error["message"]
    assert not [record for record in caplog.records if record.exc_info]
    assert (await mesh.json("GET", "/v1/status"))[0] == 200


async def test_a_body_that_waits_to_be_asked_for_is_asked_for(mesh):
    await mesh.join("a", (0, 8))
    body = b'{"model": "models/acme/tiny"}'
    host, _, port = mesh.addresses.http.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(SELECT + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body))
    first = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    assert first == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    answer = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("path", ["/healthz", "/v1/status"])
async def test_head_has_the_fields_of_get_and_no_body(mesh, path):
    status, headers, body = await exchange(mesh, b"HEAD " + path.encode() + HEAD + b"\r\n")
    assert (status, body) == (200, b"")
    assert headers["Content-Type"].startswith("application/json")
    assert int(headers["Content-Length"]) > 0


async def test_a_request_past_its_deadline_is_504(mesh):
    status, body = await mesh.json("GET", "/v1/status", headers={"Grpc-Timeout": "1n"})
    assert (status, body["code"]) == (504, 4)
