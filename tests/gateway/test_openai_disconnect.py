"""Clients that go away or read slowly: their sessions end with them, or wait for them."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from typing import Any

import pytest

from meshnet_gateway.model_text import ModelText
from tests.gateway.conftest import MODEL, Gateway, Serve
from tests.gateway.fakes import FakeFactory, scripted, write_model

HI: list[Any] = [{"role": "user", "content": "hi"}]


async def connect(
    gateway: Gateway, **changes: Any
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a request on a plain socket, whose end the test decides."""
    host, port = gateway.url.removeprefix("http://").split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # fills soon when not read
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
    reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
    body = json.dumps({"model": MODEL, "messages": HI, **changes}).encode()
    writer.write(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    await writer.drain()
    return reader, writer


async def close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hold_at", [0, 3])
@pytest.mark.parametrize("choices", [1, 3])
async def test_a_client_that_goes_ends_its_sessions(
    serve: Serve,
    text: ModelText,
    caplog: pytest.LogCaptureFixture,
    stream: bool,
    hold_at: int,
    choices: int,
) -> None:
    """Trouble report S2: in the prefill and after some tokens."""
    factory = FakeFactory(scripted(text.encode("h"), text.vocab_size), hold_at=hold_at)
    gateway = await serve(factory)
    with caplog.at_level(logging.INFO):
        reader, writer = await connect(gateway, stream=stream, n=choices)
        await asyncio.wait_for(factory.holding.wait(), 5)
        if stream and hold_at:
            assert b"200 OK" in await reader.readline()
        await close(writer)
        await asyncio.wait_for(factory.all_closed.wait(), 5)
    assert factory.num_open == 0
    assert not [record for record in caplog.records if record.exc_info]
    factory.hold_at = None
    body = {"model": MODEL, "messages": HI, "max_tokens": 2}
    assert (await gateway.post("/v1/chat/completions", body))[0] == 200


async def test_a_reader_that_stops_reading_holds_its_session_back(
    serve: Serve, text: ModelText, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = write_model(tmp_path_factory.mktemp("long"), context=10**6)
    long = ModelText.load(directory)
    factory = FakeFactory(scripted(text.encode("h"), text.vocab_size))
    gateway = await serve(factory, models={MODEL: long})
    # Logprobs make events long.
    reader, writer = await connect(gateway, stream=True, logprobs=True, top_logprobs=20)
    await reader.readline()
    (session,) = factory.sessions
    # The socket's buffers fill, then the steps stop: wait for the count to stand still.
    count, still = -1, 0
    for _ in range(3000):
        await asyncio.sleep(0.01)
        still = still + 1 if len(session.wants) == count else 0
        count = len(session.wants)
        if still == 25:
            break
    assert still == 25
    assert count < 500_000
    assert not session.closed
    await close(writer)
    await asyncio.wait_for(factory.all_closed.wait(), 5)
