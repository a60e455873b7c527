"""The registry of a single replica: nodes, leases, revisions, and the log of changes."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import Final

from meshnet.control.lifecycle import Record, desired_state, drain, heartbeat, lose, register
from meshnet.control.registry import Event, Heartbeat, Snapshot
from meshnet.errors import Code, MeshError
from meshnet.lease import Lease, LeaseId, LeaseTable
from meshnet.topology import NodeId
from meshnet.v1 import node_service_pb2 as pb

__all__ = ["MemoryStore"]

LOG_LENGTH: Final = 4096
WATCH_BACKLOG: Final = 4096


class MemoryStore:
    """The registry of a single replica, in memory.

    A restart forgets the nodes, which register again when their heartbeats are answered
    NOT_FOUND. Revisions begin at the wall clock's milliseconds, so that a watch from
    before the restart is told to list again instead of missing changes.

    Args:
        clock: monotonic seconds.
        wall_clock: seconds since the epoch.
        forget_after_s: seconds for which a LOST node is still listed.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
        *,
        forget_after_s: float = 600.0,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self._forget_after_s = forget_after_s
        self._leases = LeaseTable()
        self._records: dict[NodeId, Record] = {}
        self._revision = int(wall_clock() * 1000)
        self._log: deque[Event] = deque(maxlen=LOG_LENGTH)
        self._watchers: set[asyncio.Queue[Event | None]] = set()
        self._is_closed = False

    async def register(
        self, node_id: NodeId, node: pb.Node, address: str, ttl_s: float
    ) -> tuple[pb.Node, Lease, int]:
        """Store `node` under a lease; gives it as stored, with the lease and the revision.

        Raises:
            MeshError: the id is held by another address or a newer incarnation.
        """
        now = self.expire()
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
        self._put(node_id, record)
        return record.node, lease, self._revision

    async def heartbeat(self, node_id: NodeId, request: pb.HeartbeatRequest) -> Heartbeat:
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
        record = heartbeat(before, request, self._wall_clock(), now)
        if record.node.state != before.node.state:
            self._put(node_id, record)
        else:
            self._records[node_id] = record
            if request.HasField("load"):
                self._notify(Event(self._revision, record.node, is_load=True))
        left_s = None if record.drain_until_s is None else max(0.0, record.drain_until_s - now)
        return Heartbeat(lease, desired_state(record.node.state), left_s, self._revision)

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
        self._leases.revoke(node_id)
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
        return Snapshot(nodes, self._revision)

    async def watch(self, after: int) -> AsyncGenerator[Event, None]:
        """Give each change after revision `after`, and load reports as they come.

        Raises:
            MeshError: OUT_OF_RANGE, the changes are not in the log any more, or the
                reader fell too far behind; UNAVAILABLE, the store was closed.
        """
        queue: asyncio.Queue[Event | None] = asyncio.Queue(WATCH_BACKLOG)
        start = self._log[0].revision - 1 if self._log else self._revision
        if not start <= after <= self._revision:
            raise _compacted(after)
        missed = [event for event in self._log if event.revision > after]
        self._watchers.add(queue)
        try:
            for event in missed:
                yield event
            while queue in self._watchers or not queue.empty():
                following = await queue.get()
                if following is None:
                    break
                yield following
        finally:
            self._watchers.discard(queue)
        if self._is_closed:
            raise MeshError(Code.UNAVAILABLE, "the control plane is stopping", reason="STOPPING")
        raise _compacted(after)

    def expire(self) -> float:
        """Mark the nodes LOST whose lease has ended, forget the long lost; gives the clock."""
        now = self._clock()
        for lease in self._leases.expire(now):
            self._put(lease.node, lose(self._records[lease.node], now))
        for node_id, record in list(self._records.items()):
            if record.lost_at_s is not None and now >= record.lost_at_s + self._forget_after_s:
                self._delete(node_id)
        return now

    def close(self) -> None:
        """End all watches."""
        self._is_closed = True
        for queue in list(self._watchers):
            self._end(queue)

    def _find(self, node_id: NodeId, etag: str) -> Record:
        record = self._records.get(node_id)
        if record is None:
            raise MeshError(
                Code.NOT_FOUND,
                f"node {node_id!r} is not registered",
                field="name",
                reason="NODE_UNKNOWN",
            )
        if etag not in ("", record.node.etag):
            raise MeshError(
                Code.ABORTED,
                f"node {node_id!r} has changed: its etag is {record.node.etag!r}, not {etag!r}",
                field="etag",
                reason="ETAG_MISMATCH",
            )
        return record

    def _put(self, node_id: NodeId, record: Record) -> None:
        before = self._records.get(node_id)
        self._revision += 1
        record.node.etag = f"{self._revision:x}"
        self._records[node_id] = record
        self._append(Event(self._revision, record.node, _models(before)))

    def _delete(self, node_id: NodeId) -> None:
        record = self._records.pop(node_id)
        self._revision += 1
        self._append(Event(self._revision, record.node, _models(record), is_deleted=True))

    def _append(self, event: Event) -> None:
        self._log.append(event)
        self._notify(event)

    def _notify(self, event: Event) -> None:
        for queue in list(self._watchers):
            if queue.qsize() >= WATCH_BACKLOG - 1:
                self._end(queue)
            else:
                queue.put_nowait(event)

    def _end(self, queue: asyncio.Queue[Event | None]) -> None:
        self._watchers.discard(queue)
        queue.put_nowait(None)


def _models(record: Record | None) -> frozenset[str]:
    return frozenset(shard.model for shard in record.node.shards) if record else frozenset()


def _compacted(after: int) -> MeshError:
    return MeshError(
        Code.OUT_OF_RANGE,
        f"changes after revision {after} are not kept: list again and watch from there",
        field="start_revision",
        reason="REVISION_COMPACTED",
    )
