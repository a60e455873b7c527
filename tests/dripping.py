"""A caller that owes the rest of what it began to send, for the tests of both HTTP servers."""

from __future__ import annotations

import asyncio
import contextlib


async def hold(place: tuple[str, int], first: bytes, drip: bytes) -> bytes:
    """Send `first`, then `drip` ten times a second; gives what came until the server closed."""
    reader, writer = await asyncio.open_connection(*place)
    writer.write(first)
    answer = asyncio.create_task(reader.read())
    with contextlib.suppress(ConnectionError):
        while not (await asyncio.wait({answer}, timeout=0.1))[0]:
            writer.write(drip)
            await writer.drain()
    writer.close()
    with contextlib.suppress(ConnectionError):
        return await answer
    return b""
