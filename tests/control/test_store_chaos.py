"""Three etcd members, two replicas as processes, nodes that beat, and faults one after another."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import pytest

from meshnet.control.client import ClientSettings, ControlClient
from meshnet.errors import LeaseExpiredError, MeshError
from meshnet.v1 import node_service_pb2 as pb
from meshnet.v1 import types_pb2
from tests.control.etcd_cluster import Cluster, Proxy, etcd_cluster

pytestmark = [pytest.mark.etcd, pytest.mark.timeout(280)]

TTL_S = 6.0
NODES = 8
SLACK_S = 2.5
"""Beyond its TTL a dead node may be routed to for etcd's check of leases (0.5 s), the write
that marks it LOST, and what a machine with two cores for all of this takes."""


@dataclass
class Tally:
    """What was seen, for the report and the assertions."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0


@dataclass
class Replica:
    """A ``meshnet control`` process that comes back at the same addresses."""

    store: str
    grpc_port: int = 0
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.grpc_port}"

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "meshnet", "control", "--json", "--store", self.store),
            *("--listen", "127.0.0.1:0", "--grpc-listen", f"127.0.0.1:{self.grpc_port}"),
            *("--lease-ttl", str(TTL_S), "--exit-with-parent"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 60)
        self.grpc_port = int(json.loads(line)["grpc"].rpartition(":")[2])

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()


class Beater:
    """Beats as a node does: at the interval it was told, and again soon when that failed."""

    def __init__(self, name: str, model: str, urls: str, tally: Tally) -> None:
        self.name = name
        self.model = model
        self.lease_id = ""
        self.stopped_s: float | None = None
        self._urls = urls
        self._tally = tally
        self._task: asyncio.Task[None] | None = None
        self._ready = asyncio.Event()

    async def start(self) -> None:
        self._task = asyncio.create_task(self._run())
        await asyncio.wait_for(self._ready.wait(), 30)

    async def stop(self) -> None:
        """Die, without a word."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait({self._task})
        self.stopped_s = time.monotonic()
        if not self._task.cancelled():
            self._task.result()

    async def _run(self) -> None:
        async with ControlClient(self._urls) as client:
            await self._register(client)
            renewed_s = time.monotonic()
            while True:
                pause_s = TTL_S / 3
                begun_s = time.monotonic()
                try:
                    await client.heartbeat(
                        self.name,
                        lease_id=self.lease_id,
                        incarnation=1,
                        ready=True,
                        load=types_pb2.LoadStats(active_sessions=1),
                    )
                    self._tally.counts["heartbeats taken"] += 1
                    gap_s = time.monotonic() - renewed_s
                    self._tally.longest_gap_s = max(self._tally.longest_gap_s, gap_s)
                    renewed_s = begun_s
                    self._ready.set()
                except LeaseExpiredError:
                    self._tally.counts["registered again"] += 1
                    await self._register(client)
                    continue
                except MeshError as error:
                    self._tally.counts[f"heartbeats failed: {error.reason or error.code.name}"] += 1
                    pause_s = 0.5
                await asyncio.sleep(pause_s)

    async def _register(self, client: ControlClient) -> None:
        node = pb.Node(
            incarnation=1,
            endpoints=[types_pb2.Endpoint(uri=f"http://{self.name}:1/forward")],
            shards=[
                types_pb2.Shard(
                    model=self.model,
                    model_digest="d",
                    layers=types_pb2.LayerRange(start=0, end=2),
                    layer_count=2,
                    embedding=True,
                    lm_head=True,
                )
            ],
        )
        self.lease_id = (await client.register(self.name, node)).lease.lease_id


class Observer:
    """Asks one replica, or whichever answers, for the nodes and for a route to each, on and on."""

    def __init__(self, name: str, url: str, beaters: list[Beater], tally: Tally) -> None:
        self._name = name
        self._url = url
        self._beaters = beaters
        self._tally = tally

    async def run(self) -> None:
        is_pinned = self._name != "both"
        patience = ClientSettings(timeout_s=2.0) if is_pinned else ClientSettings()
        async with ControlClient(self._url, patience) as client:
            while True:
                try:
                    await self._look(client)
                except MeshError as error:
                    kind = error.reason or error.code.name
                    self._tally.counts[f"{self._name} answered {kind}"] += 1
                    if not is_pinned:
                        self._tally.wrong.append(f"no list from either replica: {error}")
                await asyncio.sleep(0.2)

    async def _look(self, client: ControlClient) -> None:
        alive = {f"nodes/{b.name}" for b in self._beaters if b.stopped_s is None}
        listed = {node.name: node.state for node in await client.list_nodes()}
        self._tally.counts[f"lists from {self._name}"] += 1
        for name in alive:
            if listed.get(name) != pb.NODE_STATE_READY:
                self._tally.wrong.append(f"{self._name}: {name} beats but is {listed.get(name)}")
        for beater in self._beaters:
            asked_s = time.monotonic()
            try:
                await client.select_route(beater.model)
            except MeshError as error:
                kind = error.reason or error.code.name
                is_dead = beater.stopped_s is not None
                about = "dead" if is_dead else "live"
                self._tally.counts[f"{self._name}: no route to a {about} node: {kind}"] += 1
                if not is_dead and (kind == "LAYERS_UNCOVERED" or self._name == "both"):
                    self._tally.wrong.append(f"{self._name}: no route to {beater.name}: {error}")
                continue
            self._tally.counts[f"routes from {self._name}"] += 1
            dead_s = asked_s - beater.stopped_s if beater.stopped_s is not None else 0.0
            if dead_s > TTL_S + SLACK_S:
                self._tally.wrong.append(f"{self._name}: {beater.name} routed to {dead_s:.1f} s")


@dataclass
class Mesh:
    """All of it."""

    etcd: Cluster
    proxies: list[Proxy]
    one: Replica
    other: Replica
    beaters: list[Beater]
    tally: Tally

    async def lose_one(self) -> None:
        """Let one of the nodes die."""
        await next(b for b in self.beaters if b.stopped_s is None).stop()


@asynccontextmanager
async def running_mesh(etcd: Cluster) -> AsyncIterator[Mesh]:
    """Run two replicas, one of them behind proxies to etcd, and nodes that know both."""
    tally = Tally()
    async with AsyncExitStack() as stack:
        proxies = [await stack.enter_async_context(Proxy.to(etcd, name)) for name in etcd.addresses]
        one = Replica("etcd://" + ",".join(proxy.address for proxy in proxies))
        other = Replica(etcd.url)
        for replica in (one, other):
            stack.push_async_callback(replica.kill)
            await replica.start()
        beaters = []
        for index in range(NODES):
            urls = (one.url, other.url) if index % 2 else (other.url, one.url)
            beaters.append(Beater(f"n{index}", f"models/m{index}", ",".join(urls), tally))
        for beater in beaters:
            stack.push_async_callback(beater.stop)
            await beater.start()
        observers = [
            asyncio.create_task(Observer(name, url, beaters, tally).run())
            for name, url in (
                ("one", one.url),
                ("other", other.url),
                ("both", f"{one.url},{other.url}"),
            )
        ]
        try:
            yield Mesh(etcd, proxies, one, other, beaters, tally)
        finally:
            for observer in observers:
                observer.cancel()
            await asyncio.wait(observers)
        for observer in observers:
            if not observer.cancelled():
                observer.result()


async def kill_a_replica(mesh: Mesh) -> None:
    await mesh.one.kill()
    await mesh.lose_one()
    await asyncio.sleep(TTL_S + SLACK_S + 1)
    await mesh.one.start()


async def stop_the_leader(mesh: Mesh) -> None:
    leader = await mesh.etcd.leader()
    mesh.etcd.signal(leader, signal.SIGSTOP)
    try:
        await mesh.lose_one()
        await asyncio.sleep(10)
    finally:
        mesh.etcd.signal(leader, signal.SIGCONT)
    await asyncio.sleep(TTL_S)  # in which a leader that was stopped may end leases early


async def partition_a_replica(mesh: Mesh) -> None:
    for proxy in mesh.proxies:
        proxy.cut()
    await mesh.lose_one()
    await asyncio.sleep(TTL_S + SLACK_S + 1)
    async with ControlClient(mesh.one.url) as client:
        status = await client.get_status()
        assert not status.store_connected
        assert status.store_age.ToMilliseconds() >= 1000 * TTL_S
        assert len(await client.list_nodes()) == NODES
        with pytest.raises(MeshError) as caught:
            await client.drain("n7")
        assert caught.value.reason == "STORE_UNAVAILABLE"
    for proxy in mesh.proxies:
        proxy.heal()


@pytest.mark.parametrize("fault", [kill_a_replica, stop_the_leader, partition_a_replica])
async def test_no_node_is_lost_that_beats_and_no_dead_one_is_routed_to(
    fault: Callable[[Mesh], Awaitable[None]],
    tmp_path,
    record_property,
    capsys: pytest.CaptureFixture[str],
):
    with etcd_cluster(tmp_path, 3) as etcd:
        await etcd.ready()
        async with running_mesh(etcd) as mesh:
            leases = [beater.lease_id for beater in mesh.beaters]
            await fault(mesh)
            await both_answer_the_same(mesh)
            tally = mesh.tally
            for name, count in sorted(tally.counts.items()):
                record_property(name, count)
            record_property("longest time between renewals", round(tally.longest_gap_s, 2))
            print(fault.__name__, dict(tally.counts), f"longest gap {tally.longest_gap_s:.2f} s")
            assert tally.wrong == []
            assert [beater.lease_id for beater in mesh.beaters] == leases
            assert tally.counts["registered again"] == 0


async def both_answer_the_same(mesh: Mesh) -> None:
    """Wait until both replicas list the same, and that is the truth."""
    dead = {b.name for b in mesh.beaters if b.stopped_s is not None}
    async with ControlClient(mesh.one.url) as one, ControlClient(mesh.other.url) as other:
        async with asyncio.timeout(30):
            while True:
                mine, theirs = await one.list_nodes(), await other.list_nodes()
                ready = [await c.get_status() for c in (one, other)]
                if mine == theirs and all(status.store_connected for status in ready):
                    break
                await asyncio.sleep(0.1)
    states = {node.name.removeprefix("nodes/"): node.state for node in mine}
    assert set(states) == {beater.name for beater in mesh.beaters}
    assert {name for name, state in states.items() if state == pb.NODE_STATE_LOST} == dead
    live = [state for name, state in states.items() if name not in dead]
    assert live == [pb.NODE_STATE_READY] * (NODES - 1)
