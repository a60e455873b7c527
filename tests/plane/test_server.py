"""What the activation plane's server makes of good requests, over real sockets."""

from __future__ import annotations

import asyncio
import logging
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import zstandard

from meshnet.chunk import Answer, Chunk
from meshnet.errors import NextHopError, PositionError
from meshnet.plane.caller import Caller
from tests.plane.doubles import (
    P16,
    EchoHandler,
    answer_to,
    calling,
    chunk_header,
    expect_good,
    new_session,
    request,
    serving,
)


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
        for accepted, encoding in (((), None), (("br",), None), (("br", "zstd"), "zstd")):
            await caller.send(request(raw, header=chunk_header(*shape, accept_encoding=accepted)))
            answer = await caller.read()
            assert answer.headers.get("x-meshnet-encoding") == encoding
            decoded = zstandard.decompress(answer.body) if encoding else answer.body
            assert decoded == raw


async def test_no_tensor_is_204_without_a_body() -> None:
    class Silent(EchoHandler):
        def forward(self, chunk: Chunk, caller: Caller) -> Answer:
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
        def forward(self, chunk: Chunk, caller: Caller) -> Answer:
            if len(self.chunks) == 1:
                return super().forward(chunk, caller)
            self.chunks.append(chunk)
            raise error

    async with serving(Failing()) as place, calling(place) as caller:
        await caller.send(request())
        answer = await caller.read()
        assert (answer.status, answer.headers[header]) == (status, value)
        await expect_good(caller)


async def test_a_handlers_fault_is_500_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(EchoHandler):
        def forward(self, chunk: Chunk, caller: Caller) -> Answer:
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
        def forward(self, chunk: Chunk, caller: Caller) -> Answer:
            right = answer_to(chunk, chunk.tensor)
            return Answer(right.header, np.zeros((1, 1, 4), ml_dtypes.bfloat16))

    async with serving(Wrong()) as place, calling(place) as caller:
        await caller.send(request())
        assert (await caller.read()).status == 500


async def test_a_strided_answer_goes_out_row_major() -> None:
    class Transposing(EchoHandler):
        def forward(self, chunk: Chunk, caller: Caller) -> Answer:
            return answer_to(chunk, chunk.tensor.reshape(2, 2).T)

    body = bytes.fromhex("803f004040408040")
    async with serving(Transposing()) as place, calling(place) as caller:
        await caller.send(request(body, header=chunk_header(1, 2, 2)))
        assert (await caller.read()).body.hex() == "803f404000408040"


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
