"""A mesh whose nodes want route grants: what it answers, fails over and drains as without."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from meshnet.control.client import ControlClient
from meshnet.control.grant_issuer import GrantTimes
from meshnet.errors import Code, MeshError
from meshnet.grammar import Want
from meshnet_gateway.recoveries import Way
from tests.gateway.mesh import Mesh, stub_mesh

BOUND_S = 60.0
TOKENS = 40
TEXT = "h" * TOKENS


@pytest.fixture(params=[60.0, 4.0], ids=["fresh", "stale at once"])
async def mesh(text, request) -> Any:
    """Where grants are stale at once, each that is shown later is one of GrantRoute."""
    async with stub_mesh(text, grants=GrantTimes(ttl_s=request.param)) as made:
        await made.join("left", 0, 2, delay_s=0.02)
        await made.join("right", 2, 4, delay_s=0.02)
        if request.param < 60.0:
            selector = made.gateway._pipelines.shared.selector
            select = selector._select

            async def stale(*arguments):
                route = await select(*arguments)
                return replace(route, grant=replace(route.grant, fresh_until=0.0))

            selector._select = stale
        yield made


async def until(check: Any) -> None:
    async with asyncio.timeout(BOUND_S):
        while not check():
            await asyncio.sleep(0.005)


def decoding(mesh: Mesh, name: str) -> bool:
    return mesh.members[name].node.stage.num_tokens > 7


def refusals(mesh: Mesh) -> Counter[str]:
    """Count from now on what nodes refuse, by reason."""
    found: Counter[str] = Counter()
    for member in mesh.members.values():
        gate = member.node.grants
        for name in ("admit", "check", "check_move"):
            work = getattr(gate, name)

            def counted(*arguments, work=work):
                try:
                    return work(*arguments)
                except Exception as error:
                    found[getattr(error, "reason", None) or str(error)] += 1
                    raise

            setattr(gate, name, counted)
    return found


async def test_sessions_run_with_grants_and_no_others(mesh):
    found = refusals(mesh)
    assert await mesh.ask(max_tokens=5) == "hhhhh"
    assert not found
    for member in mesh.members.values():
        assert member.node.grants.required
        assert member.held() == (0, 0)
    # Without one, a route alone opens nothing.
    pipeline = await mesh.gateway._pipelines.open(mesh.model, max_tokens=9)
    pipeline._routed._pipeline.show(None)
    with pytest.raises(Exception, match="X-Meshnet-Grant is missing"):
        await pipeline.step([1, 2], Want("logits"))
    await pipeline.close()
    assert set(found) == {"GRANT_MISSING"}
    assert await mesh.ask(max_tokens=5) == "hhhhh"


@pytest.mark.parametrize("name", ["left", "right"])
async def test_a_lost_node_is_replaced(mesh, name):
    spare = await mesh.join("spare", 0 if name == "left" else 2, 2 if name == "left" else 4)
    found = refusals(mesh)
    asking = asyncio.create_task(mesh.ask(stream=True, max_tokens=TOKENS))
    served = spare if spare.node.stage.num_tokens else None
    await until(lambda: any(decoding(mesh, each) for each in (name, "spare")))
    lost = mesh.members["spare" if decoding(mesh, "spare") else name]
    assert served is None or lost is spare
    await lost.node.close()
    assert await asking == TEXT
    counts = mesh.gateway._pipelines.shared.counts
    assert counts.ways == {Way.JOURNAL: 1}
    assert not found
    for member in mesh.members.values():
        if member is not lost:
            await until(lambda member=member: member.held() == (0, 0))


async def test_a_session_that_cannot_be_rebuilt_begins_anew_with_a_grant_of_its_own(mesh):
    spare = await mesh.join("spare", 2, 4)
    found = refusals(mesh)
    for member in mesh.members.values():
        member.node.stage.sessions.journals.open = _NoJournal
    asking = asyncio.create_task(mesh.ask(stream=True, max_tokens=TOKENS))
    await until(lambda: decoding(mesh, "right") or decoding(mesh, "spare"))
    lost = spare if decoding(mesh, "spare") else mesh.members["right"]
    await lost.node.close()
    assert await asking == TEXT
    assert mesh.gateway._pipelines.shared.counts.ways == {Way.REPLAY: 1}
    assert not found


class _NoJournal:
    """A journal that has lost everything."""

    def add(self, position: int, output: object) -> None:
        pass

    def read(self, position: int) -> Any:
        raise MeshError(Code.ABORTED, "the journal of this session is lost", reason="JOURNAL_LOST")

    def close(self) -> None:
        pass


async def test_a_session_leaves_a_node_that_drains_and_comes_back(mesh):
    asking = asyncio.create_task(mesh.ask(stream=True, max_tokens=2 * TOKENS))
    await until(lambda: decoding(mesh, "right"))
    spare = await mesh.join("spare", 2, 4, delay_s=0.02)
    found = refusals(mesh)
    async with ControlClient(mesh.gateway.control_grpc) as control:
        await control.drain("right", grace_s=60.0)
    await until(lambda: spare.held()[0] == 1)
    moved = mesh.gateway._pipelines.shared.moves.counts
    await until(lambda: moved.moved == 1)
    # The node starts again, under the same name; its old grants are for another start.
    old = mesh.members.pop("right")
    await old.leave()
    right = await mesh.join("right", 2, 4, delay_s=0.02)
    async with ControlClient(mesh.gateway.control_grpc) as control:
        await control.drain("spare", grace_s=60.0)
    await until(lambda: right.held()[0] == 1)
    assert await asking == 2 * TEXT
    assert (moved.moved, moved.failed) == (2, 0)
    assert not mesh.gateway._pipelines.shared.counts.ways
    assert not found


async def test_keys_change_while_sessions_open(text):
    times = GrantTimes(ttl_s=5.0, key_life_s=0.6, lead_s=0.3, refresh_s=0.1)
    async with stub_mesh(text, grants=times) as mesh:
        await mesh.join("left", 0, 2)
        await mesh.join("right", 2, 4)
        keys = set()
        async with asyncio.timeout(BOUND_S):
            while len(keys) < 4:
                assert await mesh.ask(max_tokens=2) == "hh"
                keys |= set(mesh.members["left"].node.grants._keys)
        assert not mesh.gateway._pipelines.shared.counts.ways
