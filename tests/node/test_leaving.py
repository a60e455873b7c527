"""Callers of the plane that go away: their work ends on every node, and what they own is freed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
from dataclasses import replace

import numpy as np
import pytest

from meshnet.errors import Code, MeshError
from meshnet.grammar import Want
from meshnet.operations import OwnerId, Reservation
from meshnet.plane.client import PlaneClient
from meshnet.topology import SessionId
from meshnet.wire import ChunkHeader

FREED_WITHIN_S = 5.0
BOUND_S = 20.0


def new_owner() -> OwnerId:
    return OwnerId(str(uuid.uuid4()))


class PlaneCaller:
    """Somebody else's gateway: drives one session, and may show that it lives."""

    def __init__(self, hops) -> None:
        self.client = PlaneClient()
        self.hops = hops
        self.owner = new_owner()
        self.session = SessionId(str(uuid.uuid4()))
        self._tasks: list[asyncio.Task] = []

    def show_itself(self) -> None:
        for hop in self.hops:
            self.begin(self.client.attend(hop.address, self.owner))

    async def reserve(self, tokens: int = 100, *, owned: bool = True) -> None:
        first = self.hops[0]
        owner = self.owner if owned else None
        asked = Reservation(self.session, tokens, first.layers, tuple(self.hops[1:]), owner)
        await self.client.reserve(first.address, first.node, asked, timeout_s=BOUND_S)

    async def send(self, position: int, count: int, index: int = 0, total: int = 1):
        first = self.hops[0]
        ids = np.ones((1, count), np.int32)
        header = ChunkHeader(
            ids.shape,
            "int32",
            self.session,
            chunk_index=index,
            chunk_total=total,
            position=position,
            want=Want("logits"),
            route=tuple(self.hops[1:]),
        )
        return await self.client.forward(first.address, first.node, header, ids, timeout_s=60.0)

    def begin(self, work) -> asyncio.Task:
        task = asyncio.create_task(work)
        self._tasks.append(task)
        return task

    async def vanish(self) -> None:
        """Close every connection, as the system does for a process that was killed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.client.close()


@pytest.fixture
async def mesh(start_node):
    """Two nodes; gives hops, nodes and backends."""
    started = [await start_node("first", 0, 1, num_layers=2, reorder_wait_s=30.0)]
    started.append(await start_node("second", 1, 2, reorder_wait_s=30.0))
    return [list(part) for part in zip(*started, strict=True)]


@contextlib.asynccontextmanager
async def calling(hops):
    caller = PlaneCaller(hops)
    yield caller
    await caller.vanish()


def held(nodes) -> list[tuple[int, int]]:
    tables = [node.stage.sessions for node in nodes]
    return [(len(table), table.reserved_tokens) for table in tables]


async def until(check, timeout_s: float = BOUND_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not check():
            await asyncio.sleep(0.01)


async def attended(nodes) -> None:
    await until(lambda: all(node._owners._here for node in nodes))


@pytest.mark.parametrize("blocked", [0, 1], ids=["in the first node", "in the second"])
async def test_in_prefill_what_waits_ends_and_nothing_more_is_computed(mesh, blocked):
    hops, nodes, backends = mesh
    gate = backends[blocked].block = threading.Event()
    async with calling(hops) as caller:
        caller.show_itself()
        await caller.reserve()
        await attended(nodes)
        for index in range(6):
            caller.begin(caller.send(8 * index, 8, index, 6))
        await until(lambda: len(backends[blocked].calls) == 1)
        await until(lambda: nodes[blocked].stage.queue_depth == 6)
        await caller.vanish()
        gone = time.monotonic()
        # Chunks that waited for their turn leave; the one that computes cannot be stopped.
        await until(lambda: nodes[blocked].stage.queue_depth <= 1, FREED_WITHIN_S)
        gate.set()
        await until(lambda: [node.stage.queue_depth for node in nodes] == [0, 0])
        await until(lambda: held(nodes) == [(0, 0)] * 2, gone + FREED_WITHIN_S - time.monotonic())
    assert len(backends[blocked].calls) == 1


async def test_in_decode_the_session_is_freed_on_every_node(mesh):
    hops, nodes, backends = mesh
    async with calling(hops) as caller:
        caller.show_itself()
        await caller.reserve()
        await attended(nodes)
        await caller.send(0, 8)
        gate = backends[1].block = threading.Event()
        caller.begin(caller.send(8, 1))
        await until(lambda: len(backends[1].calls) == 2)
        await caller.vanish()
        gate.set()
        await until(lambda: held(nodes) == [(0, 0)] * 2, FREED_WITHIN_S)
    assert [len(backend.calls) for backend in backends] == [2, 2]


async def test_between_steps_the_session_is_freed_on_every_node_and_no_other_is(mesh):
    hops, nodes, _ = mesh
    async with calling(hops) as caller, calling(hops) as other, calling(hops) as nobodys:
        for each in (caller, other):
            each.show_itself()
            await each.reserve()
            await each.send(0, 8)
        await nobodys.reserve(owned=False)
        await attended(nodes)
        await until(lambda: all(len(node._owners._here) == 2 for node in nodes))
        assert held(nodes) == [(3, 300)] * 2
        await caller.vanish()
        await until(lambda: held(nodes) == [(2, 200)] * 2, FREED_WITHIN_S)
        await other.send(8, 1)
        await nobodys.send(0, 1)


async def test_an_owner_that_comes_back_at_once_keeps_its_sessions(mesh):
    hops, nodes, _ = mesh
    async with calling(hops) as caller:
        caller.show_itself()
        await caller.reserve()
        await attended(nodes)
        left = [node._owners for node in nodes]
        await caller.vanish()
        await until(lambda: not any(owners._here for owners in left))
        caller.client = PlaneClient()
        caller.show_itself()
        await attended(nodes)
        await until(lambda: not any(owners._leaving for owners in left))
        assert held(nodes) == [(1, 100)] * 2
        await caller.send(0, 8)


async def test_a_caller_that_owns_nothing_may_come_and_go(mesh):
    """As curl does, on a connection for each request: the idle time ends such a session."""
    hops, nodes, _ = mesh
    async with calling(hops) as caller:
        await caller.send(0, 8)
        await caller.client.close()
        caller.client = PlaneClient()
        await caller.send(8, 1)
    assert [number for number, _ in held(nodes)] == [1, 1]


async def test_a_node_that_ends_waits_for_no_owner(mesh):
    hops, nodes, _ = mesh
    async with calling(hops[:1]) as caller:
        caller.show_itself()
        await until(lambda: nodes[0]._owners._here)
        nodes[0].settings = replace(nodes[0].settings, grace_s=600.0)
        await asyncio.wait_for(nodes[0].close(), BOUND_S)


async def test_owners_are_refused_while_the_shard_loads(start_node):
    hop, _, _ = await start_node("loading", 0, 1, load=False)
    async with calling([hop]) as caller:
        with pytest.raises(MeshError) as caught:
            await caller.client.attend(hop.address, caller.owner)
    assert caught.value.code is Code.UNAVAILABLE
