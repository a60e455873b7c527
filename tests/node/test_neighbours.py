"""Links to the nodes that may come next: whom to measure, and what is reported."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from meshnet.control.app import ControlServer
from meshnet.control.client import ControlClient
from meshnet.control.settings import ControlSettings
from meshnet.topology import LayerRange, NodeId
from meshnet.v1 import node_service_pb2 as pb
from meshnet_node.backend import ShardSpec
from meshnet_node.heartbeat import Heartbeat, Registration
from meshnet_node.neighbours import Neighbours, choose_neighbours

SPEC = ShardSpec(
    model="m",
    digest="d",
    layers=LayerRange(0, 4),
    num_layers=12,
    hidden_size=8,
    vocab_size=0,
    holds_embedding=True,
    holds_head=False,
    cache_bytes_per_token=0,
)


def registered(name, start, end, *, model="m", digest="d", state=pb.NODE_STATE_READY, port=7080):
    node = pb.Node(name=f"nodes/{name}", state=state)
    node.endpoints.add(uri=f"http://127.0.0.1:{port}/forward")
    shard = node.shards.add(model=f"models/{model}", model_digest=digest, layer_count=12)
    shard.layers.start, shard.layers.end = start, end
    return node


@pytest.mark.parametrize(
    ("node", "is_chosen"),
    [
        (registered("a", 4, 8), True),
        (registered("a", 2, 8), True),
        (registered("a", 4, 8, state=pb.NODE_STATE_JOINING), True),
        (registered("a", 5, 8), False),
        (registered("a", 0, 4), False),
        (registered("own", 4, 8), False),
        (registered("a", 4, 8, digest="other"), False),
        (registered("a", 4, 8, model="other"), False),
        (registered("a", 4, 8, state=pb.NODE_STATE_LOST), False),
        (registered("a", 4, 8, state=pb.NODE_STATE_DRAINED), False),
    ],
)
def test_who_may_come_next(node, is_chosen):
    assert bool(choose_neighbours([node], NodeId("own"), SPEC)) is is_chosen


def test_few_are_chosen_and_all_are_chosen_by_some():
    following = [registered(f"n{index}", 4, 8) for index in range(40)]
    chosen: Counter[str] = Counter()
    for own in range(40):
        found = choose_neighbours(following, NodeId(f"own{own}"), SPEC, limit=8)
        assert len(found) == 8
        assert found == choose_neighbours(following[::-1], NodeId(f"own{own}"), SPEC, limit=8)
        chosen.update(neighbour.node for neighbour in found)
    assert set(chosen) == {f"n{index}" for index in range(40)}


@pytest.fixture
async def control() -> AsyncIterator[ControlClient]:
    server = ControlServer(ControlSettings(http_port=0, grpc_port=0))
    addresses = await server.start()
    client = ControlClient(f"grpc://{addresses.grpc}")
    client.url = f"grpc://{addresses.grpc}"
    yield client
    await client.close()
    await server.close()


async def join(control, hop, node, spec) -> Heartbeat:
    heartbeat = Heartbeat(control.url, Registration(hop.node, spec, hop.address, ""), node)
    await heartbeat.start()
    return heartbeat


async def test_a_link_is_measured_reported_and_forgotten_when_the_node_ends(start_node, control):
    hop, node, backend = await start_node("next", 1, 2)
    heartbeat = await join(control, hop, node, backend.spec)
    spec = replace(backend.spec, layers=LayerRange(0, 1), holds_head=False)
    speeds = {hop.address: 12.5e6}
    neighbours = Neighbours(control, NodeId("first"), spec, lambda: speeds)
    await neighbours.measure()
    (link,) = neighbours.links()
    assert (link.node, link.bytes_per_second) == ("nodes/next", 12_500_000)
    assert 0 < link.round_trip_microseconds < 2_000_000
    await heartbeat.close()
    await node.close()
    await neighbours.measure()
    assert neighbours.links() == []
    await neighbours.close()


class Clock:
    """Time that passes only as each request of the prober is answered."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("rounds_ms", "reported_us"),
    [
        ([24, 1, 24], 1000),
        ([1, *[24] * 7], 1000),
        ([1, *[24] * 8], 24_000),
        ([24, 24, 3, 5], 3000),
    ],
)
async def test_a_node_that_is_busy_does_not_make_its_link_long(
    start_node, control, monkeypatch, rounds_ms, reported_us
):
    """A link that has become slower is believed once no round of late was shorter."""
    hop, node, backend = await start_node("next", 1, 2)
    heartbeat = await join(control, hop, node, backend.spec)
    clock = Clock()
    spec = replace(backend.spec, layers=LayerRange(0, 1), holds_head=False)
    neighbours = Neighbours(control, NodeId("first"), spec, clock=clock)
    ask = neighbours._client.get
    for round_ms in rounds_ms:

        async def late(*args, round_ms=round_ms, **options):
            answer = await ask(*args, **options)
            clock.now += round_ms / 1000
            return answer

        monkeypatch.setattr(neighbours._client, "get", late)
        await neighbours.measure()
    (link,) = neighbours.links()
    assert link.round_trip_microseconds == reported_us
    await neighbours.close()
    await heartbeat.close()


async def test_a_node_that_ends_the_model_measures_none(start_node, control):
    hop, node, backend = await start_node("next", 1, 2)
    heartbeat = await join(control, hop, node, backend.spec)
    spec = replace(backend.spec, layers=LayerRange(0, 1), holds_head=True)
    neighbours = Neighbours(control, NodeId("first"), spec)
    await neighbours.measure()
    assert neighbours.links() == []
    await neighbours.close()
    await heartbeat.close()


async def test_heartbeats_carry_links_and_pace(start_node, control):
    after, other, behind = await start_node("after", 1, 2)
    hop, node, backend = await start_node("before", 0, 1)
    ending = await join(control, after, other, behind.spec)
    spec = replace(backend.spec, holds_head=False)
    heartbeat = await join(control, hop, node, spec)
    node.stage.num_chunks, node.stage.num_tokens, node.stage.compute_s = 2, 2, 0.004

    async def reported():
        while True:
            await heartbeat.beat()
            load = (await control.get_node("before")).load
            if load.links:
                return load
            await asyncio.sleep(0.02)

    load = await asyncio.wait_for(reported(), 10)
    assert [link.node for link in load.links] == ["nodes/after"]
    assert load.layer_microseconds == 2000
    await heartbeat.close()
    await ending.close()
