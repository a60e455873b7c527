"""Clients that send or read slowly, or what is no HTTP: they end, and nobody waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from meshnet_gateway.limits import GatewayLimits
from meshnet_gateway.model_text import ModelText
from tests.gateway.conftest import MODEL, Gateway, Serve
from tests.gateway.fakes import FakeFactory, scripted, write_model
from tests.gateway.test_openai_disconnect import close, connect

WAIT_S = 20.0
CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
GET = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@pytest.fixture
def factory(text: ModelText) -> FakeFactory:
    return FakeFactory(scripted(text.encode("h"), text.vocab_size))


@asynccontextmanager
async def connected(gateway: Gateway) -> AsyncIterator[Connection]:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """Give all that comes until the gateway closes the connection."""
    received = b""
    async with asyncio.timeout(WAIT_S):
        with contextlib.suppress(ConnectionResetError):
            while piece := await reader.read(65536):
                received += piece
    return received


async def drip(connection: Connection, data: bytes) -> bytes:
    """Send byte after byte until the gateway has had enough; gives what it answered."""
    reader, writer = connection

    async def send() -> None:
        with contextlib.suppress(OSError):
            for byte in data:
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0.02)

    sending = asyncio.create_task(send())
    try:
        return await rest(reader)
    finally:
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)


async def is_served(gateway: Gateway) -> bool:
    return (await gateway.post(CHAT, BODY))[0] == 200


def error_of(received: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = received.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]


async def test_a_client_that_sends_nothing(serve: Serve, factory: FakeFactory) -> None:
    gateway = await serve(factory, limits=GatewayLimits(head_timeout_s=0.2))
    async with connected(gateway) as (reader, _):
        assert await rest(reader) == b""
    assert await is_served(gateway)


async def test_a_head_byte_after_byte(serve: Serve, factory: FakeFactory) -> None:
    gateway = await serve(factory, limits=GatewayLimits(head_timeout_s=0.3))
    async with connected(gateway) as connection:
        assert await drip(connection, b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 10_000) == b""
    assert await is_served(gateway)


async def test_a_second_head_byte_after_byte(serve: Serve, factory: FakeFactory) -> None:
    gateway = await serve(factory, limits=GatewayLimits(head_timeout_s=1.0))
    async with connected(gateway) as (reader, writer):
        writer.write(GET)
        assert b"200 OK" in await reader.readuntil(b"\r\n\r\n")
        await drip((reader, writer), b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 10_000)
    assert await is_served(gateway)


async def test_a_body_byte_after_byte(serve: Serve, factory: FakeFactory) -> None:
    gateway = await serve(factory, limits=GatewayLimits(body_timeout_s=0.3))
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        b"Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
    )
    async with connected(gateway) as (reader, writer):
        writer.write(head)
        status, error = error_of(await drip((reader, writer), b" " * 100_000))
    assert (status, error["code"]) == (408, "request_timeout")
    assert "body_timeout_s" in error["message"]
    assert factory.sessions == []
    assert await is_served(gateway)


async def test_a_connection_that_rests(serve: Serve, factory: FakeFactory) -> None:
    limits = GatewayLimits(head_timeout_s=30.0, idle_timeout_s=1.0)
    gateway = await serve(factory, limits=limits)
    async with connected(gateway) as (reader, writer):
        writer.write(GET)
        received = await rest(reader)
    assert b"200 OK" in received
    assert received.endswith(b"}")


async def test_a_rest_within_the_bound_is_no_slow_head(serve: Serve, factory: FakeFactory) -> None:
    gateway = await serve(factory, limits=GatewayLimits(head_timeout_s=1.0))
    async with connected(gateway) as (reader, writer):
        for turn in range(2):
            await asyncio.sleep(1.5 * turn)  # longer than a head may take
            writer.write(GET)
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), WAIT_S)
            length = int(head.lower().partition(b"content-length: ")[2].split()[0])
            await reader.readexactly(length)


async def test_an_answer_may_take_longer_than_any_head(serve: Serve, factory: FakeFactory) -> None:
    limits = GatewayLimits(head_timeout_s=1.0, body_timeout_s=1.0, idle_timeout_s=1.0)
    gateway = await serve(factory, limits=limits)
    factory.hold_at = 1
    asked = asyncio.create_task(gateway.post(CHAT, BODY))
    await asyncio.wait_for(factory.holding.wait(), WAIT_S)
    await asyncio.sleep(1.5)
    factory.release.set()
    assert (await asked)[0] == 200


async def test_a_reader_that_stops_loses_its_session(
    serve: Serve, text: ModelText, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = write_model(tmp_path_factory.mktemp("long"), context=10**6)
    long = ModelText.load(directory)
    factory = FakeFactory(scripted(text.encode("h"), text.vocab_size))
    gateway = await serve(factory, models={MODEL: long}, limits=GatewayLimits(write_timeout_s=0.3))
    reader, writer = await connect(gateway, stream=True, logprobs=True, top_logprobs=20)
    assert b"200 OK" in await reader.readline()
    await asyncio.wait_for(factory.all_closed.wait(), 3 * WAIT_S)
    await close(writer)
    assert await is_served(gateway)


async def test_a_reader_that_is_slow_keeps_its_session(serve: Serve, factory: FakeFactory) -> None:
    """It reads some of what waits for it, before the bound is over."""
    gateway = await serve(factory, limits=GatewayLimits(write_timeout_s=5.0))
    reader, writer = await connect(gateway, stream=True, max_tokens=60, logprobs=True)
    received = b""
    async with asyncio.timeout(WAIT_S):
        while b"[DONE]" not in received:
            received += await reader.read(2000)
            await asyncio.sleep(0.005)
    await close(writer)
    assert received.count(b"data: ") > 60


async def test_many_slow_clients_keep_nobody_waiting(serve: Serve, factory: FakeFactory) -> None:
    gateway = await serve(factory, limits=GatewayLimits(head_timeout_s=30.0))
    async with contextlib.AsyncExitStack() as stack:
        for _ in range(200):
            _, writer = await stack.enter_async_context(connected(gateway))
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost:")
        async with asyncio.timeout(WAIT_S):
            assert await is_served(gateway)


async def test_connections_are_bounded(serve: Serve, factory: FakeFactory) -> None:
    gateway = await serve(factory, limits=GatewayLimits(max_connections=3, head_timeout_s=3.0))
    async with contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(connected(gateway)) for _ in range(3)]
        async with connected(gateway) as (reader, writer):
            with contextlib.suppress(OSError):
                writer.write(GET)
            assert await rest(reader) == b""
        for reader, _ in held:
            assert await rest(reader) == b""  # each after its head_timeout_s
        assert await is_served(gateway)


@pytest.mark.parametrize(
    ("sent", "status", "said"),
    [
        (b"GET / HTTP/1.1\r\nX: " + b"x" * 9000 + b"\r\n\r\n", 431, "64 lines of 8190 bytes"),
        (b"GET /" + b"x" * 9000 + b" HTTP/1.1\r\n\r\n", 431, "64 lines of 8190 bytes"),
        (b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 70 + b"\r\n", 431, "64 lines of 8190 bytes"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 64, 400, "HTTP/1.1"),
        (b"hello\r\n\r\n", 400, "HTTP/1.1"),
        (b"GET / HTTP/9.9\r\n\r\n", 400, "HTTP/1.1"),
        (b"GET / HTTP/1.1\r\nContent-Length: x\r\n\r\n", 400, "HTTP/1.1"),
        (
            b"POST / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
            400,
            "HTTP/1.1",
        ),
    ],
)
async def test_what_is_no_request_gets_an_error_in_json(
    serve: Serve,
    factory: FakeFactory,
    caplog: pytest.LogCaptureFixture,
    sent: bytes,
    status: int,
    said: str,
) -> None:
    gateway = await serve(factory)
    async with connected(gateway) as (reader, writer):
        writer.write(sent)
        got, error = error_of(await rest(reader))
    assert (got, error["type"]) == (status, "invalid_request_error")
    assert said in error["message"]
    assert not [record for record in caplog.records if record.exc_info]
    assert await is_served(gateway)
