"""Nodes that do not answer: told apart by a question from nodes that are only slow."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator

import numpy as np
import pytest

from meshnet.errors import NextHopError
from meshnet.operations import Rebuild, Reservation
from meshnet.patience import PatienceLimits
from meshnet.plane.caller import Caller
from meshnet.plane.client import PlaneClient
from meshnet.plane.hop_client import HopClient
from meshnet.plane.late import LateAnswers
from meshnet.topology import Hop, LayerRange, NodeId
from tests.plane.doubles import BOUND_S, P16, GateHandler, chunk_header, serving, tensor_of

NODE = NodeId("hop")
LIMITS = PatienceLimits(least_s=0.05, first_s=0.1, most_s=0.2)
FAR_S = 600.0
"""The requests' own timeout, which nothing here may wait for."""
TENSOR = tensor_of(P16)


class Questions:
    """Asks as a node does, and counts."""

    def __init__(self) -> None:
        self.client = PlaneClient()
        self.asked = 0
        self.answered = asyncio.Event()

    async def __call__(self, address: str, timeout_s: float) -> None:
        self.asked += 1
        await self.client.get(address, "/healthz", timeout_s=timeout_s)
        self.answered.set()


@pytest.fixture
def questions() -> Questions:
    return Questions()


@pytest.fixture
async def late(questions) -> AsyncIterator[LateAnswers]:
    watching = LateAnswers(questions, LIMITS, answer_s=0.5)
    watching.start()
    yield watching
    await watching.close()
    await questions.client.close()


@contextlib.contextmanager
def hung_node():
    """Connections are accepted by the system, as for a stopped process; nobody reads."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


class Threads:
    """A node's client, on threads."""

    def __init__(self, late: LateAnswers) -> None:
        self.client = HopClient(late=late)
        self.caller = Caller()

    async def forward(self, address: str):
        return await asyncio.to_thread(
            self.client.forward,
            address,
            NODE,
            chunk_header(position=0),
            TENSOR,
            timeout_s=FAR_S,
            caller=self.caller,
        )

    async def reserve(self, address: str):
        return await asyncio.to_thread(
            self.client.reserve,
            address,
            NODE,
            reservation(),
            timeout_s=FAR_S,
            caller=self.caller,
        )

    async def close(self) -> None:
        self.client.close()


class Tasks:
    """A gateway's client, on the event loop."""

    def __init__(self, late: LateAnswers) -> None:
        self.client = PlaneClient(late=late)

    async def forward(self, address: str):
        return await self.client.forward(
            address, NODE, chunk_header(position=0), TENSOR, timeout_s=FAR_S
        )

    async def reserve(self, address: str):
        return await self.client.reserve(address, NODE, reservation(), timeout_s=FAR_S)

    async def rebuild(self, address: str):
        asked = Rebuild(chunk_header().session, 8, (Hop(NodeId("other"), "n:1", LayerRange(1, 2)),))
        return await self.client.rebuild(address, NODE, asked, timeout_s=FAR_S)

    async def close(self) -> None:
        await self.client.close()


def reservation() -> Reservation:
    return Reservation(chunk_header().session, 10, LayerRange(0, 1))


@pytest.fixture(params=[Threads, Tasks])
async def sender(request, late):
    made = request.param(late)
    yield made
    await made.close()


@pytest.mark.parametrize("action", ["forward", "reserve"])
async def test_a_node_that_hangs_is_named_long_before_the_timeout(sender, action):
    with hung_node() as address:
        began = time.monotonic()
        with pytest.raises(NextHopError) as caught:
            await asyncio.wait_for(getattr(sender, action)(address), FAR_S / 10)
    assert caught.value.failed_node == NODE
    assert caught.value.code.http_status == 504
    assert "GET /healthz" in caught.value.message
    assert time.monotonic() - began < FAR_S / 10


async def test_a_node_that_hangs_in_a_rebuild_is_named(late):
    client = Tasks(late)
    with hung_node() as address, pytest.raises(NextHopError) as caught:
        await asyncio.wait_for(client.rebuild(address), FAR_S / 10)
    assert caught.value.failed_node == NODE
    await client.close()


async def test_a_node_that_is_slow_but_answers_is_waited_for(sender, questions, late):
    late._answer_s = BOUND_S
    handler = GateHandler()
    async with serving(handler) as (host, port):
        answer = asyncio.create_task(sender.forward(f"{host}:{port}"))
        for _ in range(3):  # late again and again, and asked each time
            await asyncio.wait_for(questions.answered.wait(), BOUND_S)
            questions.answered.clear()
        assert not answer.done()
        handler.gate.set()
        assert np.array_equal(
            (await asyncio.wait_for(answer, BOUND_S)).tensor.view(np.uint16), TENSOR.view(np.uint16)
        )


async def test_a_node_that_hangs_after_it_was_slow_is_named(sender, questions, late, monkeypatch):
    late._answer_s = BOUND_S
    handler = GateHandler()
    async with serving(handler) as (host, port):
        answer = asyncio.create_task(sender.forward(f"{host}:{port}"))
        await asyncio.wait_for(questions.answered.wait(), BOUND_S)
        assert not answer.done()
        late._answer_s = 0.5
        with hung_node() as elsewhere:
            # From now on it is as if the process had been stopped.
            get = questions.client.get
            monkeypatch.setattr(
                questions.client, "get", lambda _, path, **options: get(elsewhere, path, **options)
            )
            with pytest.raises(NextHopError) as caught:
                await asyncio.wait_for(answer, BOUND_S)
        assert caught.value.failed_node == NODE
        handler.gate.set()


async def test_a_caller_is_served_again_after_one_request_was_given_up(sender, late):
    """What interrupted one wait does not end the next one of the same caller."""
    with hung_node() as address, pytest.raises(NextHopError):
        await asyncio.wait_for(sender.forward(address), BOUND_S)
    handler = GateHandler()
    handler.gate.set()
    late._answer_s = BOUND_S
    async with serving(handler) as (host, port):
        assert (await sender.forward(f"{host}:{port}")).tensor is not None


async def test_a_caller_that_cancels_is_not_told_of_a_lost_node(late):
    client = Tasks(late)
    with hung_node() as address:
        sending = asyncio.create_task(client.forward(address))
        await asyncio.sleep(0)
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    assert len(late._flights) == 0
    await client.close()
