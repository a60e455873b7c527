"""A way to a node that delays, drops, cuts, splits or refuses what passes, when it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_READ_BYTES = 65536


class Proxy:
    """Listens at `address` for connections to `target`; as it is made, it only passes bytes on.

    Attributes:
        target: ``host:port``; may be set after the address is known.
        delay_s: that every read waits before it is passed on.
        piece_bytes: what is written at once; None for as much as came.
        swallows: bytes vanish, and no one is told.
        refuses: new connections are reset.
        cut_after: bytes in both directions after which connections are reset; None for never.
    """

    def __init__(self) -> None:
        self.address = ""
        self.target = ""
        self.heal()
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    def heal(self) -> None:
        """Only pass bytes on, from now."""
        self.delay_s = 0.0
        self.piece_bytes: int | None = None
        self.swallows = False
        self.refuses = False
        self.cut_after: int | None = None

    def reset(self) -> None:
        """Reset every connection, on both sides."""
        for writer in list(self._writers):
            writer.transport.abort()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until either side ends it."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        sides = [writer]
        try:
            if self.refuses:
                return
            host, _, port = self.target.rpartition(":")
            node_reader, node_writer = await asyncio.open_connection(host, int(port))
            sides.append(node_writer)
            self._writers.update(sides)
            pumps = {
                asyncio.create_task(self._pump(reader, node_writer)),
                asyncio.create_task(self._pump(node_reader, writer)),
            }
            try:
                # Either end closing ends both: no one on the plane half-closes.
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
        except (OSError, asyncio.CancelledError):
            pass  # either side failed, or `close` ends this
        finally:
            self._writers.difference_update(sides)
            for side in sides:
                if self.refuses or self.swallows:
                    side.transport.abort()
                side.close()
            self._tasks.discard(task)

    async def close(self) -> None:
        """End every connection."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if self.swallows:
                    continue
                if self.cut_after is not None:
                    data = data[: max(0, self.cut_after)]
                    self.cut_after -= len(data)
                size = self.piece_bytes or len(data)
                for start in range(0, len(data), size):
                    writer.write(data[start : start + size])
                    await writer.drain()
                    if self.piece_bytes is not None:
                        await asyncio.sleep(0)
                if self.cut_after is not None and self.cut_after <= 0:
                    self._end_connections()
                    return

    def _end_connections(self) -> None:
        """End every connection after what was written to it, as a process that ends does."""
        for writer in list(self._writers):
            writer.close()
        self.cut_after = None


@asynccontextmanager
async def proxy(target: str = "") -> AsyncIterator[Proxy]:
    """Run a proxy for the time of the context."""
    made = Proxy()
    made.target = target
    server = await asyncio.start_server(made.accept, "127.0.0.1", 0)
    made.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield made
    finally:
        server.close()
        await made.close()
