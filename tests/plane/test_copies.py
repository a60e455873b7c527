"""How often a tensor's bytes are copied between socket and handler, counted by allocations."""

from __future__ import annotations

import asyncio
import socket
import tracemalloc

import numpy as np
import pytest
import zstandard

from meshnet.chunk import Answer, Chunk
from meshnet.plane.caller import Caller
from meshnet.plane.inbox import Inbox, allocate
from tests.plane.doubles import (
    BOUND_S,
    EchoHandler,
    answer_to,
    calling,
    chunk_header,
    request,
    serving,
)

SHAPE = (1, 128, 16384)
NUM_BYTES = 4 << 20
SMALL = NUM_BYTES // 32
"""What heads, buffers and objects may take beside the tensor's own memory."""


class Watching(EchoHandler):
    """Notes the memory taken since the request was begun to be sent, and answers no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.now: list[int] = []
        self.peak: list[int] = []

    def forward(self, chunk: Chunk, caller: Caller) -> Answer:
        now, peak = tracemalloc.get_traced_memory()
        self.now.append(now)
        self.peak.append(peak)
        self.chunks.append(chunk)
        return answer_to(chunk, None)


def send(place: tuple[str, int], data: bytes, count: int) -> None:
    """Send a request as often as asked; the heads of its answers are short."""
    with socket.create_connection(place, timeout=BOUND_S) as connection:
        for _ in range(count):
            connection.sendall(data)
            answer = b""
            while b"\r\n\r\n" not in answer:
                answer += connection.recv(4096)
            assert answer.startswith(b"HTTP/1.1 204")


@pytest.mark.parametrize(("encoding", "memories"), [(None, 1), ("zstd", 2)])
async def test_a_body_is_received_where_the_tensor_is(encoding: str | None, memories: int) -> None:
    """Raw: one memory, the tensor's, so nothing was copied. Encoded: the body, and the tensor."""
    raw = np.random.default_rng(7).integers(0, 256, NUM_BYTES, np.uint8).tobytes()
    body = raw if encoding is None else zstandard.ZstdCompressor().compress(raw)
    message = request(body, header=chunk_header(*SHAPE, encoding=encoding))
    handler = Watching()
    async with serving(handler) as place:
        await asyncio.to_thread(send, place, message, 2)
        handler.chunks.clear()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            await asyncio.to_thread(send, place, message, 1)
        finally:
            tracemalloc.stop()
    assert handler.peak[-1] - before < memories * NUM_BYTES + SMALL
    assert handler.peak[-1] - before > memories * NUM_BYTES - SMALL
    assert handler.chunks[0].tensor.tobytes() == raw


@pytest.mark.parametrize("expected", [True, False])
def test_a_short_body_that_came_with_its_head_stays_where_it_landed(expected: bool) -> None:
    head = b"POST / HTTP/1.1\r\n\r\n"
    inbox, landing = Inbox(), allocate(32)
    inbox.place(len(head))[:] = head
    landing[:20] = bytes(range(20))
    inbox.land(len(head), landing, len(head) + 20)
    assert inbox.buffered == len(head) + 20
    assert inbox.take_head(1024) == head
    body, filled = inbox.claim(32 if expected else 16)
    assert (body is landing) == expected
    assert filled == (20 if expected else 16)
    assert bytes(body[:filled]) == bytes(range(filled))
    assert bytes(inbox.unread()) == (b"" if expected else bytes(range(16, 20)))
    assert inbox.received == len(head) + 20


@pytest.mark.parametrize("split", range(1, 24))
def test_a_head_of_another_length_is_read_as_if_nothing_was_expected(split: int) -> None:
    message = b"POST / HTTP/1.1\r\nA: b\r\n\r\nbody"
    inbox, landing = Inbox(), allocate(32)
    inbox.place(split)[:] = message[:split]
    landing[: len(message) - split] = message[split:]
    inbox.land(split, landing, len(message))
    assert inbox.take_head(1024) == message[:-4]
    body, filled = inbox.claim(4)
    assert bytes(body[:filled]) == b"body"


@pytest.mark.parametrize("follows", ["shorter", "longer", "other-head", "bodiless", "pipelined"])
async def test_what_is_not_as_the_last_message_is_read_all_the_same(follows: str) -> None:
    handler = EchoHandler()
    header = chunk_header(1, 1, 64, position=1)
    body = bytes(range(128))
    good = request(body, header=header)
    start = b"GET /healthz HTTP/1.1\r\nHost: n\r\nX: "
    bodiless = start + b"y" * (len(good) - len(body) - len(start) - 4) + b"\r\n\r\n"
    message, answers = {
        "shorter": (request(body[:64], header=chunk_header(1, 1, 32, position=1)), [body[:64]]),
        "longer": (request(body * 4, header=chunk_header(1, 1, 256, position=1)), [body * 4]),
        "other-head": (request(body, header=header.at(123456)), [body]),
        "bodiless": (bodiless, [b"well\n"]),
        "pipelined": (bodiless + good, [b"well\n", body]),
    }[follows]
    async with serving(handler) as place, calling(place) as caller:
        for sent, expected in ((good, [body]), (good, [body]), (message, answers), (good, [body])):
            await caller.send(sent)
            for answer in expected:
                assert (await caller.read()).body == answer
