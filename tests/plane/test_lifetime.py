"""How long connections and requests live: deadlines, callers that leave, graceful closing."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from meshnet.compression import CompressionPolicies
from meshnet.errors import ConfigError
from meshnet.plane.handler import PlaneLimits
from meshnet.plane.server import PlaneServer
from tests.plane.doubles import (
    BOUND_S,
    P16,
    EchoHandler,
    GateHandler,
    calling,
    chunk_header,
    expect_good,
    problem,
    request,
    serving,
)


async def test_connections_are_served_at_the_same_time() -> None:
    handler = GateHandler()
    async with serving(handler) as place, calling(place) as one, calling(place) as two:
        await one.send(request())
        await asyncio.wait_for(handler.entered.wait(), BOUND_S)
        handler.entered.clear()
        await two.send(request())
        await asyncio.wait_for(handler.entered.wait(), BOUND_S)
        handler.gate.set()
        assert (await one.read()).status == (await two.read()).status == 200


@pytest.mark.parametrize(
    ("sent", "words"),
    [(request()[:50], "the head"), (request()[:-1], "the body")],
    ids=["head", "body"],
)
async def test_a_slow_sender_times_out(sent: bytes, words: str) -> None:
    limits = PlaneLimits(read_timeout_s=0.2, min_bytes_per_s=1 << 20)
    async with serving(EchoHandler(), limits=limits) as place, calling(place) as caller:
        await expect_good(caller)
        await caller.send(sent)
        answer = await caller.read()
        assert answer.status == 408
        assert words in problem(answer.body)["detail"]
        assert answer.closes
        assert await caller.at_end()


async def test_trickling_does_not_move_the_deadline() -> None:
    limits = PlaneLimits(read_timeout_s=0.3)
    async with serving(EchoHandler(), limits=limits) as place, calling(place) as caller:

        async def trickle() -> None:
            with contextlib.suppress(ConnectionError):
                for byte in request():
                    caller.writer.write(bytes([byte]))
                    await asyncio.sleep(0.05)

        task = asyncio.create_task(trickle())
        assert (await caller.read()).status == 408
        task.cancel()


async def test_an_idle_connection_is_closed_after_its_time() -> None:
    limits = PlaneLimits(idle_timeout_s=0.2)
    async with serving(EchoHandler(), limits=limits) as place, calling(place) as caller:
        await expect_good(caller)
        assert await caller.at_end()


async def test_a_handler_may_take_longer_than_any_deadline_of_the_connection() -> None:
    handler = GateHandler()
    limits = PlaneLimits(read_timeout_s=0.1, idle_timeout_s=0.1, write_timeout_s=0.1)
    async with serving(handler, limits=limits) as place, calling(place) as caller:
        await caller.send(request())
        await asyncio.wait_for(handler.entered.wait(), BOUND_S)
        asyncio.get_running_loop().call_later(0.4, handler.gate.set)
        assert (await caller.read()).status == 200


async def test_a_caller_that_does_not_read_its_answer_is_dropped() -> None:
    limits = PlaneLimits(write_timeout_s=0.2, min_bytes_per_s=1 << 30)
    header = chunk_header(1, 2048, 16384)
    body = bytes(64 << 20)
    server = PlaneServer(EchoHandler(), policies=CompressionPolicies(), limits=limits)
    place = await server.start("127.0.0.1", 0)
    async with calling(place) as caller:
        caller.reader._transport.pause_reading()  # type: ignore[attr-defined]
        caller.writer.write(request(body, header=header))
        async with asyncio.timeout(BOUND_S):
            while not server._exchanges:
                await asyncio.sleep(0.01)
            while server._exchanges:
                await asyncio.sleep(0.01)
    await server.close(0.0)


@pytest.mark.parametrize("abrupt", [False, True], ids=["eof", "reset"])
async def test_the_handler_is_cancelled_when_its_caller_goes_away(abrupt: bool) -> None:
    handler = GateHandler()
    async with serving(handler) as place, calling(place) as caller:
        await caller.send(request())
        await asyncio.wait_for(handler.entered.wait(), BOUND_S)
        if abrupt:
            caller.writer.transport.abort()
        else:
            caller.writer.close()
        await asyncio.wait_for(handler.cancelled.wait(), BOUND_S)


async def test_a_caller_that_leaves_within_its_body_harms_no_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    handler = EchoHandler()
    async with serving(handler) as place:
        async with calling(place) as caller:
            await caller.send(request()[:-1])
            caller.writer.write_eof()
            answer = await caller.read()
            assert (answer.status, answer.closes) == (400, True)
        async with calling(place) as caller:
            await caller.send(request()[:-1])
            caller.writer.transport.abort()
        async with calling(place) as caller:
            await expect_good(caller)
    assert len(handler.chunks) == 1
    assert not caplog.records


async def test_one_connection_too_many_is_503() -> None:
    async with (
        serving(EchoHandler(), limits=PlaneLimits(max_connections=1)) as place,
        calling(place) as one,
    ):
        await expect_good(one)
        async with calling(place) as two:
            answer = await two.read()
            assert (answer.status, answer.closes) == (503, True)
            assert "retry-after" in answer.headers
        await expect_good(one)


async def test_p1_closing_ends_idle_connections_and_finishes_requests() -> None:
    handler = GateHandler()
    server = PlaneServer(handler, policies=CompressionPolicies())
    place = await server.start("127.0.0.1", 0)
    async with calling(place) as idle, calling(place) as fresh, calling(place) as busy:
        await idle.send(b"GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n")
        assert not (await idle.read()).closes
        await busy.send(request())
        await asyncio.wait_for(handler.entered.wait(), BOUND_S)
        closing = asyncio.create_task(server.close(BOUND_S))
        assert await idle.at_end()
        assert await fresh.at_end()
        with pytest.raises(ConnectionError):
            await asyncio.open_connection(*place)
        assert not closing.done()
        handler.gate.set()
        answer = await busy.read()
        assert (answer.status, answer.body, answer.closes) == (200, P16, True)
        await asyncio.wait_for(closing, BOUND_S)


async def test_closing_cancels_what_outlasts_the_grace() -> None:
    handler = GateHandler()
    server = PlaneServer(handler, policies=CompressionPolicies())
    place = await server.start("127.0.0.1", 0)
    async with calling(place) as busy:
        await busy.send(request())
        await asyncio.wait_for(handler.entered.wait(), BOUND_S)
        await asyncio.wait_for(server.close(0.1), BOUND_S)
        assert handler.cancelled.is_set()
        assert await busy.at_end()


async def test_p2_a_taken_port_is_named() -> None:
    async with serving(EchoHandler()) as (host, port):
        with pytest.raises(ConfigError, match=rf"127.0.0.1:{port}: address already in use"):
            await PlaneServer(EchoHandler(), policies=CompressionPolicies()).start(host, port)
