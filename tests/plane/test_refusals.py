"""What the server refuses, how it says so, and that the connection lives on where it can."""

from __future__ import annotations

import asyncio
import contextlib
import time

import psutil
import pytest
import zstandard

from meshnet.plane.handler import PlaneLimits
from meshnet.wire import WireLimits
from tests.plane.doubles import (
    BOUND_S,
    P16,
    EchoHandler,
    calling,
    chunk_header,
    expect_good,
    problem,
    request,
    serving,
)

SESSION = "8d7f2f0a-0000-4000-8000-00000000000a"


@pytest.mark.parametrize("num_bytes", [0, 15, 17, 32])
async def test_w5_a_body_of_another_length_states_both(num_bytes: int) -> None:
    body = (P16 * 2)[:num_bytes]
    async with serving(EchoHandler()) as place, calling(place) as caller:
        await caller.send(request(body))
        answer = await caller.read()
        assert answer.status == 400
        assert answer.headers["x-meshnet-wire-version"] == "2"
        assert answer.headers["content-type"] == "application/problem+json"
        assert problem(answer.body)["field"] == "Content-Length"
        assert "expected 16" in problem(answer.body)["detail"]
        assert f"{num_bytes} bytes" in problem(answer.body)["detail"]
        await expect_good(caller)


@pytest.mark.parametrize("num_bytes", [0, 15, 17, 32])
async def test_w5_chunked_likewise(num_bytes: int) -> None:
    body = b"%x\r\n%b\r\n" % (num_bytes, (P16 * 2)[:num_bytes]) if num_bytes else b""
    async with serving(EchoHandler()) as place, calling(place) as caller:
        await caller.send(request(body + b"0\r\n\r\n", "Transfer-Encoding: chunked", length=None))
        answer = await caller.read()
        assert answer.status == 400
        assert "16" in problem(answer.body)["detail"]
        assert f"{num_bytes} bytes" in problem(answer.body)["detail"]
        if answer.closes:
            assert await caller.at_end()
        else:
            await expect_good(caller)


@pytest.mark.parametrize(
    ("without", "line", "field", "words"),
    [
        ("X-Meshnet-Shape", "X-Meshnet-Shape: 4294967296,4294967296", "X-Meshnet-Shape", "fewer"),
        ("X-Meshnet-Shape", "X-Meshnet-Shape: 1,-1,8", "X-Meshnet-Shape", "without sign"),
        ("X-Meshnet-Shape", "X-Meshnet-Shape: 1,0,8", "X-Meshnet-Shape", "at least 1"),
        ("X-Meshnet-Dtype", "X-Meshnet-Dtype: float16", "X-Meshnet-Dtype", "bfloat16"),
        ("X-Meshnet-Dtype", "X-Meshnet-Dtype: BFLOAT16", "X-Meshnet-Dtype", "lower case"),
        ("X-Meshnet-Wire", "X-Meshnet-Wire: 999", "X-Meshnet-Wire", "spoken here: 2"),
        ("", "X-Meshnet-Encoding: br", "X-Meshnet-Encoding", "zstd"),
        ("Content-Type", "Content-Type: application/json", "Content-Type", "retired"),
    ],
)
async def test_w3_w9d_a_bad_header_leaves_the_connection(
    without: str, line: str, field: str, words: str
) -> None:
    async with serving(EchoHandler()) as place, calling(place) as caller:
        await caller.send(request(P16, line, without=without))
        answer = await caller.read()
        assert answer.status == 400
        assert problem(answer.body)["field"] == field
        assert words in problem(answer.body)["detail"]
        await expect_good(caller)


async def test_a_shape_over_the_limit_is_refused_before_its_body() -> None:
    limits = PlaneLimits(wire=WireLimits(max_chunk_bytes=1024))
    async with serving(EchoHandler(), limits=limits) as place, calling(place) as caller:
        head = request(b"", header=chunk_header(1, 1, 1 << 30), length=2 << 30)
        await caller.send(head)  # and no body
        answer = await caller.read()
        assert answer.status == 413
        assert "at most 1024" in problem(answer.body)["detail"]
        assert answer.closes
        assert await caller.at_end()


def zstd_request(body: bytes) -> bytes:
    return request(body, "X-Meshnet-Encoding: zstd")


@pytest.mark.parametrize(
    "body",
    [
        zstandard.ZstdCompressor().compress(bytes(64 << 20)),
        bytes.fromhex("28b52ffdc0000000000000010000410000803f004040408040"),
    ],
    ids=["64-mib-of-zeros", "claims-1-tib"],
)
async def test_w8_a_bomb_is_refused_at_once_and_costs_no_memory(body: bytes) -> None:
    process = psutil.Process()
    async with serving(EchoHandler()) as place, calling(place) as caller:
        await expect_good(caller)
        before, started = process.memory_info().rss, time.monotonic()
        await caller.send(zstd_request(body))
        answer = await caller.read()
        assert answer.status in (400, 413)
        assert time.monotonic() - started < 1.0
        assert process.memory_info().rss - before < 16 << 20
        await expect_good(caller)


async def test_an_encoded_body_longer_than_any_is_refused_unread() -> None:
    async with serving(EchoHandler()) as place, calling(place) as caller:
        await caller.send(request(b"", "X-Meshnet-Encoding: zstd", length=1 << 40))
        answer = await caller.read()
        assert answer.status == 413
        assert problem(answer.body)["field"] == "Content-Length"
        assert answer.closes


async def test_w9b_expect_continue() -> None:
    async with serving(EchoHandler()) as place, calling(place) as caller:
        for _ in range(2):
            await caller.send(request(b"", "Expect: 100-continue", length=16))
            async with asyncio.timeout(BOUND_S):
                interim = await caller.reader.readuntil(b"\r\n\r\n")
            assert interim == b"HTTP/1.1 100 Continue\r\n\r\n"
            await caller.send(P16)
            answer = await caller.read()
            assert (answer.status, answer.body) == (200, P16)
        bad = request(
            b"", "Expect: 100-continue", "X-Meshnet-Dtype: x", length=16, without="X-Meshnet-Dtype"
        )
        await caller.send(bad)  # and no body
        answer = await caller.read()
        assert answer.status == 400
        assert answer.closes
        assert await caller.at_end()


async def test_w9d_an_error_before_a_long_body_is_read_by_its_sender() -> None:
    header = chunk_header(1, 128, 16384)
    body = bytes(4 << 20)
    async with serving(EchoHandler()) as place, calling(place) as caller:
        bad = request(body, "X-Meshnet-Dtype: x", header=header, without="X-Meshnet-Dtype")
        with contextlib.suppress(ConnectionError):
            await caller.send(bad)
        answer = await caller.read()
        assert answer.status == 400
        assert answer.closes


async def test_a_request_without_a_length_is_411() -> None:
    async with serving(EchoHandler()) as place, calling(place) as caller:
        await caller.send(request(b"", length=None))
        answer = await caller.read()
        assert answer.status == 411
        assert problem(answer.body)["field"] == "Content-Length"
        await expect_good(caller)


@pytest.mark.parametrize(
    ("extra", "status"),
    [
        ("Content-Length: 16\r\nContent-Length: 16", 400),
        ("Content-Length: 16\r\nContent-Length: 17", 400),
        ("Content-Length: 16\r\nTransfer-Encoding: chunked", 400),
        ("Transfer-Encoding: gzip, chunked", 501),
        ("Folded: 1\r\n 2\r\nContent-Length: 16", 400),
        ("Name : 1\r\nContent-Length: 16", 400),
        ("\r\n".join(f"X-{index}: 1" for index in range(80)), 431),
        ("X: " + "y" * 20000, 431),
    ],
)
async def test_a_head_that_cannot_be_trusted_closes(extra: str, status: int) -> None:
    async with serving(EchoHandler()) as place, calling(place) as caller:
        smuggled = request(P16, extra, length=None) + request()
        await caller.send(smuggled)
        answer = await caller.read()
        assert answer.status == status
        assert answer.headers["x-meshnet-wire-version"] == "2"
        assert answer.closes
        assert await caller.at_end()


async def test_garbage_is_400() -> None:
    async with serving(EchoHandler()) as place, calling(place) as caller:
        await caller.send(b"\x16\x03\x01\x02\x00garbage\r\n\r\n")
        answer = await caller.read()
        assert (answer.status, answer.closes) == (400, True)


@pytest.mark.parametrize(
    ("method", "target", "status", "allow"),
    [
        ("GET", "/forward", 405, "POST"),
        ("HEAD", "/forward", 405, "POST"),
        ("PUT", "/forward?x=1", 405, "POST"),
        ("GET", f"/sessions/{SESSION}", 405, "DELETE, PUT"),
        ("POST", "/healthz", 405, "GET, HEAD"),
        ("DELETE", "/sessions/not-a-uuid", 400, None),
        ("DELETE", f"/sessions/{SESSION.upper()}A", 400, None),
        ("GET", "/nowhere", 404, None),
        ("OPTIONS", "*", 404, None),
        ("GET", "/healthz", 200, None),
        ("HEAD", "/healthz?probe", 200, None),
        ("GET", "http://node/healthz", 200, None),
    ],
)
async def test_w9e_methods_and_paths(
    method: str, target: str, status: int, allow: str | None
) -> None:
    async with serving(EchoHandler()) as place, calling(place) as caller:
        await caller.send(f"{method} {target} HTTP/1.1\r\nHost: n\r\n\r\n".encode())
        answer = await caller.read(head_only=method == "HEAD")
        assert (answer.status, answer.headers.get("allow")) == (status, allow)
        assert int(answer.headers["content-length"]) > 0
        await expect_good(caller)
