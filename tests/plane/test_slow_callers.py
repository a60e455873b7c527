"""Callers that open many connections and send or read slowly keep nobody else out."""

from __future__ import annotations

import asyncio
import contextlib
import time

from meshnet.compression import CompressionPolicies
from meshnet.plane.server import PlaneLimits, PlaneServer
from tests.dripping import hold
from tests.plane.doubles import (
    BOUND_S,
    P16,
    EchoHandler,
    calling,
    chunk_header,
    request,
    serving,
)

LIMITS = PlaneLimits(
    read_timeout_s=1.0,
    idle_timeout_s=1.0,
    write_timeout_s=1.0,
    min_bytes_per_s=1 << 30,
    max_connections=60,
    spare_idle_s=0.2,
)
NUM_EACH = 40
"""Silent callers and trickling ones: together more than there is room for."""
NUM_BODIES = 15
NUM_HONEST = 40


async def test_slow_callers_end_and_honest_ones_are_served_meanwhile() -> None:
    handler = EchoHandler()
    server = PlaneServer(handler, policies=CompressionPolicies(), limits=LIMITS)
    place = await server.start("127.0.0.1", 0)
    long_body = request(b"", header=chunk_header(1, 4096, 4096), length=1 << 25)
    slow = [
        *(asyncio.create_task(hold(place, long_body, b"x")) for _ in range(NUM_BODIES)),
        *(asyncio.create_task(hold(place, b"", b"")) for _ in range(NUM_EACH)),
        *(asyncio.create_task(hold(place, b"POST /forward HT", b"T")) for _ in range(NUM_EACH)),
    ]
    try:
        served = 0
        began = time.monotonic()
        until = began + BOUND_S
        slowest_s = 0.0
        while served < NUM_HONEST and time.monotonic() < until:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                async with calling(place) as caller:
                    asked = time.monotonic()
                    await caller.send(request())
                    answer = await caller.read()
                    slowest_s = max(slowest_s, time.monotonic() - asked)
                    served += answer.status == 200 and answer.body == P16
        print(f"{served} in {time.monotonic() - began:.2f} s, the slowest {slowest_s:.3f} s")
        assert served == NUM_HONEST
        answers = await asyncio.wait_for(asyncio.gather(*slow), BOUND_S)
        assert any(body.startswith(b"HTTP/1.1 408 ") for body in answers[:NUM_BODIES])
        assert all(not body or body[9:12] in (b"408", b"503") for body in answers)
        async with asyncio.timeout(BOUND_S):
            while server._exchanges:
                await asyncio.sleep(0.01)
    finally:
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        await server.close(0.0)


async def test_a_long_body_has_a_deadline_for_each_piece() -> None:
    """What a caller announces does not buy it time: 64 MiB at 16 MiB a second are 4 s."""
    limits = PlaneLimits(read_timeout_s=0.3, min_bytes_per_s=1 << 24)
    server = PlaneServer(EchoHandler(), policies=CompressionPolicies(), limits=limits)
    place = await server.start("127.0.0.1", 0)
    header = chunk_header(1, 2048, 16384)
    async with calling(place) as caller:
        began = time.monotonic()
        await caller.send(request(bytes(1 << 20), header=header, length=64 << 20))
        answer = await caller.read()
        elapsed_s = time.monotonic() - began
        assert answer.status == 408
        assert b"8388608 bytes of the body did not arrive within 0.8 s" in answer.body
        assert elapsed_s >= 0.7
    await server.close(0.0)


async def test_a_long_body_that_comes_steadily_is_served() -> None:
    async with serving(EchoHandler()) as place, calling(place) as caller:
        body = bytes(range(256)) * (5 << 14)
        await caller.send(request(body, header=chunk_header(1, 640, 16384)))
        assert (await caller.read()).body == body


async def test_a_caller_that_owes_a_head_loses_its_place_to_one_that_comes() -> None:
    limits = PlaneLimits(max_connections=1, spare_idle_s=0.1)
    server = PlaneServer(EchoHandler(), policies=CompressionPolicies(), limits=limits)
    place = await server.start("127.0.0.1", 0)
    async with calling(place) as idle:
        await idle.send(request())
        assert (await idle.read()).status == 200
        async with asyncio.timeout(BOUND_S):
            while True:
                async with calling(place) as caller:
                    await caller.send(request())
                    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                        if (await caller.read()).status == 200:
                            break
                    await asyncio.sleep(0.05)
        assert await idle.at_end()
    await server.close(0.0)


async def test_slow_bodies_lose_their_places_once_more_than_half_are_taken() -> None:
    """They send more than the least rate asks for, and would hold a node for minutes."""
    limits = PlaneLimits(
        max_connections=4, spare_idle_s=0.1, min_bytes_per_s=1.0, crowded_bytes_per_s=1 << 30
    )
    server = PlaneServer(EchoHandler(), policies=CompressionPolicies(), limits=limits)
    place = await server.start("127.0.0.1", 0)
    body = request(b"", header=chunk_header(1, 64, 4096), length=1 << 19)

    async def count(number: int) -> None:
        async with asyncio.timeout(BOUND_S):
            while sum(one.stream.receiving is not None for one in server._exchanges) != number:
                await asyncio.sleep(0.01)

    async def ask() -> None:
        async with calling(place) as caller:
            await caller.send(request())
            assert (await caller.read()).body == P16
        async with asyncio.timeout(BOUND_S):
            while len(server._exchanges) > len(slow):
                await asyncio.sleep(0.01)

    slow = []
    try:
        for number in (1, 2):
            slow.append(asyncio.create_task(hold(place, body, b"x")))
            await count(number)
        await asyncio.sleep(limits.spare_idle_s)
        await ask()
        assert not any(task.done() for task in slow), "half of the places are no crowd"
        slow.append(asyncio.create_task(hold(place, body, b"x")))
        async with asyncio.timeout(BOUND_S):
            while not any(task.done() for task in slow):
                await ask()
        answers = [task.result() for task in slow if task.done()]
        for answer in filter(None, answers):  # a reset may take it away
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert b"crowded_bytes_per_s" in answer
    finally:
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        await server.close(0.0)
