"""Heartbeats: a node's lease renewed in etcd, its report taken in."""

from __future__ import annotations

import logging
import math
import time

from meshnet.control.etcd.index import Entry
from meshnet.control.etcd.keeper import Keeper
from meshnet.control.etcd.keys import ALIVE, NODES, REPORTS, holds_lease, put, unchanged
from meshnet.control.etcd.nodes import Nodes, grant_as_stored, report_of
from meshnet.control.etcd.transaction import Held, Write, read
from meshnet.control.lifecycle import Judge, Record, desired_state, differs, heartbeat
from meshnet.control.registry import Heartbeat
from meshnet.errors import LeaseExpiredError
from meshnet.internal.etcd.v3 import etcd_pb2 as etcd
from meshnet.lease import Lease, LeaseId, LeaseTable
from meshnet.topology import NodeId
from meshnet.v1 import node_service_pb2 as pb

__all__ = ["Heartbeats"]

_log = logging.getLogger(__name__)


class Heartbeats:
    """Takes in heartbeats.

    Args:
        nodes: the nodes in etcd.
        keeper: publishes reports.
    """

    def __init__(self, nodes: Nodes, keeper: Keeper) -> None:
        self._nodes = nodes
        self._keeper = keeper

    async def take(
        self, node_id: NodeId, request: pb.HeartbeatRequest, judge: Judge | None
    ) -> Heartbeat:
        """Renew a lease and take in the node's report.

        Raises:
            LeaseExpiredError: the node has to register again.
            MeshError: ABORTED, another incarnation holds the lease; UNAVAILABLE.
        """
        entry, lease = await self._holder(node_id, request)
        now = time.monotonic()
        was_heard = entry.is_heard(now)
        if was_heard:
            self._nodes.index.hear(node_id, now)  # even if etcd cannot be told
        number = int(lease.lease_id, 16)
        if await self._nodes.client.keep_alive(number) == 0:
            await self._revive(node_id, request, has_right=was_heard)
        self._nodes.index.hear(node_id, now)
        record = heartbeat(entry.record, request, self._nodes.wall_clock(), now, judge)
        if differs(record, entry.record):
            record = await self._change_state(node_id, request, judge)
        else:
            self._keeper.report(node_id, number, report_of(record))
        left_s = None if record.drain_until_s is None else max(0.0, record.drain_until_s - now)
        state = desired_state(record.node)
        revision = self._nodes.index.changes.revision
        return Heartbeat(lease, state, left_s, revision, record.node.verification)

    async def _holder(self, node_id: NodeId, request: pb.HeartbeatRequest) -> tuple[Entry, Lease]:
        """Give the node whose lease `request` names, and that lease, renewed.

        Raises:
            LeaseExpiredError: the lease has ended.
            MeshError: ABORTED, another incarnation holds it; UNAVAILABLE.
        """
        index = self._nodes.index
        entry = index.get(node_id)
        if entry is None or entry.stored.lease_id != request.lease_id:  # registered elsewhere?
            held = await read(self._nodes.client, node_id)
            await self._nodes.reach(held.revision)
            entry = index.get(node_id)
        if entry is None or entry.is_lost:
            raise _ended(node_id, request)
        table = LeaseTable()
        now = time.monotonic()
        grant_as_stored(table, node_id, entry.stored, now)
        lease_id = LeaseId(request.lease_id)
        return entry, table.keep_alive(lease_id, node_id, request.incarnation, now)

    async def _revive(
        self, node_id: NodeId, request: pb.HeartbeatRequest, *, has_right: bool
    ) -> None:
        """Make a lease anew that etcd ended before its time.

        Args:
            node_id: the holder.
            request: its heartbeat.
            has_right: whether it was heard of within its time to live before.

        Raises:
            LeaseExpiredError: it ended in time, or the node was replaced meanwhile.
            MeshError: UNAVAILABLE.
        """
        held = await read(self._nodes.client, node_id)
        is_holder = (
            held.stored is not None
            and held.stored.lease_id == request.lease_id
            and held.stored.node.state != pb.NODE_STATE_LOST
        )
        if not is_holder or not has_right or held.stored is None:
            raise _ended(node_id, request)
        _log.warning("etcd ended the lease of node %s before its time: made anew", node_id)
        number = int(request.lease_id, 16)
        await self._nodes.client.grant(number, math.ceil(held.stored.ttl_s))
        response = await self._nodes.client.txn(
            etcd.TxnRequest(
                compare=[unchanged(NODES, node_id, held.revision)],
                success=[put(ALIVE, node_id, None, number)],
            )
        )
        if not response.succeeded:
            raise _ended(node_id, request)

    async def _change_state(
        self, node_id: NodeId, request: pb.HeartbeatRequest, judge: Judge | None
    ) -> Record:
        """Write what a heartbeat makes of the node's state."""
        number = int(request.lease_id, 16)

        async def decide(held: Held) -> Write:
            before = self._nodes.record(node_id, held)
            if before is None or held.alive != number:
                raise _ended(node_id, request)
            now = time.monotonic()
            record = heartbeat(before, request, self._nodes.wall_clock(), now, judge)
            return Write(
                self._nodes.stored(node_id, record, held),
                [put(REPORTS, node_id, report_of(record))],
                [holds_lease(node_id, number)],
            )

        stored, revision = await self._nodes.change(node_id, decide)
        return self._nodes.written(node_id, stored, revision)


def _ended(node_id: NodeId, request: pb.HeartbeatRequest) -> LeaseExpiredError:
    return LeaseExpiredError(
        f"lease {request.lease_id[:64]!r} of node {node_id!r} has ended: register the node again"
    )
