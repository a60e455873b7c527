"""A proxy in front of a node that counts what passes: requests, header bytes, body bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Count:
    """What one proxy has seen on its way to the node.

    Attributes:
        address: of the proxy.
        requests: per request line's method and path, (header bytes, body bytes).
        connections: accepted.
    """

    address: str = ""
    requests: list[tuple[str, int, int]] = field(default_factory=list)
    connections: int = 0

    def forwards(self) -> list[tuple[int, int]]:
        """Give (header bytes, body bytes) of each POST /forward."""
        return [(head, body) for line, head, body in self.requests if line == "POST /forward"]


@asynccontextmanager
async def counting_proxy(target: str) -> AsyncIterator[Count]:
    """Run a proxy to ``host:port`` `target`; requests must state their Content-Length."""
    count = Count()
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.current_task())
        count.connections += 1
        host, _, port = target.rpartition(":")
        node_reader, node_writer = await asyncio.open_connection(host, int(port))
        back = asyncio.create_task(_copy(node_reader, writer))
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = _content_length(head)
                body = await reader.readexactly(length)
                line = " ".join(head.split(b" ", 2)[i].decode() for i in (0, 1))
                count.requests.append((line, len(head), length))
                node_writer.write(head + body)
                await node_writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            node_writer.close()
            await back
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=1 << 20)
    count.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield count
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass


def _content_length(head: bytes) -> int:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"content-length":
            return int(value)
    return 0
