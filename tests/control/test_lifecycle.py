"""A node's life through real sockets: leases on a fake clock, draining, watches."""

from __future__ import annotations

import asyncio
import json

import pytest

from meshnet.control.hops import to_hops
from meshnet.errors import Code, LeaseExpiredError, MeshError, RouteError
from meshnet.topology import Hop, LayerRange
from meshnet.v1 import node_service_pb2 as pb
from meshnet.v1 import types_pb2

MODEL = "models/acme/tiny"
PUT = pb.WatchNodesResponse.EVENT_TYPE_PUT
DELETE = pb.WatchNodesResponse.EVENT_TYPE_DELETE
BOOKMARK = pb.WatchNodesResponse.EVENT_TYPE_BOOKMARK


@pytest.fixture
def make_node():
    """Give a builder of a registration, for a whole model of eight layers by default."""

    def make(layers=(0, 8), *, port=7080, incarnation=1):
        start, end = layers
        return pb.Node(
            incarnation=incarnation,
            endpoints=[types_pb2.Endpoint(uri=f"http://127.0.0.1:{port}/forward")],
            shards=[
                types_pb2.Shard(
                    model=MODEL,
                    model_digest="d1",
                    layers=types_pb2.LayerRange(start=start, end=end),
                    layer_count=8,
                    embedding=start == 0,
                    lm_head=end == 8,
                )
            ],
        )

    return make


async def test_a_node_is_routed_to_once_it_is_ready(mesh, make_node):
    registered = await mesh.client.register("a", make_node())
    assert registered.node.state == pb.NODE_STATE_JOINING
    assert registered.lease.ttl.seconds == 10
    with pytest.raises(RouteError, match="layers 0-8") as caught:
        await mesh.client.select_route(MODEL)
    assert (caught.value.code, caught.value.field) == (Code.UNAVAILABLE, "model")
    assert caught.value.retry_after_s == 1.0
    mesh.leases["a"] = registered.lease.lease_id
    answer = await mesh.beat("a", ready=False)
    assert answer.desired_state == pb.NODE_STATE_READY
    await mesh.beat("a")
    route = await mesh.client.select_route(MODEL)
    assert to_hops(route) == (Hop("a", "127.0.0.1:7080", LayerRange(0, 8)),)
    await mesh.beat("a", ready=False)
    with pytest.raises(RouteError):
        await mesh.client.select_route(MODEL)


async def test_overlapping_shards_give_a_route_over_every_layer_once(mesh):
    await mesh.join("a", (0, 5), port=7081)
    await mesh.join("b", (3, 8), port=7082)
    route = to_hops(await mesh.client.select_route(MODEL))
    assert [(hop.address, str(hop.layers)) for hop in route] == [
        ("127.0.0.1:7081", "0-4"),
        ("127.0.0.1:7082", "4-8"),
    ]


async def test_s6_a_node_that_stops_beating_is_off_the_routes_when_its_lease_ends(mesh):
    await mesh.join("a", (0, 8))
    mesh.clock.advance(9.99)
    await mesh.client.select_route(MODEL)
    mesh.clock.advance(0.01)
    with pytest.raises(RouteError):
        await mesh.client.select_route(MODEL)
    assert (await mesh.client.get_node("a")).state == pb.NODE_STATE_LOST
    with pytest.raises(LeaseExpiredError) as caught:
        await mesh.beat("a")
    assert (caught.value.code, caught.value.field) == (Code.NOT_FOUND, "lease_id")
    status, body = await mesh.json(
        "POST", "/v1/nodes/a:heartbeat", json={"leaseId": mesh.leases["a"], "incarnation": 1}
    )
    assert (status, body["details"][0]["reason"]) == (404, "LEASE_EXPIRED")
    await mesh.join("a", (0, 8))
    await mesh.client.select_route(MODEL)


async def test_s6_a_node_that_beats_stays_however_busy_it_is(mesh):
    await mesh.join("a", (0, 8))
    for _ in range(10):
        mesh.clock.advance(9.0)
        await mesh.beat("a")
    await mesh.client.select_route(MODEL)


async def test_s7_a_registering_again_from_the_same_address_is_one_entry(mesh, make_node):
    first = await mesh.client.register("a", make_node())
    again = await mesh.client.register("a", make_node())
    assert again.lease.lease_id == first.lease.lease_id
    assert len(await mesh.client.list_nodes()) == 1


async def test_s7_b_a_live_node_is_not_pushed_out_by_its_clone(mesh, make_node):
    await mesh.join("a", (0, 8), port=7081)
    before = await mesh.client.get_node("a")
    clone = make_node(port=7082, incarnation=2)
    with pytest.raises(MeshError, match=r"127\.0\.0\.1:7081") as caught:
        await mesh.client.register("a", clone)
    assert (caught.value.code, caught.value.reason) == (Code.ALREADY_EXISTS, "NODE_ID_IN_USE")
    status, body = await mesh.json(
        "POST",
        "/v1/nodes?node_id=a",
        json={"incarnation": "2", "endpoints": [{"uri": "http://127.0.0.1:7082/forward"}]},
    )
    assert (status, body["code"]) == (409, 6)
    assert await mesh.client.get_node("a") == before
    await mesh.beat("a")


async def test_s7_c_after_the_lease_another_address_may_take_the_id(mesh, make_node):
    await mesh.join("a", (0, 8), port=7081)
    mesh.clock.advance(10.0)
    registered = await mesh.client.register("a", make_node(port=7082))
    assert registered.node.endpoints[0].uri == "http://127.0.0.1:7082/forward"
    assert len(await mesh.client.list_nodes()) == 1


async def test_a_restarted_process_takes_over_at_once(mesh):
    await mesh.join("a", (0, 8))
    old = mesh.leases["a"]
    await mesh.join("a", (0, 8), incarnation=2)
    assert mesh.leases["a"] != old
    with pytest.raises(LeaseExpiredError):
        await mesh.client.heartbeat("a", lease_id=old, incarnation=1, ready=True)
    with pytest.raises(MeshError) as caught:
        await mesh.join("a", (0, 8), incarnation=1)
    assert (caught.value.code, caught.value.reason) == (Code.ABORTED, "STALE_INCARNATION")


async def test_a_lost_node_is_forgotten_after_a_time(start_mesh):
    mesh = await start_mesh(forget_after_s=60.0)
    await mesh.join("a", (0, 8))
    mesh.clock.advance(10.0)
    assert [node.state for node in await mesh.client.list_nodes()] == [pb.NODE_STATE_LOST]
    mesh.clock.advance(59.0)
    assert len(await mesh.client.list_nodes()) == 1
    mesh.clock.advance(1.0)
    assert await mesh.client.list_nodes() == []
    with pytest.raises(RouteError) as caught:
        await mesh.client.select_route(MODEL)
    assert caught.value.code is Code.NOT_FOUND


async def test_a_control_plane_that_restarted_makes_nodes_register_again(start_mesh):
    one = await start_mesh()
    await one.join("a", (0, 8))
    other = await start_mesh()
    other.leases = one.leases
    with pytest.raises(LeaseExpiredError):
        await other.beat("a")


async def test_a_node_drains_and_is_told_so(mesh):
    await mesh.join("a", (0, 8))
    await mesh.beat("a", active_sessions=2)
    drained = await mesh.client.drain("a", grace_s=60.0, reason="new disk")
    assert (drained.state, drained.drain_reason) == (pb.NODE_STATE_DRAINING, "new disk")
    with pytest.raises(RouteError):
        await mesh.client.select_route(MODEL)
    mesh.clock.advance(5.0)
    answer = await mesh.beat("a", active_sessions=1)
    assert answer.desired_state == pb.NODE_STATE_DRAINING
    assert answer.drain_remaining.seconds == 55
    answer = await mesh.beat("a", active_sessions=0, queue_depth=1)
    assert answer.desired_state == pb.NODE_STATE_DRAINED
    await mesh.client.deregister("a")
    with pytest.raises(MeshError) as caught:
        await mesh.client.deregister("a", allow_missing=False)
    assert (caught.value.code, caught.value.reason) == (Code.NOT_FOUND, "NODE_UNKNOWN")
    with pytest.raises(LeaseExpiredError):
        await mesh.beat("a")


async def test_a_drain_ends_when_its_grace_is_over(mesh):
    await mesh.join("a", (0, 8))
    await mesh.client.drain("a", grace_s=8.0)
    mesh.clock.advance(8.0)
    answer = await mesh.beat("a", active_sessions=5)
    assert answer.desired_state == pb.NODE_STATE_DRAINED


async def test_an_operator_changes_what_the_mask_names(mesh):
    await mesh.join("a", (0, 8))
    status, body = await mesh.json("PATCH", "/v1/nodes/a", json={"cordoned": True, "weight": 50})
    assert (status, body["node"]["cordoned"], body["node"]["weight"]) == (200, True, 50)
    with pytest.raises(RouteError):
        await mesh.client.select_route(MODEL)
    etag = body["node"]["etag"]
    status, body = await mesh.json("PATCH", "/v1/nodes/a", json={"cordoned": False, "etag": "x"})
    assert (status, body["details"][0]["reason"]) == (409, "ETAG_MISMATCH")
    status, body = await mesh.json(
        "PATCH", "/v1/nodes/a?updateMask=cordoned", json={"weight": 1, "etag": etag}
    )
    assert (status, body["node"]["cordoned"], body["node"]["weight"]) == (200, False, 50)
    await mesh.client.select_route(MODEL)


async def test_sessions_spread_over_equal_nodes(mesh):
    for index, node in enumerate("abc"):
        await mesh.join(node, (0, 8), port=7081 + index)
    routes = [await mesh.client.select_route(MODEL) for _ in range(9)]
    counts = [sum(route.hops[0].node == f"nodes/{node}" for route in routes) for node in "abc"]
    assert counts == [3, 3, 3]


async def test_excluded_nodes_are_not_used_and_preferred_ones_are(mesh):
    for index, node in enumerate("abc"):
        await mesh.join(node, (0, 8), port=7081 + index)
    for _ in range(4):
        route = await mesh.client.select_route(MODEL, prefer=["b"])
        assert route.hops[0].node == "nodes/b"
        route = await mesh.client.select_route(MODEL, exclude=["a", "b"])
        assert route.hops[0].node == "nodes/c"


async def test_models_and_status_tell_what_is_covered(mesh):
    await mesh.join("a", (0, 5))
    model = await mesh.client.get_model(MODEL)
    assert list(model.ready_replicas) == [1, 1, 1, 1, 1, 0, 0, 0]
    assert [(gap.start, gap.end) for gap in model.uncovered] == [(5, 8)]
    assert await mesh.client.list_models() == [model]
    status = await mesh.client.get_status()
    assert dict(status.node_counts) == {"NODE_STATE_READY": 1}
    assert list(status.uncovered_models) == [MODEL]
    await mesh.join("b", (4, 8), port=7081)
    assert list((await mesh.client.get_status()).uncovered_models) == []


async def test_lists_come_in_pages_bound_to_their_filters(mesh, make_node):
    for index in range(5):
        await mesh.client.register(f"n{index}", make_node(port=7081 + index))
    names: list[str] = []
    token = ""
    while True:
        _, body = await mesh.json("GET", f"/v1/nodes?pageSize=2&pageToken={token}")
        names += [node["name"] for node in body["nodes"]]
        token = body["nextPageToken"]
        if not token:
            break
        status, _ = await mesh.json("GET", f"/v1/nodes?region=eu&pageToken={token}")
        assert status == 400
    assert names == [f"nodes/n{index}" for index in range(5)]


async def test_a_watch_gives_the_nodes_and_then_each_change(start_mesh):
    mesh = await start_mesh(bookmark_interval_s=0.1)
    await mesh.join("a", (0, 8))
    watch = mesh.client.watch_nodes(model=MODEL, include_load=True)
    first, bookmark = await anext(watch), await anext(watch)
    assert (first.type, first.node.name, bookmark.type) == (PUT, "nodes/a", BOOKMARK)
    await mesh.beat("a", active_sessions=7)
    assert (await next_change(watch)).node.load.active_sessions == 7
    mesh.clock.advance(10.0)  # nobody asks: the timer notices
    lost = await next_change(watch)
    assert lost.node.state == pb.NODE_STATE_LOST
    await mesh.client.deregister("a")
    gone = await next_change(watch)
    assert (gone.type, gone.node) == (DELETE, pb.Node(name="nodes/a"))
    await watch.aclose()
    resumed = mesh.client.watch_nodes(start_revision=lost.revision)
    assert (await next_change(resumed)).type == DELETE
    await resumed.aclose()


async def next_change(watch):
    async def change():
        async for response in watch:
            if response.type != BOOKMARK:
                return response
        raise AssertionError("the watch ended")

    return await asyncio.wait_for(change(), 5)


@pytest.mark.parametrize("revision", [1, 2**60])
async def test_a_watch_from_before_a_restart_is_told_to_list_again(mesh, revision):
    with pytest.raises(MeshError) as caught:
        await anext(mesh.client.watch_nodes(start_revision=revision))
    assert (caught.value.code, caught.value.reason) == (Code.OUT_OF_RANGE, "REVISION_COMPACTED")
    status, body = await mesh.json("GET", f"/v1/nodes:watch?startRevision={revision}")
    assert (status, body["code"]) == (400, 11)


async def test_routes_are_watched_as_json_lines(mesh):
    url = f"http://{mesh.addresses.http}/v1/routes:watch?model={MODEL}"
    async with mesh.http.get(url) as response:
        assert (await read_line(response))["routes"] == []
        await mesh.join("a", (0, 8))
        (route,) = (await read_line(response))["routes"]
        assert route["hops"][0]["node"] == "nodes/a"
        mesh.clock.advance(10.0)
        assert (await read_line(response))["routes"] == []


async def read_line(response):
    line = await asyncio.wait_for(response.content.readline(), 5)
    return json.loads(line)["result"]
