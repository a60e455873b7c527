"""A gateway that shows nodes it lives: its sessions have an owner wherever they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.gateway.mesh import NUM_LAYERS, Member, Mesh, stub_mesh

BOUND_S = 30.0


@pytest.fixture
async def mesh(text) -> AsyncIterator[Mesh]:
    async with stub_mesh(text) as made:
        yield made


async def until(check) -> None:
    async with asyncio.timeout(BOUND_S):
        while not check():
            await asyncio.sleep(0.01)


def owners(member: Member) -> set[str | None]:
    return {session.owner for session in member.node.stage.sessions._sessions.values()}


async def test_a_session_is_the_gateways_also_on_a_node_that_replaces_another(mesh):
    first = await mesh.join("first", 0, 2)
    last = await mesh.join("last", 2, NUM_LAYERS, delay_s=0.02)
    asked = asyncio.create_task(mesh.ask(max_tokens=150, stream=True))
    ours = mesh.gateway._presence.owner
    await until(lambda: owners(first) == owners(last) == {ours})
    spare = await mesh.join("spare", 2, NUM_LAYERS, delay_s=0.02)
    await last.leave()
    await until(lambda: owners(spare) == {ours})
    assert owners(first) == {ours}
    await until(lambda: spare.node._owners._here[ours, ""] == 1)
    assert await asyncio.wait_for(asked, BOUND_S) == "h" * 150
    assert [member.held() for member in (first, spare)] == [(0, 0), (0, 0)]


async def test_a_node_is_shown_again_after_its_connection_broke(mesh):
    only = await mesh.join("only", 0, NUM_LAYERS)
    await mesh.ask()
    ours = mesh.gateway._presence.owner
    await until(lambda: only.node._owners._here[ours, ""] == 1)
    broken = set(only.node._server._exchanges)
    for exchange in broken:
        exchange.stream.abort()
    await until(lambda: not broken & only.node._server._exchanges)
    await until(lambda: only.node._owners._here[ours, ""] == 1)


async def test_nodes_that_are_gone_cost_a_gateway_nothing(mesh):
    only = await mesh.join("only", 0, NUM_LAYERS)
    await mesh.ask()
    await only.leave()
    await asyncio.wait_for(mesh.gateway._presence.close(), BOUND_S)
    assert not mesh.gateway._presence._tasks
