"""Sessions leave nodes that drain, without a request that fails."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import pytest

from meshnet.control.client import ControlClient
from meshnet.errors import NextHopError
from meshnet.topology import Hop, LayerRange, NodeId
from meshnet.v1 import node_service_pb2 as nodes_pb2
from meshnet_gateway.draining import DrainingNodes
from meshnet_gateway.moving import replacements
from meshnet_gateway.recoveries import Way
from tests.gateway.mesh import Mesh, stub_mesh

BOUND_S = 20.0
TOKENS = 60
TEXT = "h" * TOKENS


def hop(name: str, start: int, end: int) -> Hop:
    return Hop(NodeId(name), f"{name}:1", LayerRange(start, end))


A, B, C = hop("a", 0, 2), hop("b", 2, 4), hop("c", 4, 6)


@pytest.mark.parametrize(
    ("leaving", "new", "found"),
    [
        ("b", (A, hop("x", 2, 4), C), [(B, (hop("x", 2, 4),))]),
        ("a", (hop("x", 0, 2), B, C), [(A, (hop("x", 0, 2),))]),
        ("c", (A, B, hop("x", 4, 5), hop("y", 5, 6)), [(C, (hop("x", 4, 5), hop("y", 5, 6)))]),
        (
            "ab",
            (hop("x", 0, 2), hop("y", 2, 4), C),
            [(A, (hop("x", 0, 2),)), (B, (hop("y", 2, 4),))],
        ),
    ],
)
def test_the_hops_that_take_layers_over_are_found(leaving, new, found):
    assert replacements((A, B, C), new, set(leaving)) == found


@pytest.mark.parametrize(
    "new",
    [
        (hop("x", 0, 6),),
        (A, hop("x", 2, 6)),
        (A, hop("x", 2, 3), hop("y", 3, 6)),
        (hop("z", 0, 2), hop("x", 2, 4), C),
        (hop("x", 0, 1), hop("y", 1, 4), C),
        (A, hop("x", 2, 4), Hop(C.node, "elsewhere:1", C.layers)),
        (A, hop("x", 2, 4)),
        (),
    ],
)
def test_a_route_that_cuts_elsewhere_or_drops_a_healthy_hop_is_not_one(new):
    with pytest.raises(NextHopError) as caught:
        replacements((A, B, C), new, {"b"})
    assert caught.value.failed_node == "b"


def test_which_nodes_drain_is_remembered_by_their_start():
    draining = DrainingNodes()
    node = nodes_pb2.Node(name="nodes/a", incarnation=7, state=nodes_pb2.NODE_STATE_READY)
    draining.observe(node)
    assert draining.among({NodeId("a"): 7}) == frozenset()
    for state in (nodes_pb2.NODE_STATE_DRAINING, nodes_pb2.NODE_STATE_DRAINED):
        node.state = state
        draining.observe(node)
        assert draining.among({NodeId("a"): 7, NodeId("b"): 7}) == {"a"}
        assert draining.among({NodeId("a"): 8}) == frozenset()
    node.state = nodes_pb2.NODE_STATE_LOST
    draining.observe(node)
    assert draining.among({NodeId("a"): 7}) == frozenset()
    node.state = nodes_pb2.NODE_STATE_DRAINING
    draining.observe(node)
    draining.clear()
    assert draining.among({NodeId("a"): 7}) == frozenset()


@pytest.fixture
async def mesh(text) -> Any:
    async with stub_mesh(text) as made:
        await made.join("left", 0, 2, delay_s=0.02)
        await made.join("right", 2, 4, delay_s=0.02)
        yield made


async def until(check: Any) -> None:
    async with asyncio.timeout(BOUND_S):
        while not check():
            await asyncio.sleep(0.005)


async def drain(mesh: Mesh, name: str) -> None:
    """Drain a node, and have the gateway hear of it."""
    async with ControlClient(mesh.gateway.control_grpc) as control:
        await control.drain(name, grace_s=60.0)


def counts(mesh: Mesh) -> Any:
    return mesh.gateway._pipelines.shared.moves.counts


def decoding(mesh: Mesh, name: str) -> bool:
    stage = mesh.members[name].node.stage
    return stage.num_tokens > 7


async def test_a_session_leaves_a_node_that_drains(mesh):
    asking = asyncio.create_task(mesh.ask(stream=True, max_tokens=TOKENS))
    await until(lambda: decoding(mesh, "right"))
    spare = await mesh.join("spare", 2, 4)
    await drain(mesh, "right")
    assert await asking == TEXT
    left, right = (mesh.members[name] for name in ("left", "right"))
    assert (counts(mesh).moved, counts(mesh).failed) == (1, 0)
    assert [m.node.stage.moves.counts.sent for m in (left, right)] == [0, 1]
    assert spare.node.stage.moves.counts.taken == 1
    recomputed = left.node.stage.num_tokens - right.node.stage.num_tokens
    assert spare.node.stage.num_tokens == recomputed, "none was computed twice"
    await until(lambda: [m.held() for m in (left, right, spare)] == [(0, 0)] * 3)
    for _ in range(2):
        await right.heartbeat.beat()
    async with ControlClient(mesh.gateway.control_grpc) as control:
        assert (await control.get_node("right")).state == nodes_pb2.NODE_STATE_DRAINED


async def test_without_another_node_the_session_stays(mesh):
    asking = asyncio.create_task(mesh.ask(stream=True, max_tokens=TOKENS))
    await until(lambda: decoding(mesh, "right"))
    await drain(mesh, "right")
    await mesh.members["right"].heartbeat.beat()
    assert await asking == TEXT
    assert (counts(mesh).moved, counts(mesh).failed) == (0, 0)
    assert mesh.gateway._pipelines.shared.counts.recovered == 0


async def test_a_spare_that_comes_later_takes_it_over(mesh):
    asking = asyncio.create_task(mesh.ask(stream=True, max_tokens=4 * TOKENS))
    await until(lambda: decoding(mesh, "left"))
    await drain(mesh, "left")
    right, before = mesh.members["right"].node.stage, mesh.members["right"].node.stage.num_tokens
    await until(lambda: right.num_tokens > before + 3)
    spare = await mesh.join("spare", 0, 2)
    assert await asking == 4 * TEXT
    assert counts(mesh).moved == 1
    assert spare.node.stage.moves.counts.taken == 1


async def test_a_full_spare_leaves_it_where_it_is(mesh):
    """The registry knows no better for a moment: the spare says so itself."""
    asking = asyncio.create_task(mesh.ask(stream=True, max_tokens=TOKENS))
    await until(lambda: decoding(mesh, "right"))
    spare = await mesh.join("spare", 2, 4, cache_tokens=1000)
    spare.node.stage.sessions.reserve("another", 999)
    await drain(mesh, "right")
    assert await asking == TEXT
    assert (counts(mesh).moved, counts(mesh).failed) == (0, 0)
    assert mesh.gateway._pipelines.shared.counts.recovered == 0


async def test_a_state_that_cannot_be_moved_is_rebuilt(text):
    class Recurrent:
        """A stub whose state is more than keys and values."""

        kv = None

        def __init__(self, stub: Any) -> None:
            self._stub = stub

        def __getattr__(self, name: str) -> Any:
            return getattr(self._stub, name)

    async with stub_mesh(text) as mesh:
        await mesh.join("left", 0, 2, delay_s=0.02)
        await mesh.join("right", 2, 4, delay_s=0.02, wrap=Recurrent)
        asking = asyncio.create_task(mesh.ask(stream=True, max_tokens=TOKENS))
        await until(lambda: decoding(mesh, "right"))
        spare = await mesh.join("spare", 2, 4)
        await drain(mesh, "right")
        assert await asking == TEXT
        assert (counts(mesh).moved, counts(mesh).failed) == (0, 1)
        assert mesh.gateway._pipelines.shared.counts.recovered == 1
        assert spare.node.stage.num_tokens > 7
        await until(lambda: [m.held() for m in mesh.members.values()] == [(0, 0)] * 3)


async def test_a_client_that_leaves_as_its_session_moved_frees_every_node(mesh, monkeypatch):
    """No hop before the new one knows of it yet."""
    asking = asyncio.create_task(mesh.ask(stream=True, max_tokens=4 * TOKENS))
    await until(lambda: decoding(mesh, "right"))
    spare = await mesh.join("spare", 2, 4, delay_s=60.0, load=False)
    # Ready for the registry, and then too slow for the step after the move.
    monkeypatch.setattr("meshnet_node.health.Health.run", lambda _: None)
    await mesh.load(spare)
    await drain(mesh, "right")
    await until(lambda: spare.held()[0] == 1)
    asking.cancel()
    with suppress(asyncio.CancelledError):
        await asking
    for name in ("left", "right"):
        await until(lambda name=name: mesh.members[name].held() == (0, 0))
    await until(lambda: spare.held() == (0, 0))


async def test_a_new_session_is_not_sent_to_a_node_that_drains(mesh):
    await mesh.join("spare", 2, 4)
    await drain(mesh, "right")
    assert await mesh.ask(max_tokens=3) == "hhh"
    assert mesh.members["right"].node.stage.num_tokens == 0


@pytest.mark.parametrize("way", ["drained", "killed"])
async def test_a_session_keeps_its_borders_where_a_route_has_them(text, way):
    """Nodes that compute in float32 would round elsewhere, over one that holds all layers."""
    async with stub_mesh(text) as mesh:
        await mesh.join("left", 0, 1, delay_s=0.02)
        await mesh.join("right", 1, 4, delay_s=0.02)
        asking = asyncio.create_task(mesh.ask(stream=True, max_tokens=4 * TOKENS))
        await until(lambda: decoding(mesh, "right"))
        whole = await mesh.join("whole", 0, 4)
        if way == "drained":
            await drain(mesh, "right")
        else:
            await mesh.members.pop("right").leave()
        await until(lambda: whole.held()[0] == 1)
        (session,) = whole.node.stage.sessions._sessions.values()
        await until(lambda: session.cache.layers)
        assert session.cache.layers == LayerRange(1, 4)
        assert await asking == 4 * TEXT
        recovered = mesh.gateway._pipelines.shared.counts.ways
        if way == "drained":
            assert (counts(mesh).moved, recovered.total()) == (1, 0)
        else:
            assert dict(recovered) == {Way.JOURNAL: 1}
