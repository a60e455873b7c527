"""What only replicas on etcd do: answer alike, bear etcd's faults, say when it is away."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import aiohttp
import grpc
import pytest

from meshnet.control.app import AGE_KEY, ControlServer
from meshnet.control.client import ControlClient
from meshnet.control.etcd import store as etcd_store
from meshnet.control.etcd.client import EtcdClient, LeaseGoneError
from meshnet.control.etcd.keys import PREFIX, key
from meshnet.control.etcd.store import EtcdStore
from meshnet.control.settings import ControlSettings
from meshnet.control.stubs import route_stub
from meshnet.errors import Code, LeaseExpiredError, MeshError
from meshnet.internal.etcd.v3 import etcd_pb2 as etcd
from meshnet.lease import Lease
from meshnet.v1 import node_service_pb2 as pb
from meshnet.v1 import route_service_pb2 as route_pb
from meshnet.v1 import types_pb2
from tests.control.etcd_cluster import Cluster, Proxy

pytestmark = pytest.mark.etcd

TTL_S = 3.0
MODEL = "models/acme/tiny"


@pytest.fixture
async def cluster(lone_etcd: Cluster) -> Cluster:
    await lone_etcd.emptied()
    return lone_etcd


@pytest.fixture
async def replicas(cluster: Cluster) -> AsyncIterator[tuple[EtcdStore, EtcdStore]]:
    async with opened(cluster) as one, opened(cluster) as other:
        yield one, other


@asynccontextmanager
async def opened(where: Cluster | list[str]) -> AsyncIterator[EtcdStore]:
    addresses = where if isinstance(where, list) else list(where.addresses.values())
    store = EtcdStore(addresses, time.time)
    try:
        await store.open()
        yield store
    finally:
        await store.close()


async def eventually(met: Callable[[], Awaitable[object]], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not await met():
            await asyncio.sleep(0.02)


def make_node(incarnation: int = 1) -> pb.Node:
    return pb.Node(
        incarnation=incarnation,
        endpoints=[types_pb2.Endpoint(uri="http://h:1/forward")],
        shards=[
            types_pb2.Shard(
                model=MODEL,
                model_digest="d",
                layers=types_pb2.LayerRange(start=0, end=2),
                layer_count=2,
                embedding=True,
                lm_head=True,
            )
        ],
    )


async def join(store: EtcdStore, node_id: str = "a", ttl_s: float = TTL_S, **terms: int) -> Lease:
    _, lease, _ = await store.register(node_id, make_node(**terms), "h:1", ttl_s)
    await beat(store, lease)
    return lease


async def beat(store: EtcdStore, lease: Lease, **load: int) -> Any:
    request = pb.HeartbeatRequest(
        name=f"nodes/{lease.node}",
        lease_id=lease.lease_id,
        incarnation=lease.incarnation,
        ready=True,
        load=types_pb2.LoadStats(**load) if load else None,
    )
    return await store.heartbeat(lease.node, request)


async def nodes(store: EtcdStore) -> list[pb.Node]:
    return list((await store.snapshot()).nodes)


async def state(store: EtcdStore, node_id: str = "a") -> pb.NodeState:
    return (await store.get(node_id)).state


async def revoke(cluster: Cluster, lease: Lease) -> None:
    """End a lease as a member does that led, was stopped, and goes on."""
    client = EtcdClient(list(cluster.addresses.values()))
    await client.revoke(int(lease.lease_id, 16))
    await client.close()


async def test_replicas_answer_the_same(replicas):
    one, other = replicas
    leases = [await join(store, f"n{index}") for index, store in enumerate((one, other, one))]

    def cordon(node: pb.Node) -> None:
        node.cordoned = True

    await other.update("n0", "", cordon)
    await beat(other, leases[2], active_sessions=4)

    async def same() -> bool:
        mine, theirs = await one.snapshot(), await other.snapshot()
        return mine == theirs and mine.nodes[2].load.active_sessions == 4

    await eventually(same)
    assert [node.cordoned for node in await nodes(one)] == [True, False, False]
    async with opened([other._client.member.address]) as third:  # one that starts later
        late = await third.snapshot()
        assert late.nodes == (await one.snapshot()).nodes


async def test_a_lease_of_one_replica_is_renewed_by_another(replicas):
    one, other = replicas
    lease = await join(one)
    end_s = time.monotonic() + 2 * TTL_S
    while time.monotonic() < end_s:
        await beat(other, lease, active_sessions=1)
        assert await state(one) == await state(other) == pb.NODE_STATE_READY
        await asyncio.sleep(TTL_S / 4)


async def test_a_node_that_registered_elsewhere_just_now_may_beat_here(replicas):
    one, other = replicas
    _, lease, _ = await one.register("a", make_node(), "h:1", TTL_S)
    await beat(other, lease)  # the other's index may not have it yet
    assert await state(other) == pb.NODE_STATE_READY


async def test_a_takeover_at_one_replica_fences_the_old_process_at_the_other(replicas):
    one, other = replicas
    old = await join(one)
    new = await join(other, incarnation=2)
    for store in replicas:
        with pytest.raises(LeaseExpiredError):
            await beat(store, old)
        await beat(store, new)


async def test_a_watch_begun_at_one_replica_resumes_at_the_other(replicas):
    one, other = replicas
    lease = await join(one)
    revision = (await one.snapshot()).revision
    await one.deregister("a", "")
    async with aclosing(other.watch(revision)) as events:
        event = await asyncio.wait_for(anext(events), 10)
    assert (event.is_deleted, event.node.name) == (True, "nodes/a")
    with pytest.raises(LeaseExpiredError):
        await beat(other, lease)


async def test_a_lease_that_etcd_ends_early_is_made_anew_by_the_next_heartbeat(cluster, replicas):
    one, other = replicas
    lease = await join(one)
    await beat(one, lease, active_sessions=1)
    await eventually(lambda: are_alike(one, other))
    start = (await other.snapshot()).revision
    await revoke(cluster, lease)
    await eventually(lambda: is_dead(one))
    assert await state(one) == await state(other) == pb.NODE_STATE_READY
    assert (await one.snapshot()).unconfirmed == (await other.snapshot()).unconfirmed == set()
    again = await beat(other, lease)
    assert again.lease.lease_id == lease.lease_id
    end_s = time.monotonic() + 1.5 * TTL_S
    while time.monotonic() < end_s:
        await beat(one, lease)
        await asyncio.sleep(TTL_S / 4)
    await one.deregister("a", "")
    async with aclosing(other.watch(start)) as events:  # nothing but the end was ever seen
        event = await anext(aiter_changes(events))
    assert event.is_deleted


async def is_dead(store: EtcdStore) -> bool:
    entry = store._index.get("a")
    return entry is not None and not entry.alive


async def aiter_changes(events: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for event in events:
        if not event.is_load:
            yield event


async def test_a_lease_that_etcd_ends_early_still_lasts_its_time(cluster, replicas):
    lease = await join(replicas[0])
    before_s = time.monotonic()
    await beat(replicas[0], lease, active_sessions=1)
    await revoke(cluster, lease)

    async def lost() -> bool:
        return await state(replicas[0]) == pb.NODE_STATE_LOST

    await eventually(lost)
    assert time.monotonic() - before_s >= TTL_S
    for store in replicas:
        with pytest.raises(LeaseExpiredError):
            await beat(store, lease)


async def test_a_lease_that_ended_while_no_replica_ran_is_lost_at_once(cluster):
    async with opened(cluster) as one:
        lease = await join(one)
    await revoke(cluster, lease)
    async with opened(cluster) as other:
        assert (await other.snapshot()).unconfirmed == {"a"}

        async def lost() -> bool:
            return await state(other) == pb.NODE_STATE_LOST

        await eventually(lost, within_s=TTL_S - 0.5)


async def test_a_store_closes_whenever_it_is_told_to(cluster):
    for delay_s in [turn / 4000 for turn in range(40)]:  # some of them as the watch begins
        async with opened(cluster):
            await asyncio.sleep(delay_s)


async def test_a_restarted_replica_has_everything(cluster):
    async with opened(cluster) as one:
        lease = await join(one, ttl_s=60.0)

        def change(node: pb.Node) -> None:
            node.labels["rack"] = "7"

        changed = await one.update("a", "", change)
    async with opened(cluster) as other:
        assert await nodes(other) == [changed]
        await beat(other, lease)


async def test_compacted_changes_are_listed_again(cluster):
    async with Proxy.to(cluster) as proxy, opened([proxy.address]) as one, opened(cluster) as other:
        lease = await join(other, ttl_s=60.0)
        await eventually(lambda: are_alike(one, other))
        watch = one.watch((await one.snapshot()).revision)
        following = asyncio.ensure_future(anext(watch))
        await asyncio.sleep(0)
        proxy.cut()
        await join(other, "b", ttl_s=60.0)
        await other.deregister("a", "")
        await compact(cluster, (await other.snapshot()).revision)
        await eventually(lambda: is_cut_off(one))
        proxy.heal()
        await eventually(lambda: has(one, "b"))
        assert await nodes(one) == await nodes(other)
        with pytest.raises(MeshError) as caught:
            await asyncio.wait_for(following, 10)
        assert caught.value.reason == "REVISION_COMPACTED"
        with pytest.raises(LeaseExpiredError):
            await beat(one, lease)


async def are_alike(one: EtcdStore, other: EtcdStore) -> bool:
    return await nodes(one) == await nodes(other) != []


async def is_cut_off(store: EtcdStore) -> bool:
    return not store.health().is_connected


async def has(store: EtcdStore, node_id: str) -> bool:
    return any(node.name == f"nodes/{node_id}" for node in await nodes(store))


async def compact(cluster: Cluster, revision: int) -> None:
    """Compact; CompactionRequest has a revision as field 1 and a flag as field 2."""
    client = EtcdClient(list(cluster.addresses.values()))
    same_shape = etcd.LeaseGrantRequest(ttl=revision, id=1)
    await client.member.call("/etcdserverpb.KV/Compact", same_shape, etcd.LeaseRevokeResponse)
    await client.close()


async def test_values_that_are_no_records_are_passed_over(cluster, replicas, caplog):
    await join(replicas[0])
    client = EtcdClient(list(cluster.addresses.values()))
    for name in (key("nodes", "junk"), key("reports", "a"), PREFIX + b"x", PREFIX + b"\xff/y"):
        junk = etcd.RequestOp(request_put=etcd.PutRequest(key=name, value=b"\xff\xff"))
        await client.txn(etcd.TxnRequest(success=[junk]))
    await client.close()
    await join(replicas[0], "b")
    await eventually(lambda: has(replicas[1], "b"))
    assert [node.name for node in await nodes(replicas[1])] == ["nodes/a", "nodes/b"]
    assert "junk" in caplog.text
    async with opened(cluster) as third:
        assert await nodes(third) == await nodes(replicas[1])


async def test_a_member_that_is_away_is_passed_over(cluster):
    async with Proxy.to(cluster) as proxy:
        proxy.cut()
        async with opened([proxy.address, *cluster.addresses.values()]) as store:
            begun_s = time.monotonic()
            lease = await join(store)
            assert time.monotonic() - begun_s < 10
            await beat(store, lease)
            assert store.health().is_connected


async def test_etcd_that_does_not_answer_at_the_start_is_named(monkeypatch):
    monkeypatch.setattr(etcd_store, "OPEN_S", 0.2)
    server = ControlServer(
        ControlSettings(http_port=0, grpc_port=0, store="etcd://127.0.0.1:1,127.0.0.1:2")
    )
    with pytest.raises(MeshError, match=r"etcd at 127\.0\.0\.1:1, 127\.0\.0\.1:2") as caught:
        await server.start()
    assert (caught.value.code, caught.value.reason) == (Code.UNAVAILABLE, "STORE_UNAVAILABLE")


async def test_a_lease_that_is_gone_is_told_apart(cluster):
    client = EtcdClient(list(cluster.addresses.values()))
    assert await client.keep_alive(12345) == 0
    await client.revoke(12345)
    put = etcd.RequestOp(request_put=etcd.PutRequest(key=b"x", lease=12345))
    with pytest.raises(LeaseGoneError):
        await client.txn(etcd.TxnRequest(success=[put]))
    assert await client.grant(12345, 60) == 60
    assert await client.grant(12345, 60) == 60
    await client.revoke(12345)
    await client.close()


async def test_while_etcd_is_away_reads_go_on_with_their_age_and_writes_say_why(cluster):
    (name,) = cluster.addresses
    settings = ControlSettings(http_port=0, grpc_port=0, store=cluster.url, lease_ttl_s=TTL_S)
    server = ControlServer(settings)
    addresses = await server.start()
    try:
        async with (
            ControlClient(f"grpc://{addresses.grpc}") as client,
            grpc.aio.insecure_channel(addresses.grpc) as channel,
            aiohttp.ClientSession(f"http://{addresses.http}") as http,
        ):
            registered = await client.register("a", make_node())
            lease_id = registered.lease.lease_id
            await client.heartbeat("a", lease_id=lease_id, incarnation=1, ready=True)
            before = await client.list_nodes()
            silent_s = time.monotonic()
            cluster.signal(name, signal.SIGSTOP)
            try:
                await eventually(lambda: is_away(client))
                with pytest.raises(MeshError, match=r"etcd at 127\.0\.0\.1") as caught:
                    await client.register("b", make_node())
                assert (caught.value.code, caught.value.reason) == (
                    Code.UNAVAILABLE,
                    "STORE_UNAVAILABLE",
                )
                assert before[0].name in [node.name for node in await client.list_nodes()]
                status = await client.get_status()
                assert not status.serving
                assert status.store_age.ToMilliseconds() >= 2500
                call = route_stub(channel).ListModels(route_pb.ListModelsRequest())
                await call
                trailing = dict(await call.trailing_metadata())
                assert int(trailing[AGE_KEY]) >= 2500
                async with http.get("/v1/nodes/a") as response:
                    assert response.status == 200
                    assert int(response.headers[f"Grpc-Trailer-{AGE_KEY}"]) >= 2500
                async with http.get("/healthz") as response:
                    health = await response.json()
                assert health["status"] == "the store is away"
                assert health["store_age_s"] >= 2.5
                await eventually(lambda: is_not_routed(client))  # silent for its lease: unconfirmed
                assert time.monotonic() - silent_s >= TTL_S - 1.0
                assert (await client.get_node("a")).state == pb.NODE_STATE_READY
            finally:
                cluster.signal(name, signal.SIGCONT)
            await eventually(lambda: is_serving(client))
            async with http.get("/v1/nodes/a") as response:
                assert f"Grpc-Trailer-{AGE_KEY}" not in response.headers
            await client.register("b", make_node())
    finally:
        await server.close()


async def is_away(client: ControlClient) -> bool:
    return not (await client.get_status()).store_connected


async def is_serving(client: ControlClient) -> bool:
    return (await client.get_status()).serving


async def is_not_routed(client: ControlClient) -> bool:
    try:
        await client.select_route(MODEL)
    except MeshError as error:
        if error.reason != "STORE_UNAVAILABLE":
            raise
        return True
    return False


async def test_a_node_that_beats_is_confirmed_while_etcd_is_away(cluster):
    (name,) = cluster.addresses
    async with opened(cluster) as store:
        lease = await join(store, ttl_s=5.0)  # more than the time that a call gives up after
        cluster.signal(name, signal.SIGSTOP)
        try:
            end_s = time.monotonic() + 1.5 * lease.ttl_s
            while time.monotonic() < end_s:
                with pytest.raises(MeshError) as caught:
                    await beat(store, lease)  # heard, though it cannot be renewed
                assert caught.value.reason == "STORE_UNAVAILABLE"
                assert (await store.snapshot()).unconfirmed == set()
        finally:
            cluster.signal(name, signal.SIGCONT)

        async def renewed() -> bool:
            try:
                return bool(await beat(store, lease))
            except LeaseExpiredError:
                raise
            except MeshError:
                return False

        await eventually(renewed)
        assert await state(store) == pb.NODE_STATE_READY
