"""The registry of a single replica: nodes, leases, revisions, and the log of changes."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Final, Protocol

from meshnet.control.changes import ChangeLog
from meshnet.control.lifecycle import (
    Judge,
    Record,
    desired_state,
    differs,
    drain,
    existing,
    heartbeat,
    lose,
    models_of,
    register,
)
from meshnet.control.registry import Event, Heartbeat, Snapshot, StoreHealth
from meshnet.control.stored import from_stored, to_stored
from meshnet.errors import MeshError
from meshnet.internal.store.v1 import record_pb2
from meshnet.lease import Lease, LeaseId, LeaseTable
from meshnet.tasks import end_task
from meshnet.topology import NodeId
from meshnet.v1 import node_service_pb2 as pb

__all__ = ["Journal", "MemoryStore"]

EXPIRY_INTERVAL_S: Final = 0.25

_log = logging.getLogger(__name__)


class Journal(Protocol):
    """Keeps nodes where they outlive the process; every method raises MeshError alone."""

    def open(self) -> tuple[Mapping[NodeId, record_pb2.NodeRecord], int]:
        """Give the nodes kept, and the revision of the last change."""
        ...

    def put(self, node_id: NodeId, stored: record_pb2.NodeRecord, revision: int) -> None:
        """Keep a node; once this returns, it outlives the process."""
        ...

    def delete(self, node_id: NodeId, revision: int) -> None:
        """Keep a node no more."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class MemoryStore:
    """The registry of a single replica, in memory.

    Without a journal a restart forgets the nodes, which register again when their
    heartbeats are answered NOT_FOUND. Revisions begin at the wall clock's milliseconds, so
    that a watch from before the restart is told to list again instead of missing changes.

    Args:
        clock: monotonic seconds.
        wall_clock: seconds since the epoch.
        forget_after_s: seconds for which a LOST node is still listed.
        journal: keeps the nodes across restarts; leases then begin with a full time to live.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        *,
        forget_after_s: float = 600.0,
        journal: Journal | None = None,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._forget_after_s = forget_after_s
        self._leases = LeaseTable()
        self._records: dict[NodeId, Record] = {}
        self._journal = journal
        self._changes = ChangeLog(int(wall_clock() * 1000))
        self._expiry: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Read what the journal kept, and begin to notice leases that end.

        Raises:
            MeshError: the journal cannot be read.
        """
        now = self._clock()
        if self._journal is not None:
            kept, revision = self._journal.open()
            self._changes = ChangeLog(max(self._changes.revision, revision + 1))
            for node_id, stored in kept.items():
                self._restore(node_id, stored, now)
        self._expiry = asyncio.create_task(self._expire_by_timer())

    def stop(self) -> None:
        """End all watches."""
        self._changes.stop()

    async def close(self) -> None:
        """Free everything."""
        self.stop()
        await end_task(self._expiry)
        if self._journal is not None:
            self._journal.close()

    def health(self) -> StoreHealth:
        """Tell that the store answers: it is in this process."""
        return StoreHealth()

    async def register(
        self, node_id: NodeId, node: pb.Node, address: str, ttl_s: float
    ) -> tuple[pb.Node, Lease, int]:
        """Store `node` under a lease; gives it as stored, with the lease and the revision.

        Raises:
            MeshError: the id is held by another address or a newer incarnation.
        """
        now = self.expire()
        held = self._leases.get(node_id, now)
        lease = self._leases.grant(
            LeaseId(secrets.token_hex(16)),
            node_id,
            address=address,
            incarnation=node.incarnation,
            ttl_s=ttl_s,
            now=now,
        )
        before = self._records.get(node_id)
        record = register(node_id, node, before, self._wall_clock())
        try:
            self._put(node_id, record)
        except MeshError:  # not registered: as it was before
            self._leases.revoke(node_id)
            if held is not None:
                self._grant_again(held, now)
            raise
        return record.node, lease, self._changes.revision

    async def heartbeat(
        self, node_id: NodeId, request: pb.HeartbeatRequest, judge: Judge | None = None
    ) -> Heartbeat:
        """Renew a lease and take in the node's report.

        Raises:
            LeaseExpiredError: the node has to register again.
            MeshError: ABORTED, another incarnation holds the lease.
        """
        now = self.expire()
        lease = self._leases.keep_alive(
            LeaseId(request.lease_id), node_id, request.incarnation, now
        )
        before = self._records[node_id]
        record = heartbeat(before, request, self._wall_clock(), now, judge)
        if differs(record, before):
            self._put(node_id, record)
        else:
            self._records[node_id] = record
            if request.HasField("load"):
                self._changes.notify(Event(self._changes.revision, record.node, is_load=True))
        left_s = None if record.drain_until_s is None else max(0.0, record.drain_until_s - now)
        return Heartbeat(
            lease,
            desired_state(record.node),
            left_s,
            self._changes.revision,
            record.node.verification,
        )

    async def update(
        self, node_id: NodeId, etag: str, change: Callable[[pb.Node], None]
    ) -> pb.Node:
        """Apply an operator's change.

        Raises:
            MeshError: NOT_FOUND; ABORTED, the node has another etag.
        """
        self.expire()
        record = self._find(node_id, etag).copy()
        change(record.node)
        self._put(node_id, record)
        return record.node

    async def drain(self, node_id: NodeId, etag: str, grace_s: float, reason: str) -> pb.Node:
        """Start draining a node; one that drains or has drained keeps its state.

        Raises:
            MeshError: NOT_FOUND; ABORTED, another etag; FAILED_PRECONDITION, it is LOST.
        """
        now = self.expire()
        record = drain(self._find(node_id, etag), now + grace_s, reason)
        self._put(node_id, record)
        return record.node

    async def deregister(self, node_id: NodeId, etag: str) -> None:
        """Remove a node and end its lease.

        Raises:
            MeshError: NOT_FOUND; ABORTED, the node has another etag.
        """
        self.expire()
        self._find(node_id, etag)
        self._delete(node_id)

    async def get(self, node_id: NodeId) -> pb.Node:
        """Give one node; not to be changed.

        Raises:
            MeshError: NOT_FOUND.
        """
        self.expire()
        return self._find(node_id, "").node

    async def snapshot(self) -> Snapshot:
        """Give all nodes."""
        self.expire()
        nodes = tuple(self._records[node_id].node for node_id in sorted(self._records))
        return Snapshot(nodes, self._changes.revision)

    def watch(self, after: int) -> AsyncGenerator[Event, None]:
        """Give each change after revision `after`, and load reports as they come.

        Raises:
            MeshError: OUT_OF_RANGE, the changes are not in the log any more, or the
                reader fell too far behind; UNAVAILABLE, the store was stopped.
        """
        return self._changes.watch(after)

    def expire(self) -> float:
        """Mark the nodes LOST whose lease has ended, forget the long lost; gives the clock."""
        now = self._clock()
        for lease in self._leases.expire(now):
            record = lose(self._records[lease.node], now)
            self._put(lease.node, record, must_keep=False)
        for node_id, record in list(self._records.items()):
            if record.lost_at_s is not None and now >= record.lost_at_s + self._forget_after_s:
                with _logged():
                    self._delete(node_id)
        return now

    async def _expire_by_timer(self) -> None:
        """Notice ended leases even when nobody asks, so that watches hear of them."""
        while True:
            await asyncio.sleep(EXPIRY_INTERVAL_S)
            self.expire()

    def _restore(self, node_id: NodeId, stored: record_pb2.NodeRecord, now: float) -> None:
        record = from_stored(stored, now)
        self._records[node_id] = record
        if record.lost_at_s is None:
            incarnation = record.node.incarnation
            lease_id = LeaseId(stored.lease_id)
            lease = Lease(lease_id, node_id, stored.address, incarnation, stored.ttl_s, now)
            self._grant_again(lease, now)

    def _grant_again(self, lease: Lease, now: float) -> None:
        self._leases.grant(
            lease.lease_id,
            lease.node,
            address=lease.address,
            incarnation=lease.incarnation,
            ttl_s=lease.ttl_s,
            now=now,
        )

    def _find(self, node_id: NodeId, etag: str) -> Record:
        return existing(self._records.get(node_id), node_id, etag)

    def _put(self, node_id: NodeId, record: Record, *, must_keep: bool = True) -> None:
        """Take in a changed record; with `must_keep`, only if the journal did."""
        revision = self._changes.revision + 1
        record.node.etag = f"{revision:x}"
        if self._journal is not None:
            now = self._clock()
            stored = to_stored(record, self._leases.get(node_id, now), now)
            with nullcontext() if must_keep else _logged():
                self._journal.put(node_id, stored, revision)
        before = self._records.get(node_id)
        self._records[node_id] = record
        self._changes.append(Event(revision, record.node, models_of(before)))

    def _delete(self, node_id: NodeId) -> None:
        revision = self._changes.revision + 1
        if self._journal is not None:
            self._journal.delete(node_id, revision)
        record = self._records.pop(node_id)
        self._leases.revoke(node_id)
        self._changes.append(Event(revision, record.node, models_of(record), is_deleted=True))


@contextmanager
def _logged() -> Iterator[None]:
    """Log a MeshError instead of raising it."""
    try:
        yield
    except MeshError as error:
        _log.error("%s", error)
