"""The registry that replicas share: writes are transactions in etcd, reads come from an index."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Final

import grpc

from meshnet.control.etcd.client import EtcdClient
from meshnet.control.etcd.feed import Feed
from meshnet.control.etcd.heartbeats import Heartbeats
from meshnet.control.etcd.index import Index
from meshnet.control.etcd.keeper import Keeper
from meshnet.control.etcd.keys import ALIVE, REPORTS, delete
from meshnet.control.etcd.nodes import REACH_S, Nodes
from meshnet.control.etcd.registration import Registration
from meshnet.control.etcd.transaction import Held, Write, transact
from meshnet.control.lifecycle import Judge, drain, existing
from meshnet.control.registry import Event, Heartbeat, Snapshot, StoreHealth
from meshnet.lease import Lease
from meshnet.topology import NodeId
from meshnet.v1 import node_service_pb2 as pb

__all__ = ["EtcdStore"]

OPEN_S: Final = 5.0
REPORT_DELAY_S: Final = 1.0
"""Every heartbeat is published to all replicas, within less than this: a node of which nothing
was heard for longer than its lease is not routed to, though a new leader of etcd, which begins
all leases anew, may call it alive for up to another time to live."""


class EtcdStore:
    """A registry in etcd.

    A node's lease is a lease of etcd, renewed by whichever replica the node's heartbeat
    reaches; the node never speaks to etcd. While etcd is away, writes fail with UNAVAILABLE
    (STORE_UNAVAILABLE) and reads go on from the index; a snapshot tells its age.

    Args:
        addresses: ``host:port`` of etcd's members.
        wall_clock: seconds since the epoch.
        forget_after_s: seconds for which a LOST node is still listed.
        tls: for TLS; None for none.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        wall_clock: Callable[[], float],
        *,
        forget_after_s: float = 600.0,
        tls: grpc.ChannelCredentials | None = None,
    ) -> None:
        self._client = EtcdClient(addresses, tls)
        self._index = Index(time.monotonic)
        self._feed = Feed(self._client, self._index)
        self._keeper = Keeper(self._client, self._index, self._feed, forget_after_s)
        self._nodes = Nodes(self._client, self._index, wall_clock)
        self._heartbeats = Heartbeats(self._nodes, self._keeper)

    async def open(self) -> None:
        """Read the registry and begin to follow it.

        Raises:
            MeshError: UNAVAILABLE, etcd does not answer.
        """
        await self._feed.open(OPEN_S)
        self._keeper.open()

    def stop(self) -> None:
        """End all watches."""
        self._index.changes.stop()

    async def close(self) -> None:
        """Free everything; leases go on until they end."""
        self.stop()
        await self._keeper.close()
        await self._feed.close()
        await self._client.close()

    def health(self) -> StoreHealth:
        """Tell whether etcd answers, and since when it does not."""
        return self._feed.health()

    async def register(
        self, node_id: NodeId, node: pb.Node, address: str, ttl_s: float
    ) -> tuple[pb.Node, Lease, int]:
        """Store `node` under a lease; gives it as stored, with the lease and the revision.

        Raises:
            MeshError: the id is held by another address or a newer incarnation; UNAVAILABLE.
        """
        return await Registration(self._nodes, node_id, node, address, ttl_s).run()

    async def heartbeat(
        self, node_id: NodeId, request: pb.HeartbeatRequest, judge: Judge | None = None
    ) -> Heartbeat:
        """Renew a lease and take in the node's report.

        Raises:
            LeaseExpiredError: the node has to register again.
            MeshError: ABORTED, another incarnation holds the lease; UNAVAILABLE.
        """
        return await self._heartbeats.take(node_id, request, judge)

    async def update(
        self, node_id: NodeId, etag: str, change: Callable[[pb.Node], None]
    ) -> pb.Node:
        """Apply an operator's change.

        Raises:
            MeshError: NOT_FOUND; ABORTED, the node has another etag; UNAVAILABLE.
        """

        async def decide(held: Held) -> Write:
            record = existing(self._nodes.record(node_id, held), node_id, etag).copy()
            change(record.node)
            return Write(self._nodes.stored(node_id, record, held))

        stored, revision = await self._nodes.change(node_id, decide)
        return self._nodes.written(node_id, stored, revision).node

    async def drain(self, node_id: NodeId, etag: str, grace_s: float, reason: str) -> pb.Node:
        """Start draining a node; one that drains or has drained keeps its state.

        Raises:
            MeshError: NOT_FOUND; ABORTED, another etag; FAILED_PRECONDITION, it is LOST;
                UNAVAILABLE.
        """

        async def decide(held: Held) -> Write:
            before = existing(self._nodes.record(node_id, held), node_id, etag)
            record = drain(before, time.monotonic() + grace_s, reason)
            return Write(self._nodes.stored(node_id, record, held))

        stored, revision = await self._nodes.change(node_id, decide)
        return self._nodes.written(node_id, stored, revision).node

    async def deregister(self, node_id: NodeId, etag: str) -> None:
        """Remove a node and end its lease.

        Raises:
            MeshError: NOT_FOUND; ABORTED, the node has another etag; UNAVAILABLE.
        """
        ended: set[str] = set()

        async def decide(held: Held) -> Write:
            existing(self._nodes.record(node_id, held), node_id, etag)
            if held.stored is not None and held.stored.lease_id:
                ended.add(held.stored.lease_id)
            return Write(None, [delete(ALIVE, node_id), delete(REPORTS, node_id)])

        _, revision = await transact(self._client, node_id, decide)
        await self._nodes.reach(revision)
        for lease_id in ended:
            await self._nodes.revoke(lease_id)

    async def get(self, node_id: NodeId) -> pb.Node:
        """Give one node; not to be changed.

        Raises:
            MeshError: NOT_FOUND.
        """
        entry = self._index.get(node_id)
        return existing(entry.record if entry else None, node_id, "").node

    async def snapshot(self) -> Snapshot:
        """Give all nodes."""
        now = time.monotonic()
        health = self.health()
        items = self._index.items()
        unconfirmed = frozenset(
            node_id
            for node_id, entry in items
            if not entry.is_lost
            and not entry.is_heard(
                now - REPORT_DELAY_S if entry.alive and health.is_connected else now
            )
        )
        nodes = tuple(entry.record.node for _, entry in items)
        return Snapshot(nodes, self._index.changes.revision, unconfirmed, health)

    async def watch(self, after: int) -> AsyncGenerator[Event, None]:
        """Give each change after revision `after`, and load reports as they come.

        Raises:
            MeshError: OUT_OF_RANGE, the changes are not in the log any more, or the
                reader fell too far behind; UNAVAILABLE, the store was stopped.
        """
        if after > self._index.changes.revision:  # read from a replica that is a little ahead
            await self._index.reach(after, REACH_S)
        async with aclosing(self._index.changes.watch(after)) as events:
            async for event in events:
                yield event
