"""The proxy does to bytes what it is told, and passes them on otherwise."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from tests.chaos.proxy import Proxy, proxy

BOUND_S = 20.0
SENT = bytes(range(256)) * 400


@pytest.fixture
async def way() -> AsyncIterator[Proxy]:
    """A proxy to a server that sends back what it receives."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(4096):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with proxy(f"{host}:{port}") as made:
        yield made
    server.close()


async def exchange(way: Proxy, sent: bytes = SENT) -> bytes:
    """Send bytes and give those that come back until as many came, or the connection ends."""
    host, port = way.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    received = b""
    try:
        async with asyncio.timeout(BOUND_S):
            while len(received) < len(sent) and (data := await reader.read(65536)):
                received += data
    except ConnectionError:
        pass
    writer.close()
    return received


async def test_it_passes_everything_on(way: Proxy):
    assert await exchange(way) == SENT


async def test_it_splits(way: Proxy):
    way.piece_bytes = 7
    assert await exchange(way, SENT[:5000]) == SENT[:5000]


async def test_it_delays_each_read(way: Proxy):
    way.delay_s = 0.15
    began = time.monotonic()
    assert await exchange(way, b"x") == b"x"
    assert time.monotonic() - began >= 0.3


async def test_it_cuts_after_some_bytes_and_then_passes_on_again(way: Proxy):
    way.cut_after = 1000
    received = await exchange(way)
    assert len(received) < 1000
    assert SENT.startswith(received)
    assert await exchange(way) == SENT


async def test_it_refuses_until_it_is_healed(way: Proxy):
    way.refuses = True
    assert await exchange(way) == b""
    way.heal()
    assert await exchange(way) == SENT


async def test_it_swallows_and_its_connections_end_when_they_are_reset(way: Proxy):
    way.swallows = True
    exchanging = asyncio.create_task(exchange(way))
    done, _ = await asyncio.wait({exchanging}, timeout=0.3)
    assert not done
    way.reset()
    assert await exchanging == b""
