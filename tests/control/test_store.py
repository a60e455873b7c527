"""One contract for every store: memory, SQLite, etcd (one member, on real time)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshnet.control.registry import Event, Store
from meshnet.control.sqlite_journal import SqliteJournal
from meshnet.control.store import MemoryStore
from meshnet.control.store_url import make_store
from meshnet.errors import Code, LeaseExpiredError, MeshError
from meshnet.lease import Lease
from meshnet.v1 import node_service_pb2 as pb
from meshnet.v1 import types_pb2
from tests.control.etcd_cluster import Cluster

TTL_S = 2.0
FORGET_S = 2.0
MODEL = "models/acme/tiny"


@dataclass
class Harness:
    """A store under test, and how time passes for it."""

    store: Store
    clock: Callable[[], float]
    advance: Callable[[float], None]

    async def join(self, node_id: str = "a", **terms: Any) -> Lease:
        """Register a node and make it READY."""
        _, lease, _ = await self.register(node_id, **terms)
        await self.beat(lease)
        return lease

    async def register(
        self, node_id: str = "a", *, address: str = "h:1", incarnation: int = 1, **fields: Any
    ) -> tuple[pb.Node, Lease, int]:
        node = pb.Node(
            incarnation=incarnation,
            endpoints=[types_pb2.Endpoint(uri=f"http://{address}/forward")],
            shards=[types_pb2.Shard(model=MODEL, model_digest="d")],
            **fields,
        )
        return await self.store.register(node_id, node, address, TTL_S)

    async def beat(self, lease: Lease, *, ready: bool = True, **load: int) -> Any:
        request = pb.HeartbeatRequest(
            name=f"nodes/{lease.node}",
            lease_id=lease.lease_id,
            incarnation=lease.incarnation,
            ready=ready,
            load=types_pb2.LoadStats(**load) if load else None,
        )
        return await self.store.heartbeat(lease.node, request)

    async def state(self, node_id: str = "a") -> str:
        """Give a node's state; FORGOTTEN once it is not listed."""
        try:
            node = await self.store.get(node_id)
        except MeshError as error:
            if error.reason != "NODE_UNKNOWN":
                raise
            return "FORGOTTEN"
        return pb.NodeState.Name(node.state).removeprefix("NODE_STATE_")

    async def becomes(self, state: str, within_s: float = 30.0) -> float:
        """Let time pass until a node is in `state`; gives the clock then."""
        async with asyncio.timeout(within_s):
            while await self.state() != state:
                self.advance(0.05)
                await asyncio.sleep(0.01)
        return self.clock()


@pytest.fixture(params=["memory", "sqlite", pytest.param("etcd", marks=pytest.mark.etcd)])
async def harness(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Harness]:
    now = [1000.0]

    def advance(seconds: float) -> None:
        now[0] += seconds

    if request.param == "etcd":
        cluster: Cluster = request.getfixturevalue("lone_etcd")
        await cluster.emptied()
        store = make_store(cluster.url, time.monotonic, FORGET_S)
        made = Harness(store, time.monotonic, lambda _: None)
    else:
        url = "memory" if request.param == "memory" else f"sqlite:{tmp_path / 'nodes.db'}"
        made = Harness(make_store(url, lambda: now[0], FORGET_S), lambda: now[0], advance)
    await made.store.open()
    yield made
    await made.store.close()


async def next_event(events: AsyncIterator[Event], wanted: Callable[[Event], bool]) -> Event:
    async with asyncio.timeout(30):
        async for event in events:
            if wanted(event):
                return event
    raise AssertionError("the watch ended")


async def test_what_is_written_is_read_next(harness):
    node, lease, revision = await harness.register()
    assert (node.name, node.state) == ("nodes/a", pb.NODE_STATE_JOINING)
    assert lease.ttl_s >= TTL_S
    snapshot = await harness.store.snapshot()
    assert (snapshot.nodes, snapshot.revision) == ((node,), revision)
    answer = await harness.beat(lease)
    assert answer.desired_state == pb.NODE_STATE_READY
    assert await harness.state() == "READY"
    await harness.beat(lease, ready=False)
    assert await harness.state() == "JOINING"
    health = harness.store.health()
    assert (health.is_connected, health.age_s) == (True, 0.0)
    assert (await harness.store.snapshot()).unconfirmed == frozenset()


async def test_nodes_are_listed_in_order_of_name(harness):
    for node_id in ("c", "a", "b"):
        await harness.register(node_id)
    names = [node.name for node in (await harness.store.snapshot()).nodes]
    assert names == ["nodes/a", "nodes/b", "nodes/c"]


async def test_a_lease_never_ends_before_its_time_and_then_does(harness):
    lease = await harness.join()
    before_s = harness.clock()
    await harness.beat(lease)
    lost_s = await harness.becomes("LOST")
    assert lost_s - before_s >= TTL_S
    with pytest.raises(LeaseExpiredError):
        await harness.beat(lease)
    assert await harness.state() == "LOST"
    again = await harness.join()
    assert again.lease_id != lease.lease_id
    assert await harness.state() == "READY"


async def test_a_node_that_beats_is_never_lost(harness):
    lease = await harness.join()
    end_s = harness.clock() + 2.5 * TTL_S
    while harness.clock() < end_s:
        await harness.beat(lease, active_sessions=1)
        assert await harness.state() == "READY"
        harness.advance(TTL_S / 3)
        await asyncio.sleep(TTL_S / 10)


async def test_a_lost_node_is_forgotten_after_a_time(harness):
    await harness.register()
    lost_s = await harness.becomes("LOST")
    gone_s = await harness.becomes("FORGOTTEN")
    assert gone_s - lost_s >= FORGET_S - 0.5
    with pytest.raises(MeshError) as caught:
        await harness.store.update("a", "", lambda _: None)
    assert caught.value.code is Code.NOT_FOUND


async def test_registering_again_is_idempotent(harness):
    lease = await harness.join()
    _, again, _ = await harness.register()
    assert again.lease_id == lease.lease_id
    assert await harness.state() == "READY"
    await harness.beat(lease)


async def test_another_address_is_fenced_off_while_the_lease_lives(harness):
    lease = await harness.join()
    before = await harness.store.get("a")
    with pytest.raises(MeshError) as caught:
        await harness.register(address="h:2", incarnation=2)
    assert (caught.value.code, caught.value.reason) == (Code.ALREADY_EXISTS, "NODE_ID_IN_USE")
    assert caught.value.retry_after_s is not None
    assert 0 < caught.value.retry_after_s <= lease.ttl_s
    assert await harness.store.get("a") == before
    await harness.beat(lease)
    await harness.becomes("LOST")
    await harness.join(address="h:2", incarnation=1)
    assert await harness.state() == "READY"


async def test_a_newer_incarnation_takes_over_at_once(harness):
    old = await harness.join()
    new = await harness.join(incarnation=2)
    assert new.lease_id != old.lease_id
    with pytest.raises(LeaseExpiredError):
        await harness.beat(old)
    with pytest.raises(MeshError) as caught:
        await harness.register(incarnation=1)
    assert (caught.value.code, caught.value.reason) == (Code.ABORTED, "STALE_INCARNATION")
    await harness.beat(new)


async def test_a_heartbeat_of_another_incarnation_is_refused(harness):
    lease = await harness.join()
    request = pb.HeartbeatRequest(name="nodes/a", lease_id=lease.lease_id, incarnation=7)
    with pytest.raises(MeshError) as caught:
        await harness.store.heartbeat("a", request)
    assert caught.value.reason == "STALE_INCARNATION"


@pytest.mark.parametrize("lease_id", ["", "zz", "0" * 16, "f" * 16, "-1", "f" * 500, "\u00e9"])
async def test_a_lease_id_that_nobody_gave_has_ended(harness, lease_id):
    lease = await harness.join()
    request = pb.HeartbeatRequest(name="nodes/a", lease_id=lease_id, incarnation=1, ready=True)
    for node_id in ("a", "nobody"):
        with pytest.raises(LeaseExpiredError):
            await harness.store.heartbeat(node_id, request)
    await harness.beat(lease)


async def test_of_two_first_registrations_at_once_one_wins(harness):
    results = await asyncio.gather(
        *(harness.register(address=f"h:{port}") for port in range(6)), return_exceptions=True
    )
    won = [result for result in results if not isinstance(result, BaseException)]
    lost = [result for result in results if isinstance(result, MeshError)]
    assert (len(won), len(lost)) == (1, 5)
    assert {error.reason for error in lost} == {"NODE_ID_IN_USE"}
    _, lease, _ = won[0]
    await harness.beat(lease)
    stored = await harness.store.get("a")
    assert stored.endpoints[0].uri == f"http://{lease.address}/forward"


async def test_operators_changes_are_compared_by_etag(harness):
    await harness.join()

    def cordon(node: pb.Node) -> None:
        node.cordoned = True
        node.labels["rack"] = "7"

    before = await harness.store.get("a")
    changed = await harness.store.update("a", before.etag, cordon)
    assert (changed.cordoned, dict(changed.labels)) == (True, {"rack": "7"})
    assert changed.etag != before.etag
    assert not before.cordoned  # a message once given does not change
    with pytest.raises(MeshError) as caught:
        await harness.store.update("a", before.etag, cordon)
    assert (caught.value.code, caught.value.reason) == (Code.ABORTED, "ETAG_MISMATCH")
    with pytest.raises(MeshError):
        await harness.store.drain("a", before.etag, 1.0, "")
    with pytest.raises(MeshError):
        await harness.store.deregister("a", before.etag)
    assert (await harness.store.get("a")).etag == changed.etag


async def test_concurrent_changes_of_one_node_are_all_kept(harness):
    await harness.register()

    def label(name: str) -> Callable[[pb.Node], None]:
        def change(node: pb.Node) -> None:
            node.labels[name] = "1"

        return change

    await asyncio.gather(*(harness.store.update("a", "", label(f"l{n}")) for n in range(8)))
    assert set((await harness.store.get("a")).labels) == {f"l{n}" for n in range(8)}


async def test_what_an_operator_set_outlives_a_restart_of_the_node(harness):
    await harness.join()

    def change(node: pb.Node) -> None:
        node.cordoned = True
        node.weight = 50
        node.labels["rack"] = "7"

    await harness.store.update("a", "", change)
    node, _, _ = await harness.register(incarnation=2)
    assert (node.cordoned, node.weight, dict(node.labels)) == (True, 50, {"rack": "7"})
    assert node.state == pb.NODE_STATE_JOINING


async def test_heartbeats_do_not_change_the_etag(harness):
    lease = await harness.join()
    etag = (await harness.store.get("a")).etag
    async with aclosing(harness.store.watch((await harness.store.snapshot()).revision)) as events:
        following = asyncio.ensure_future(next_event(events, lambda event: event.is_load))
        await asyncio.sleep(0)
        await harness.beat(lease, active_sessions=7)
        event = await following
    assert event.node.load.active_sessions == 7
    assert (await harness.store.get("a")).etag == etag
    assert (await harness.store.get("a")).load.active_sessions == 7


async def test_a_node_drains_until_idle(harness):
    lease = await harness.join()
    drained = await harness.store.drain("a", "", 60.0, "new disk")
    assert (drained.state, drained.drain_reason) == (pb.NODE_STATE_DRAINING, "new disk")
    answer = await harness.beat(lease, active_sessions=2)
    assert answer.desired_state == pb.NODE_STATE_DRAINING
    assert 50.0 < answer.drain_remaining_s <= 60.0
    await harness.beat(lease, active_sessions=0, queue_depth=1)
    assert await harness.state() == "DRAINED"


async def test_a_drain_ends_when_its_grace_is_over(harness):
    lease = await harness.join()
    begun_s = harness.clock()
    await harness.store.drain("a", "", 1.0, "")
    async with asyncio.timeout(30):
        while (await harness.beat(lease, active_sessions=5)).desired_state != pb.NODE_STATE_DRAINED:
            assert harness.clock() - begun_s < 20
            harness.advance(0.1)
            await asyncio.sleep(0.05)
    assert harness.clock() - begun_s >= 1.0


async def test_a_lost_node_cannot_be_drained(harness):
    await harness.register()
    await harness.becomes("LOST")
    with pytest.raises(MeshError) as caught:
        await harness.store.drain("a", "", 1.0, "")
    assert (caught.value.code, caught.value.reason) == (Code.FAILED_PRECONDITION, "NODE_LOST")


async def test_a_deregistered_node_is_gone_and_its_lease_with_it(harness):
    lease = await harness.join()
    await harness.store.deregister("a", "")
    assert await harness.state() == "FORGOTTEN"
    with pytest.raises(LeaseExpiredError):
        await harness.beat(lease)
    with pytest.raises(MeshError) as caught:
        await harness.store.deregister("a", "")
    assert caught.value.reason == "NODE_UNKNOWN"
    await harness.join(address="h:9")


async def test_a_watch_gives_each_change_once_and_resumes(harness):
    start = (await harness.store.snapshot()).revision
    lease = await harness.join()
    seen = []
    async with aclosing(harness.store.watch(start)) as events:
        seen += [await next_event(events, lambda event: not event.is_load) for _ in range(2)]
        harness.advance(TTL_S)
        lost = await next_event(events, lambda event: not event.is_load)
    assert [event.node.state for event in seen] == [pb.NODE_STATE_JOINING, pb.NODE_STATE_READY]
    assert seen[0].models_before == frozenset()
    assert seen[1].models_before == {MODEL}
    assert lost.node.state == pb.NODE_STATE_LOST
    await harness.store.deregister("a", "")
    async with aclosing(harness.store.watch(seen[1].revision)) as events:
        again = await next_event(events, lambda event: not event.is_load)
        gone = await next_event(events, lambda event: event.is_deleted)
    assert (again.revision, again.node) == (lost.revision, lost.node)
    assert start < seen[0].revision < seen[1].revision < lost.revision < gone.revision
    with pytest.raises(LeaseExpiredError):
        await harness.beat(lease)


@pytest.mark.parametrize("revision", [0, 2**60])
async def test_a_watch_from_revisions_that_are_not_kept_is_refused(harness, revision):
    with pytest.raises(MeshError) as caught:
        await anext(harness.store.watch(revision))
    assert (caught.value.code, caught.value.reason) == (Code.OUT_OF_RANGE, "REVISION_COMPACTED")


async def test_stopping_ends_watches(harness):
    async with aclosing(harness.store.watch((await harness.store.snapshot()).revision)) as events:
        following = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        harness.store.stop()
        with pytest.raises(MeshError) as caught:
            await asyncio.wait_for(following, 10)
    assert caught.value.reason == "STOPPING"


async def test_a_store_may_be_closed_unopened_and_twice(tmp_path):
    for url in ("memory", f"sqlite:{tmp_path / 'x.db'}", "etcd://127.0.0.1:1"):
        store = make_store(url, time.monotonic, FORGET_S)
        await store.close()
        await store.close()


class TestSqlite:
    """What only a journal does."""

    def open_at(self, path: Path, now: list[float]) -> MemoryStore:
        return MemoryStore(lambda: now[0], time.time, journal=SqliteJournal(path))

    async def test_what_outlives_a_restart(self, tmp_path):
        now = [1000.0]
        one = self.open_at(tmp_path / "n.db", now)
        await one.open()
        harness = Harness(one, lambda: now[0], lambda _: None)
        lease = await harness.join()
        await harness.join("gone", address="h:2")

        def change(node: pb.Node) -> None:
            node.cordoned = True
            node.weight = 50
            node.labels["rack"] = "7"

        changed = await one.update("a", "", change)
        drained = await harness.join("d", address="h:3")
        await one.drain("d", "", 60.0, "disk")
        await one.deregister("gone", "")
        before = await one.snapshot()
        await one.close()

        now[0] = 5.0  # another boot: the monotonic clock means nothing across it
        other = self.open_at(tmp_path / "n.db", now)
        await other.open()
        after = await other.snapshot()
        assert [node.name for node in after.nodes] == ["nodes/a", "nodes/d"]
        kept = await other.get("a")
        assert (kept.cordoned, kept.weight, dict(kept.labels)) == (True, 50, {"rack": "7"})
        assert (kept.etag, kept.state) == (changed.etag, pb.NODE_STATE_READY)
        assert after.revision >= before.revision
        restarted = Harness(other, lambda: now[0], lambda _: None)
        now[0] += TTL_S - 0.01  # the leases begin with their full time
        await restarted.beat(lease)
        answer = await restarted.beat(drained, active_sessions=1)
        assert 57.0 < answer.drain_remaining_s <= 60.0
        now[0] += TTL_S
        assert await restarted.state() == "LOST"
        await other.close()

        third = self.open_at(tmp_path / "n.db", now)
        await third.open()
        assert await Harness(third, lambda: now[0], lambda _: None).state() == "LOST"
        with pytest.raises(LeaseExpiredError):
            await Harness(third, lambda: now[0], lambda _: None).beat(lease)
        await third.close()

    async def test_a_file_in_use_is_refused(self, tmp_path):
        one = self.open_at(tmp_path / "n.db", [0.0])
        await one.open()
        other = self.open_at(tmp_path / "n.db", [0.0])
        with pytest.raises(MeshError, match=r"n\.db.*another control plane uses it"):
            await other.open()
        await other.close()
        await one.close()

    @pytest.mark.parametrize("content", [b"hello" * 200, b"SQLite format 3\x00" + b"\xff" * 2000])
    async def test_a_file_of_another_kind_is_refused_and_kept(self, tmp_path, content):
        path = tmp_path / "n.db"
        path.write_bytes(content)
        store = self.open_at(path, [0.0])
        with pytest.raises(MeshError, match=r"n\.db") as caught:
            await store.open()
        assert caught.value.field == "--store"
        assert path.read_bytes() == content

    async def test_another_programs_database_is_refused(self, tmp_path):
        import sqlite3

        path = tmp_path / "n.db"
        database = sqlite3.connect(path)
        database.execute("CREATE TABLE t (x)")
        database.commit()
        database.close()
        store = self.open_at(path, [0.0])
        with pytest.raises(MeshError, match="something else"):
            await store.open()

    async def test_a_folder_that_is_missing_is_named(self, tmp_path):
        store = self.open_at(tmp_path / "no" / "n.db", [0.0])
        with pytest.raises(MeshError, match=r"no/n\.db"):
            await store.open()

    async def test_a_write_that_fails_changes_nothing(self, tmp_path):
        now = [0.0]
        store = self.open_at(tmp_path / "n.db", now)
        await store.open()
        harness = Harness(store, lambda: now[0], lambda _: None)
        lease = await harness.join()
        before = await store.get("a")
        store._journal.close()  # as a disk that is gone
        for call in (
            lambda: harness.register(incarnation=2),
            lambda: harness.register("b", address="h:2"),
            lambda: store.update("a", "", lambda node: None),
            lambda: store.deregister("a", ""),
        ):
            with pytest.raises(MeshError) as caught:
                await call()
            assert (caught.value.code, caught.value.reason) == (
                Code.UNAVAILABLE,
                "STORE_UNAVAILABLE",
            )
        assert (await store.snapshot()).nodes == (before,)
        await harness.beat(lease)
        now[0] += TTL_S
        assert await harness.state() == "LOST"  # in memory at least
        await store.close()


@pytest.mark.parametrize(
    "url",
    [
        *("", "disk", "sqlite:", "etcd://", "etcd://h", "etcd://h:x", "etcd://h:1,", "etcd:h:1"),
        *("etcd://h:0", "etcd://u@h:1", "etcd://h:1/x", "etcd://h:1?x", "Memory"),
    ],
)
def test_a_bad_store_is_refused_with_what_was_expected(url):
    with pytest.raises(MeshError, match=r"expected memory, sqlite:PATH or etcd://HOST:PORT"):
        make_store(url, time.monotonic, 1.0)
