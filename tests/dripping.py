"""A caller that owes the rest of what it began to send, for the tests of both HTTP servers."""

from __future__ import annotations

import asyncio
import contextlib


async def hold(place: tuple[str, int], first: bytes, drip: bytes) -> bytes:
    """Send `first`, then `drip` ten times a second; gives what came until the server closed.

    It stops to send when an answer comes: what arrives after the server has closed resets the
    connection, and with it goes what was not read yet.
    """
    reader, writer = await asyncio.open_connection(*place)
    begin = asyncio.create_task(reader.read(1 << 16))
    answer = b""
    try:
        writer.write(first)
        with contextlib.suppress(ConnectionError):
            while not (await asyncio.wait({begin}, timeout=0.1))[0]:
                writer.write(drip)
                await writer.drain()
        with contextlib.suppress(ConnectionError):
            piece = await begin
            while piece:
                answer += piece
                piece = await reader.read(1 << 16)
    finally:
        begin.cancel()
        writer.close()
    return answer
