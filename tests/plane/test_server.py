"""The activation plane's server over real sockets, called by bytes, by curl and by itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import weakref
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import psutil
import pytest
import zstandard

from meshnet.chunk import Answer, Chunk
from meshnet.compression import CompressionPolicies
from meshnet.errors import NextHopError, PositionError
from meshnet.plane.handler import PlaneLimits
from meshnet.plane.server import PlaneServer
from meshnet.wire import WireLimits
from tests.plane.doubles import (
    BOUND_S,
    P16,
    EchoHandler,
    GateHandler,
    RawCaller,
    answer_to,
    calling,
    chunk_header,
    new_session,
    request,
    serving,
)


async def expect_good(caller: RawCaller) -> None:
    """Assert that the connection still serves."""
    await caller.send(request())
    answer = await caller.read()
    assert (answer.status, answer.body) == (200, P16)
    assert not answer.closes


def problem(body: bytes) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(body)
    return parsed


async def test_a_chunk_is_answered_and_the_connection_kept() -> None:
    handler = EchoHandler()
    header = chunk_header(position=7, chunk_index=2, chunk_total=3)
    async with serving(handler) as place, calling(place) as caller:
        for _ in range(3):
            await caller.send(request(header=header))
            answer = await caller.read()
            assert (answer.status, answer.body) == (200, P16)
            assert answer.headers["x-meshnet-session"] == header.session
            assert answer.headers["x-meshnet-shape"] == "1,1,8"
            assert answer.headers["x-meshnet-chunk-index"] == "2"
            assert answer.headers["x-meshnet-chunk-total"] == "3"
            assert "x-meshnet-encoding" not in answer.headers
    assert [chunk.header for chunk in handler.chunks] == [header] * 3
    assert handler.chunks[0].wire_bytes == 16


async def test_a_raw_tensor_is_the_receive_buffer() -> None:
    handler = EchoHandler()
    body = bytes(range(256)) * (16 * 1024)
    header = chunk_header(1, 128, 16384)
    async with serving(handler) as place, calling(place) as caller:
        await caller.send(request(body, header=header))
        first = await caller.read()
        await caller.send(request(body[::-1], header=header))
        second = await caller.read()
    assert (first.body, second.body) == (body, body[::-1])
    one, two = (chunk.tensor for chunk in handler.chunks)
    # The whole memory behind the tensor is as long as the body: no head, no second copy.
    owner: Any = one
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
        if isinstance(owner, memoryview):
            owner = owner.obj
    assert owner.nbytes == len(body)
    assert np.shares_memory(owner, one.view(np.uint8))
    assert one.flags.writeable
    # It is the handler's to keep: the next body went elsewhere.
    assert not np.shares_memory(one, two)
    assert one.tobytes() == body


async def test_a_tensor_lives_no_longer_than_it_is_held() -> None:
    handler = EchoHandler()
    async with serving(handler) as place, calling(place) as caller:
        await expect_good(caller)
        alive = weakref.ref(handler.chunks.pop().tensor)
        await expect_good(caller)
        assert alive() is None


async def test_bytes_may_come_one_by_one() -> None:
    async with serving(EchoHandler()) as place, calling(place) as caller:
        for byte in request():
            await caller.send(bytes([byte]))
            await asyncio.sleep(0)
        answer = await caller.read()
        assert (answer.status, answer.body) == (200, P16)
        chunked = b"".join(b"1\r\n%c\r\n" % byte for byte in P16) + b"0\r\nX: y\r\n\r\n"
        for byte in request(b"", "Transfer-Encoding: chunked", length=None) + chunked:
            await caller.send(bytes([byte]))
            await asyncio.sleep(0)
        answer = await caller.read()
        assert (answer.status, answer.body) == (200, P16)
        await expect_good(caller)


async def test_pipelined_requests_are_answered_in_order() -> None:
    header = chunk_header(1, 64, 1024)
    bodies = [bytes([index]) * (64 * 1024 * 2) for index in range(4)]
    async with serving(EchoHandler()) as place, calling(place) as caller:
        sending = asyncio.create_task(
            caller.send(b"\r\n".join(request(body, header=header) for body in bodies))
        )
        for body in bodies:
            assert (await caller.read()).body == body
        await sending
        await expect_good(caller)


async def test_connections_are_served_at_the_same_time() -> None:
    handler = GateHandler()
    async with serving(handler) as place, calling(place) as one, calling(place) as two:
        await one.send(request())
        await asyncio.wait_for(handler.entered.wait(), BOUND_S)
        handler.entered.clear()
        await two.send(request())
        await asyncio.wait_for(handler.entered.wait(), BOUND_S)
        handler.gate.set()
        assert (await one.read()).status == (await two.read()).status == 200


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


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 128, 8192)], ids=["inline", "in-a-thread"])
async def test_an_encoded_body_is_decoded(shape: tuple[int, ...]) -> None:
    handler = EchoHandler()
    raw = np.arange(np.prod(shape), dtype=np.uint16).tobytes()
    body = zstandard.ZstdCompressor().compress(raw)
    header = chunk_header(*shape, encoding="zstd")
    async with serving(handler) as place, calling(place) as caller:
        await caller.send(request(body, header=header))
        assert (await caller.read()).body == raw
    assert handler.chunks[0].codec_s > 0
    assert handler.chunks[0].wire_bytes == len(body)


async def test_an_answer_is_encoded_only_where_the_caller_reads_it() -> None:
    shape = (1, 128, 8192)
    raw = bytes(128 * 8192 * 2)
    async with serving(EchoHandler()) as place, calling(place) as caller:
        for accepted, encoding in (((), None), (("bf16p",), None), (("bf16p", "zstd"), "zstd")):
            await caller.send(request(raw, header=chunk_header(*shape, accept_encoding=accepted)))
            answer = await caller.read()
            assert answer.headers.get("x-meshnet-encoding") == encoding
            decoded = zstandard.decompress(answer.body) if encoding else answer.body
            assert decoded == raw


async def test_no_tensor_is_204_without_a_body() -> None:
    class Silent(EchoHandler):
        async def forward(self, chunk: Chunk) -> Answer:
            return answer_to(chunk, None)

    async with serving(Silent()) as place, calling(place) as caller:
        for _ in range(2):
            await caller.send(request())
            answer = await caller.read()
            assert (answer.status, answer.body) == (204, b"")
            assert "content-length" not in answer.headers
            assert "x-meshnet-dtype" not in answer.headers


@pytest.mark.parametrize(
    ("error", "status", "header", "value"),
    [
        (PositionError("a gap", expected=5), 409, "x-meshnet-expected-position", "5"),
        (NextHopError("gone", failed_node="gamma"), 502, "x-meshnet-failed-node", "gamma"),
        (
            NextHopError("late", failed_node="gamma", timed_out=True),
            504,
            "x-meshnet-failed-node",
            "gamma",
        ),
    ],
)
async def test_a_handlers_error_is_answered(
    error: Exception, status: int, header: str, value: str
) -> None:
    class Failing(EchoHandler):
        async def forward(self, chunk: Chunk) -> Answer:
            if len(self.chunks) == 1:
                return await super().forward(chunk)
            self.chunks.append(chunk)
            raise error

    async with serving(Failing()) as place, calling(place) as caller:
        await caller.send(request())
        answer = await caller.read()
        assert (answer.status, answer.headers[header]) == (status, value)
        await expect_good(caller)


async def test_a_handlers_fault_is_500_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(EchoHandler):
        async def forward(self, chunk: Chunk) -> Answer:
            raise RuntimeError("secret detail")

    async with serving(Broken()) as place, calling(place) as caller:
        await caller.send(request())
        answer = await caller.read()
        assert answer.status == 500
        assert b"secret" not in answer.body
        assert b"Traceback" not in answer.body
        await caller.send(b"GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n")
        assert (await caller.read()).status == 200
    errors = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(errors) == 1
    assert errors[0].exc_info is not None


async def test_an_answer_unlike_its_header_is_500() -> None:
    class Wrong(EchoHandler):
        async def forward(self, chunk: Chunk) -> Answer:
            right = answer_to(chunk, chunk.tensor)
            return Answer(right.header, np.zeros((1, 1, 4), ml_dtypes.bfloat16))

    async with serving(Wrong()) as place, calling(place) as caller:
        await caller.send(request())
        assert (await caller.read()).status == 500


async def test_a_strided_answer_goes_out_row_major() -> None:
    class Transposing(EchoHandler):
        async def forward(self, chunk: Chunk) -> Answer:
            return answer_to(chunk, chunk.tensor.reshape(2, 2).T)

    body = bytes.fromhex("803f004040408040")
    async with serving(Transposing()) as place, calling(place) as caller:
        await caller.send(request(body, header=chunk_header(1, 2, 2)))
        assert (await caller.read()).body.hex() == "803f404000408040"


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
        ("GET", f"/sessions/{new_session()}", 405, "DELETE"),
        ("POST", "/healthz", 405, "GET, HEAD"),
        ("DELETE", "/sessions/not-a-uuid", 400, None),
        ("DELETE", f"/sessions/{str(new_session()).upper()}A", 400, None),
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


async def test_a_session_is_released() -> None:
    handler, session = EchoHandler(), new_session()
    async with serving(handler) as place, calling(place) as caller:
        for _ in range(2):
            await caller.send(f"DELETE /sessions/{session} HTTP/1.1\r\nHost: n\r\n\r\n".encode())
            assert (await caller.read()).status == 204
    assert handler.released == [session, session]


async def test_http_1_0_is_answered_and_closed() -> None:
    async with serving(EchoHandler()) as place, calling(place) as caller:
        await caller.send(request().replace(b"HTTP/1.1", b"HTTP/1.0"))
        answer = await caller.read()
        assert (answer.status, answer.body, answer.closes) == (200, P16, True)
        assert await caller.at_end()


@pytest.mark.parametrize(
    ("sent", "words"),
    [(request()[:50], "the head"), (request()[:-1], "the body")],
    ids=["head", "body"],
)
async def test_a_slow_sender_times_out(sent: bytes, words: str) -> None:
    limits = PlaneLimits(read_timeout_s=0.2, min_bytes_per_s=1 << 20)
    async with serving(EchoHandler(), limits=limits) as place, calling(place) as caller:
        await expect_good(caller)
        await caller.send(sent)
        answer = await caller.read()
        assert answer.status == 408
        assert words in problem(answer.body)["detail"]
        assert answer.closes
        assert await caller.at_end()


async def test_trickling_does_not_move_the_deadline() -> None:
    limits = PlaneLimits(read_timeout_s=0.3)
    async with serving(EchoHandler(), limits=limits) as place, calling(place) as caller:

        async def trickle() -> None:
            with contextlib.suppress(ConnectionError):
                for byte in request():
                    caller.writer.write(bytes([byte]))
                    await asyncio.sleep(0.05)

        task = asyncio.create_task(trickle())
        assert (await caller.read()).status == 408
        task.cancel()


async def test_an_idle_connection_is_closed_after_its_time() -> None:
    limits = PlaneLimits(idle_timeout_s=0.2)
    async with serving(EchoHandler(), limits=limits) as place, calling(place) as caller:
        await expect_good(caller)
        assert await caller.at_end()


async def test_a_handler_may_take_longer_than_any_deadline_of_the_connection() -> None:
    handler = GateHandler()
    limits = PlaneLimits(read_timeout_s=0.1, idle_timeout_s=0.1, write_timeout_s=0.1)
    async with serving(handler, limits=limits) as place, calling(place) as caller:
        await caller.send(request())
        await asyncio.wait_for(handler.entered.wait(), BOUND_S)
        asyncio.get_running_loop().call_later(0.4, handler.gate.set)
        assert (await caller.read()).status == 200


async def test_a_caller_that_does_not_read_its_answer_is_dropped() -> None:
    limits = PlaneLimits(write_timeout_s=0.2, min_bytes_per_s=1 << 30)
    header = chunk_header(1, 2048, 16384)
    body = bytes(64 << 20)
    server = PlaneServer(EchoHandler(), policies=CompressionPolicies(), limits=limits)
    place = await server.start("127.0.0.1", 0)
    async with calling(place) as caller:
        caller.reader._transport.pause_reading()  # type: ignore[attr-defined]
        caller.writer.write(request(body, header=header))
        async with asyncio.timeout(BOUND_S):
            while not server._exchanges:
                await asyncio.sleep(0.01)
            while server._exchanges:
                await asyncio.sleep(0.01)
    await server.close(0.0)


@pytest.mark.parametrize("abrupt", [False, True], ids=["eof", "reset"])
async def test_the_handler_is_cancelled_when_its_caller_goes_away(abrupt: bool) -> None:
    handler = GateHandler()
    async with serving(handler) as place, calling(place) as caller:
        await caller.send(request())
        await asyncio.wait_for(handler.entered.wait(), BOUND_S)
        if abrupt:
            caller.writer.transport.abort()
        else:
            caller.writer.close()
        await asyncio.wait_for(handler.cancelled.wait(), BOUND_S)


async def test_a_caller_that_leaves_within_its_body_harms_no_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handler = EchoHandler()
    async with serving(handler) as place:
        async with calling(place) as caller:
            await caller.send(request()[:-1])
            caller.writer.write_eof()
            answer = await caller.read()
            assert (answer.status, answer.closes) == (400, True)
        async with calling(place) as caller:
            await caller.send(request()[:-1])
            caller.writer.transport.abort()
        async with calling(place) as caller:
            await expect_good(caller)
    assert len(handler.chunks) == 1
    assert not caplog.records


async def test_one_connection_too_many_is_503() -> None:
    async with (
        serving(EchoHandler(), limits=PlaneLimits(max_connections=1)) as place,
        calling(place) as one,
    ):
        await expect_good(one)
        async with calling(place) as two:
            answer = await two.read()
            assert (answer.status, answer.closes) == (503, True)
            assert "retry-after" in answer.headers
        await expect_good(one)


async def test_p1_closing_ends_idle_connections_and_finishes_requests() -> None:
    handler = GateHandler()
    server = PlaneServer(handler, policies=CompressionPolicies())
    place = await server.start("127.0.0.1", 0)
    async with calling(place) as idle, calling(place) as fresh, calling(place) as busy:
        await idle.send(b"GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n")
        assert not (await idle.read()).closes
        await busy.send(request())
        await asyncio.wait_for(handler.entered.wait(), BOUND_S)
        closing = asyncio.create_task(server.close(BOUND_S))
        assert await idle.at_end()
        assert await fresh.at_end()
        with pytest.raises(ConnectionError):
            await asyncio.open_connection(*place)
        assert not closing.done()
        handler.gate.set()
        answer = await busy.read()
        assert (answer.status, answer.body, answer.closes) == (200, P16, True)
        await asyncio.wait_for(closing, BOUND_S)


async def test_closing_cancels_what_outlasts_the_grace() -> None:
    handler = GateHandler()
    server = PlaneServer(handler, policies=CompressionPolicies())
    place = await server.start("127.0.0.1", 0)
    async with calling(place) as busy:
        await busy.send(request())
        await asyncio.wait_for(handler.entered.wait(), BOUND_S)
        await asyncio.wait_for(server.close(0.1), BOUND_S)
        assert handler.cancelled.is_set()
        assert await busy.at_end()


async def test_p2_a_taken_port_is_an_os_error() -> None:
    async with serving(EchoHandler()) as (host, port):
        with pytest.raises(OSError, match=r"in use"):
            await PlaneServer(EchoHandler(), policies=CompressionPolicies()).start(host, port)


CURL_FIELDS = [
    "-H", "Content-Type: application/octet-stream",
    "-H", "X-Meshnet-Session: 8d7f2f0a-0000-4000-8000-000000000001",
    "-H", "X-Meshnet-Chunk-Index: 0",
    "-H", "X-Meshnet-Chunk-Total: 1",
]  # fmt: skip


async def curl(*arguments: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        "curl", "-sS", "--noproxy", "*", "--max-time", "10", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return out


@pytest.mark.parametrize(
    "extra",
    [
        (),
        ("-H", "Transfer-Encoding: chunked"),
        ("-H", "Expect: 100-continue"),
        ("-H", "Expect:"),
        ("--http1.0",),
    ],
    ids=["as-is", "w9a-chunked", "w9b-expect", "no-expect", "http-1.0"],
)
@pytest.mark.parametrize("shape", ["1,1,8", "1,128,8192"])
async def test_w9_curl(tmp_path: Path, shape: str, extra: tuple[str, ...]) -> None:
    num_bytes = 2 * int(np.prod([int(part) for part in shape.split(",")]))
    body = (P16 * (num_bytes // 16))[:num_bytes]
    path = tmp_path / "body"
    path.write_bytes(body)
    async with serving(EchoHandler()) as (host, port):
        url = f"http://{host}:{port}/forward"
        fields = [*CURL_FIELDS, *extra, "--data-binary", f"@{path}"]
        shaped = ["-H", f"X-Meshnet-Shape: {shape}"]
        good = await curl(*fields, *shaped, "-H", "X-Meshnet-Dtype: bfloat16", url)
        assert good == body
        bad = await curl(*fields, *shaped, "-H", "X-Meshnet-Dtype: bf16", "-w", "%{http_code}", url)
        assert bad.endswith(b"400")
        assert b"X-Meshnet-Dtype" in bad
