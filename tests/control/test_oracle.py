from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from meshnet.control.http_face import HttpFace
from meshnet.control.transcode import Transcoder
from tests.oracle_modules import load

CASES = load("cases").CASES
DIFFERENCES = load("differences").DIFFERENCES
server_module = load("server")
envoy_module = load("envoy")


@dataclass
class Face:
    """The echo service behind the transcoder."""

    host: str
    port: int
    oracle: Any

    async def ask(
        self, method: str, path: str, headers: dict[str, str], body: bytes | None
    ) -> tuple[int, dict[str, str], str]:
        """Send a request byte for byte; gives status, header fields and body."""
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            lines = [f"{method} {path} HTTP/1.1", "Host: oracle", "Connection: close"]
            lines += [f"{name}: {value}" for name, value in headers.items()]
            if body is not None:
                lines.append(f"Content-Length: {len(body)}")
            writer.write("\r\n".join([*lines, "", ""]).encode() + (body or b""))
            raw = await asyncio.wait_for(reader.read(), 10)
        finally:
            writer.close()
        head, _, rest = raw.partition(b"\r\n\r\n")
        first, *fields = head.decode().split("\r\n")
        answer = dict(line.split(": ", 1) for line in fields)
        if answer.get("Transfer-Encoding") == "chunked":
            rest = unchunk(rest)
        return int(first.split()[1]), answer, rest.decode()


def unchunk(raw: bytes) -> bytes:
    body = b""
    while raw:
        size, _, raw = raw.partition(b"\r\n")
        body += raw[: int(size, 16)]
        raw = raw[int(size, 16) + 2 :]
    return body


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return server_module.load_service(tmp_path_factory.mktemp("oracle"))


@dataclass
class Echo:
    """The echo service over gRPC."""

    port: int
    oracle: Any


@pytest.fixture
async def echo(service: Any) -> AsyncIterator[Echo]:
    oracle = server_module.Oracle(service)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((oracle.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield Echo(port, oracle)
    await server.stop(0)


@pytest.fixture
async def face(service: Any, echo: Echo) -> AsyncIterator[Face]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{echo.port}") as channel:
        http = HttpFace(Transcoder(channel, [service]).handle, {}, 0.2)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            await http.start(listener)
            yield Face("127.0.0.1", listener.getsockname()[1], echo.oracle)
            await http.close()


def received(text: str) -> Any:
    try:
        return json.loads(json.loads(text)["request"])
    except (ValueError, KeyError, TypeError):
        return None


@pytest.mark.parametrize("case", CASES, ids=[case[0].replace(" ", "-") for case in CASES])
async def test_each_rule_of_the_annotations(face: Face, case: Any) -> None:
    _, method, path, headers, body, want = case
    status, _, text = await face.ask(method, path, headers, None if body is None else body.encode())
    assert status == want[0], text
    if len(want) > 1 and isinstance(want[1], dict):
        assert received(text) == want[1]
    elif len(want) > 1:
        assert want[1] in text


def is_as_wanted(want: Any, status: int, text: str) -> bool:
    if status != want[0] or len(want) == 1:
        return status == want[0]
    return received(text) == want[1] if isinstance(want[1], dict) else want[1] in text


async def test_envoy_agrees_or_the_difference_is_known(echo: Echo, tmp_path: Path) -> None:
    """All cases have passed here against our face; this asks Envoy the same."""
    differing = {}
    async with envoy_module.envoy(echo.port, tmp_path) as ports:
        face = Face("127.0.0.1", ports["strict"], echo.oracle)
        for name, method, path, headers, body, want in CASES:
            content = None if body is None else body.encode()
            status, _, text = await face.ask(method, path, headers, content)
            if not is_as_wanted(want, status, text):
                differing[name] = status
    assert differing == {name: status for name, (status, _) in DIFFERENCES.items()}
    assert len(CASES) == 108


def test_every_difference_says_why() -> None:
    assert set(DIFFERENCES) <= {case[0] for case in CASES}
    assert all(why for _, why in DIFFERENCES.values())


async def test_metadata_comes_back_as_header_fields(face: Face) -> None:
    _, headers, text = await face.ask(
        "GET", "/v1/meta", {"Grpc-Metadata-X-Bin": "AAE=", "Grpc-Metadata-Grpc-Timeout": "1S"}, None
    )
    assert headers["Grpc-Metadata-x-init"] == "i1"
    assert headers["Grpc-Metadata-x-bin-bin"] == "AAE="
    assert headers["Grpc-Trailer-x-trail"] == "t1"
    assert '"x-bin":"bin:0001"' in text


async def test_only_the_caller_chosen_metadata_passes(face: Face) -> None:
    headers = {"Grpc-Metadata-Meshnet-Internal-Identity": "root", "Cookie": "c=1"}
    _, _, text = await face.ask("GET", "/v1/meta", headers, None)
    metadata = json.loads(text)["metadata"]
    assert not [key for key in metadata if key.startswith("meshnet-internal") or key == "cookie"]


@pytest.mark.parametrize("path", ["/v1/slow/60000", "/v1/stream?count=1000&millis=100"])
async def test_a_client_that_goes_away_cancels_its_call(face: Face, path: str) -> None:
    _, writer = await asyncio.open_connection(face.host, face.port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
    await writer.drain()
    await asyncio.wait_for(face.oracle.started.wait(), 5)
    writer.close()
    await asyncio.wait_for(face.oracle.ended.get(), 5)


async def test_the_allowed_methods_are_named(face: Face) -> None:
    _, headers, _ = await face.ask("PUT", "/v1/shelves", {}, b"")
    assert headers["Allow"] == "GET, HEAD, OPTIONS, POST"


async def test_an_unauthenticated_call_asks_for_a_bearer_token(face: Face) -> None:
    _, headers, _ = await face.ask("GET", "/v1/fail/16", {}, None)
    assert headers["WWW-Authenticate"] == "Bearer"


async def test_an_absolute_target_loses_its_authority(face: Face) -> None:
    status, _, text = await face.ask("GET", "http://other:1/v1/shelves/1", {}, None)
    assert (status, received(text)) == (200, {"name": "shelves/1"})


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "text/plain"}, 415),
        ({"Sec-Fetch-Site": "same-origin", "Origin": "http://proxied"}, 200),
        ({"Sec-Fetch-Site": "none"}, 200),
        ({"Origin": "http://oracle"}, 200),
        ({}, 200),
    ],
)
async def test_a_page_of_another_site_cannot_change_anything(
    face: Face, headers: dict[str, str], status: int
) -> None:
    got, _, _ = await face.ask("POST", "/v1/shelves/1:archive", headers, b"")
    assert got == status
    assert len(face.oracle.received) == (1 if status == 200 else 0)


async def test_a_stream_past_its_deadline_ends_with_an_error_line(face: Face) -> None:
    status, headers, text = await face.ask(
        "GET", "/v1/stream?count=1000&millis=20", {"Grpc-Timeout": "300m"}, None
    )
    *messages, last = [json.loads(line) for line in text.splitlines()]
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert messages
    assert all(set(message) == {"result"} for message in messages)
    assert last["error"]["code"] == 4
