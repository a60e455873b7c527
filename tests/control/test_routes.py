"""Routes through real sockets: what is reported decides, sessions spread, watches live."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc
import pytest

from meshnet.control.stubs import route_stub
from meshnet.errors import MeshError
from meshnet.v1 import node_service_pb2 as pb
from meshnet.v1 import route_service_pb2, types_pb2

MODEL = "models/acme/tiny"


async def report(mesh, node, **load):
    await mesh.client.heartbeat(
        node,
        lease_id=mesh.leases[node],
        incarnation=1,
        ready=True,
        load=types_pb2.LoadStats(**load),
    )


def link(node, milliseconds):
    return types_pb2.LinkStats(
        node=f"nodes/{node}", round_trip_microseconds=int(milliseconds * 1000)
    )


async def nodes_of(mesh, **kwargs):
    route = await mesh.client.select_route(MODEL, **kwargs)
    return [hop.node.removeprefix("nodes/") for hop in route.hops]


@pytest.mark.parametrize("beats", [False, True])
async def test_a_hundred_sessions_differ_by_at_most_one_a_node(mesh, beats):
    for index in range(7):
        await mesh.join(f"n{index}", (0, 8), port=7100 + index)
    given: Counter[str] = Counter()
    for number in range(100):
        (node,) = await nodes_of(mesh)
        given[node] += 1
        if beats and number % 9 == 0:
            await mesh.beat(f"n{number % 7}", active_sessions=given[f"n{number % 7}"])
    assert max(given.values()) - min(given.values()) <= 1


async def test_what_nodes_report_decides(mesh):
    await mesh.join("first", (0, 4), port=7081)
    await mesh.join("a", (4, 8), port=7082)
    await mesh.join("b", (4, 8), port=7083)
    await report(mesh, "first", links=[link("a", 90), link("b", 0.4)])
    assert await nodes_of(mesh) == ["first", "b"]
    await report(mesh, "first", links=[link("a", 0.4), link("b", 90)])
    assert await nodes_of(mesh) == ["first", "a"]
    await report(mesh, "first")
    await report(mesh, "a", layer_microseconds=900)
    await report(mesh, "b", layer_microseconds=300)
    assert await nodes_of(mesh) == ["first", "b"]
    await report(mesh, "b", layer_microseconds=300, active_sessions=9)
    assert await nodes_of(mesh) == ["first", "a"]


@pytest.mark.parametrize(
    ("links", "field"),
    [
        ([types_pb2.LinkStats(node="nodes/x")], "load.links[0].round_trip_microseconds"),
        ([link("x", 1), types_pb2.LinkStats(node="x", round_trip_microseconds=1)],
         "load.links[1].node"),
        ([link("x", 1)] * 65, "load.links"),
    ],
)  # fmt: skip
async def test_a_link_that_cannot_be_is_refused_by_name(mesh, links, field):
    await mesh.join("a", (0, 8))
    with pytest.raises(MeshError) as caught:
        await report(mesh, "a", links=links)
    assert caught.value.field == field


async def test_a_route_says_what_it_costs(mesh):
    await mesh.join("a", (0, 4), port=7081)
    await mesh.join("b", (4, 8), port=7082)
    await report(mesh, "a", links=[link("b", 1.024)])
    route = await mesh.client.select_route(MODEL)
    assert route.route_class == types_pb2.ROUTE_CLASS_LAN
    total = 0
    for hop in route.hops:
        cost = hop.cost
        total += cost.compute + cost.queue + cost.cache + cost.link + cost.overhead + cost.penalty
    assert total == route.cost
    assert (route.hops[1].cost.link, route.hops[1].cost.link_measured) == (1024, True)


async def test_a_quiet_route_watch_is_kept_alive(start_mesh):
    mesh = await start_mesh(bookmark_interval_s=0.05)
    await mesh.join("a", (0, 8))
    url = f"/v1/routes:watch?model={MODEL}"
    async with mesh.http.get(f"http://{mesh.addresses.http}{url}") as response:
        lines = [await asyncio.wait_for(response.content.readline(), 5) for _ in range(3)]
    assert lines[0] == lines[1] == lines[2]
    assert b"nodes/a" in lines[0]


async def test_a_route_watch_hears_of_another_route_alone(mesh):
    await mesh.join("a", (0, 8), port=7081)
    async with grpc.aio.insecure_channel(mesh.addresses.grpc) as channel:
        call = route_stub(channel).WatchRoutes(route_service_pb2.WatchRoutesRequest(model=MODEL))
        first = await asyncio.wait_for(call.read(), 5)
        await mesh.beat("a", active_sessions=5)
        await mesh.join("b", (0, 8), port=7082)
        second = await asyncio.wait_for(call.read(), 5)
        call.cancel()
    nodes = [route.hops[0].node for route in (*first.routes, *second.routes)]
    assert nodes == ["nodes/a", "nodes/b"]


async def test_a_cordoned_node_is_left_out_by_name(mesh):
    await mesh.join("a", (0, 8), port=7081)
    await mesh.join("b", (0, 8), port=7082)
    await mesh.client.update(pb.Node(name="nodes/a", cordoned=True), ["cordoned"])
    answer = await mesh.client.explain_routes(MODEL)
    assert [(left.node, left.reason) for left in answer.left_out] == [("nodes/a", "CORDONED")]


async def test_a_node_of_another_digest_is_on_no_route_of_the_model(mesh):
    """Its layers are not those of the others, whatever its name says."""
    await mesh.join("a", (0, 4), digest="x")
    await mesh.join("evil", (4, 8), digest="y", port=7081)
    with pytest.raises(MeshError, match="layers"):
        await nodes_of(mesh)
    await mesh.join("b", (4, 8), digest="x", port=7082)
    for _ in range(20):
        assert await nodes_of(mesh) == ["a", "b"]
    with pytest.raises(MeshError):
        await nodes_of(mesh, digest="y")
