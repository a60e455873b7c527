"""Handlers, raw callers and misbehaving nodes for the activation plane's tests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from meshnet.cache_wire import CacheHeader, MoveHeader
from meshnet.chunk import Answer, Chunk
from meshnet.compression import CompressionPolicies
from meshnet.credentials import Credentials
from meshnet.operations import OwnerId, Rebuild, Release, Reservation
from meshnet.plane.caller import Caller, CallerGoneError
from meshnet.plane.handler import PlaneHandler, PlaneLimits
from meshnet.plane.server import PlaneServer
from meshnet.topology import SessionId
from meshnet.wire import AnswerHeader, ChunkHeader, Headers, pack_chunk

P16 = bytes.fromhex("803f0040404080400000008080bfc07f")
"""1, 2, 3, 4, 0, -0, -1 and NaN as bfloat16."""

BOUND_S = 10.0
"""How long anything that must happen may take before a test fails."""


def new_session() -> SessionId:
    return SessionId(str(uuid.uuid4()))


def chunk_header(*shape: int, **changes: Any) -> ChunkHeader:
    return ChunkHeader(shape or (1, 1, 8), "bfloat16", new_session(), **changes)


def tensor_of(body: bytes, *shape: int) -> npt.NDArray[Any]:
    return np.frombuffer(body, ml_dtypes.bfloat16).reshape(shape or (1, 1, -1))


def answer_to(chunk: Chunk, tensor: npt.NDArray[Any] | None) -> Answer:
    asked = chunk.header
    shape = None if tensor is None else tuple(tensor.shape)
    header = AnswerHeader(shape, asked.dtype, asked.session, asked.chunk_index, asked.chunk_total)
    return Answer(header, tensor)


class Arriving:
    """A cache that is received in pieces of some odd lengths."""

    def __init__(self, header: CacheHeader) -> None:
        self.header = header
        self.kept = self.dropped = False
        left, lengths = header.num_bytes, itertools.cycle((1, 7, 300, 70_000))
        self.memory = []
        while left:
            self.memory.append(memoryview(bytearray(min(left, next(lengths)))))
            left -= len(self.memory[-1])

    @property
    def received(self) -> bytes:
        return b"".join(self.memory)

    def keep(self) -> None:
        self.kept = True

    def drop(self) -> None:
        self.dropped = True


class EchoHandler:
    """Answers each chunk with its own tensor; keeps what it was given."""

    def __init__(self) -> None:
        self.chunks: list[Chunk] = []
        self.reserved: list[Reservation] = []
        self.rebuilt: list[Rebuild] = []
        self.owners: list[OwnerId] = []
        self.released: list[SessionId] = []
        self.moves: list[MoveHeader] = []
        self.caches: list[Arriving] = []
        self.alone: list[bool] = []

    def forward(self, chunk: Chunk, caller: Caller) -> Answer:
        self.chunks.append(chunk)
        return answer_to(chunk, chunk.tensor)

    def reserve(self, asked: Reservation, caller: Caller) -> None:
        self.reserved.append(asked)

    def move(self, asked: MoveHeader, caller: Caller) -> None:
        self.moves.append(asked)

    def take_cache(self, header: CacheHeader, caller: Caller) -> Arriving:
        arriving = Arriving(header)
        self.caches.append(arriving)
        return arriving

    def rebuild(self, asked: Rebuild, caller: Caller) -> None:
        self.rebuilt.append(asked)

    def release(self, asked: Release, caller: Caller) -> None:
        self.released.append(asked.session)
        self.alone.append(asked.alone)

    def attend(self, owner: OwnerId, caller: Caller) -> None:
        self.owners.append(owner)

    def get(self, path: str) -> tuple[int, str, bytes] | None:
        return (200, "text/plain", b"well\n") if path == "/healthz" else None


class Flag:
    """An event that a handler's thread and a test on the event loop share."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.set = self._event.set
        self.clear = self._event.clear
        self.is_set = self._event.is_set
        self.block = self._event.wait

    async def wait(self) -> None:
        """Wait without blocking the event loop, for as long as anything may take."""
        assert await asyncio.to_thread(self._event.wait, BOUND_S)


class GateHandler(EchoHandler):
    """Holds every chunk until `gate` is set; says when one came in and when one was cancelled."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = Flag()
        self.entered = Flag()
        self.cancelled = Flag()

    def forward(self, chunk: Chunk, caller: Caller) -> Answer:
        self.entered.set()
        woken = threading.Event()
        try:
            with caller.waking(woken.set):
                while not self.gate.block(0.01):
                    if woken.is_set():
                        raise CallerGoneError
        except CallerGoneError:
            self.cancelled.set()
            raise
        return super().forward(chunk, caller)


@contextlib.asynccontextmanager
async def serving(
    handler: PlaneHandler,
    *,
    limits: PlaneLimits | None = None,
    tls: Credentials | None = None,
) -> AsyncIterator[tuple[str, int]]:
    """Serve `handler` on a free port of 127.0.0.1."""
    server = PlaneServer(handler, policies=CompressionPolicies(), limits=limits, tls=tls)
    try:
        yield await server.start("127.0.0.1", 0)
    finally:
        await server.close(0.0)


@dataclass(frozen=True)
class RawAnswer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def closes(self) -> bool:
        return self.headers.get("connection") == "close"


class RawCaller:
    """A caller that sends just what it is told and reads answers apart from the product's code."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        async with asyncio.timeout(BOUND_S):
            await self.writer.drain()

    async def read(self, *, head_only: bool = False) -> RawAnswer:
        async with asyncio.timeout(BOUND_S):
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            first, *lines = head[:-4].split("\r\n")
            headers = {n.lower(): v for n, v in (line.split(": ", 1) for line in lines)}
            length = 0 if head_only else int(headers.get("content-length", "0"))
            return RawAnswer(int(first.split()[1]), headers, await self.reader.readexactly(length))

    async def at_end(self) -> bool:
        """Tell whether the server closes without another byte, in order or by a reset."""
        async with asyncio.timeout(BOUND_S):
            try:
                return await self.reader.read(1) == b""
            except ConnectionError:
                return True


@contextlib.asynccontextmanager
async def calling(place: tuple[str, int]) -> AsyncIterator[RawCaller]:
    """Open a raw connection."""
    reader, writer = await asyncio.open_connection(*place)
    try:
        yield RawCaller(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


def request(
    body: bytes = P16,
    *extra: str,
    header: ChunkHeader | None = None,
    without: str = "",
    length: int | None = -1,
    target: str = "/forward",
    method: str = "POST",
) -> bytes:
    """Write one request; `without` drops a field, `extra` lines are added; length -1 is right."""
    fields: Headers = [("Host", "node"), *pack_chunk(header or chunk_header())]
    lines = [f"{name}: {value}" for name, value in fields if name != without]
    if length is not None:
        lines.append(f"Content-Length: {len(body) if length < 0 else length}")
    head = "\r\n".join([f"{method} {target} HTTP/1.1", *lines, *extra, "", ""])
    return head.encode("latin-1") + body


Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@contextlib.asynccontextmanager
async def misbehaving(script: Script) -> AsyncIterator[str]:
    """Run `script` for each connection to the address given."""
    tasks: set[asyncio.Task[None]] = set()

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await script(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(run, "127.0.0.1", 0, family=socket.AF_INET)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def read_request(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """Read one request: its head and its body."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    length = next(
        (
            int(v)
            for n, _, v in (x.partition(": ") for x in head.split("\r\n"))
            if n == "Content-Length"
        ),
        0,
    )
    return head, await reader.readexactly(length)


async def expect_good(caller: RawCaller) -> None:
    """Assert that the connection still serves."""
    await caller.send(request())
    answer = await caller.read()
    assert (answer.status, answer.body) == (200, P16)
    assert not answer.closes


def problem(body: bytes) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(body)
    return parsed
