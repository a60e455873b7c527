"""A session's cache is held at every hop before anything is computed, or nowhere."""

from __future__ import annotations

import asyncio

import pytest

from meshnet.errors import CacheFullError, MeshError, NextHopError, WireError
from meshnet.grammar import Want
from meshnet.operations import Reservation
from meshnet.topology import Hop, LayerRange, NodeId
from meshnet_gateway.pipeline import PipelineSettings, RoutePipeline
from tests.node.test_pipeline_of_stubs import stub_activation
from tests.plane.doubles import misbehaving, new_session

HIDDEN = Want("hidden")
BOUND_S = 10.0


def held(*nodes) -> list[tuple[int, int]]:
    return [(len(n.stage.sessions), n.stage.sessions.reserved_tokens) for n in nodes]


async def eventually_free(*nodes) -> None:
    async with asyncio.timeout(BOUND_S):
        while held(*nodes) != [(0, 0)] * len(nodes):
            await asyncio.sleep(0.005)


async def reserve(client, route, tokens: int, session=None) -> None:
    asked = Reservation(session or new_session(), tokens, route[0].layers, route[1:])
    await client.reserve(route[0].address, route[0].node, asked, timeout_s=BOUND_S)


@pytest.fixture
async def three(start_node):
    """Three nodes in a row, the last with 100 tokens of cache."""
    made = [
        await start_node("first", 0, 1, num_layers=3),
        await start_node("second", 1, 2, num_layers=3),
        await start_node("third", 2, 3, cache_tokens=100),
    ]
    return tuple(hop for hop, _, _ in made), [node for _, node, _ in made], [b for *_, b in made]


async def test_every_hop_holds_the_session_and_nothing_is_computed(three, client):
    route, nodes, backends = three
    session = new_session()
    for _ in range(2):
        await reserve(client, route, 80, session)
        assert held(*nodes) == [(1, 80)] * 3
    assert [backend.calls for backend in backends] == [[], [], []]
    await client.release(route[0].address, session)
    assert held(*nodes) == [(0, 0)] * 3


@pytest.mark.parametrize("full", [0, 1, 2])
async def test_one_full_hop_refuses_for_all(start_node, client, full):
    made = [
        await start_node(f"node{i}", i, i + 1, num_layers=3, cache_tokens=10 if i == full else 99)
        for i in range(3)
    ]
    pipeline = RoutePipeline(
        client, tuple(hop for hop, _, _ in made), PipelineSettings(), max_tokens=11
    )
    with pytest.raises(CacheFullError) as caught:
        await pipeline.forward(stub_activation(3), HIDDEN)
    assert caught.value.retry_after_s
    assert held(*(node for _, node, _ in made)) == [(0, 0)] * 3
    assert [backend.calls for *_, backend in made] == [[], [], []]
    await pipeline.close()


async def test_a_session_that_grows_keeps_what_it_had_where_more_is_refused(three, client):
    route, nodes, _ = three
    session = new_session()
    await reserve(client, route, 80, session)
    with pytest.raises(CacheFullError):
        await reserve(client, route, 101, session)
    assert held(*nodes) == [(1, 80)] * 3
    await reserve(client, route, 90, session)
    await reserve(client, route, 20, session)
    assert held(*nodes) == [(1, 90)] * 3


async def test_a_hop_that_is_away_is_named_and_nothing_stays_held(three, client):
    route, nodes, _ = three
    await nodes[2].close()
    with pytest.raises(NextHopError) as caught:
        await reserve(client, route, 80)
    assert caught.value.failed_node == "third"
    assert held(*nodes[:2]) == [(0, 0)] * 2


async def test_a_caller_that_leaves_meanwhile_leaves_nothing_held(three, client):
    route, nodes, _ = three
    asked = asyncio.Event()

    async def silent(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()

    async with misbehaving(silent) as address:
        hung = Hop(NodeId("hung"), address, LayerRange(2, 3))
        request = asyncio.create_task(reserve(client, (*route[:2], hung), 80))
        async with asyncio.timeout(BOUND_S):
            await asked.wait()
        assert held(*nodes[:2]) == [(1, 80)] * 2
        request.cancel()
        await eventually_free(*nodes[:2])


async def test_a_next_hop_without_reservations_leaves_the_first_chunk_to_reserve(three, client):
    route, nodes, _ = three
    first = route[0]

    async def old(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"PUT ")
        writer.write(b"HTTP/1.1 405 No\r\nAllow: DELETE\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()

    async with misbehaving(old) as address:
        hop = Hop(NodeId("old"), address, LayerRange(1, 2))
        pipeline = RoutePipeline(client, (first, hop), PipelineSettings(), max_tokens=5)
        with pytest.raises(MeshError):
            await pipeline.forward(stub_activation(3), HIDDEN)
    assert held(nodes[0]) == [(1, 5)]
    await pipeline.close()
    assert held(nodes[0]) == [(0, 0)]


@pytest.mark.parametrize(
    ("layers", "route", "field"),
    [
        (LayerRange(0, 2), (), "X-Meshnet-Layers"),
        (
            LayerRange(0, 1),
            (Hop(NodeId("b"), "127.0.0.1:1", LayerRange(2, 3)),),
            "X-Meshnet-Route",
        ),
    ],
)
async def test_what_cannot_be_served_is_refused_before_it_is_held(
    three, client, layers, route, field
):
    hops, nodes, _ = three
    with pytest.raises(WireError) as caught:
        await client.reserve(
            hops[0].address,
            hops[0].node,
            Reservation(new_session(), 5, layers, route),
            timeout_s=BOUND_S,
        )
    assert caught.value.field == field
    assert held(*nodes) == [(0, 0)] * 3


async def test_draining_and_loading_nodes_take_no_reservation(three, start_node, client):
    route, nodes, _ = three
    session = new_session()
    await reserve(client, route, 10, session)
    nodes[1].stage.sessions.draining = True
    with pytest.raises(MeshError) as caught:
        await reserve(client, route, 10)
    assert caught.value.reason == "DRAINING"
    await reserve(client, route, 20, session)
    assert held(*nodes) == [(1, 20)] * 3
    loading, _, _ = await start_node("loading", 0, 1, load=False)
    with pytest.raises(MeshError) as caught:
        await reserve(client, (loading,), 10)
    assert caught.value.reason == "LOADING"
