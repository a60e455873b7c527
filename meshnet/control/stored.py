"""A node's record in the form that stores keep, without what is only true inside a process."""

from __future__ import annotations

from meshnet.control.lifecycle import Record
from meshnet.internal.store.v1 import record_pb2
from meshnet.lease import Lease
from meshnet.v1 import node_service_pb2 as pb

__all__ = ["from_stored", "to_stored"]


def to_stored(record: Record, lease: Lease | None, now: float) -> record_pb2.NodeRecord:
    """Write a record and the terms of its lease.

    Times of a monotonic clock mean nothing elsewhere: the time left to drain is written,
    and begins to count when it is read, so that it never ends early.

    Args:
        record: the record; its load is left out.
        lease: the node's last lease, if there was one.
        now: the clock that the record's times are of.
    """
    stored = record_pb2.NodeRecord(node=record.node, drain_left_s=-1.0)
    stored.node.ClearField("load")
    if lease is not None:
        stored.lease_id = lease.lease_id
        stored.address = lease.address
        stored.ttl_s = lease.ttl_s
    if record.drain_until_s is not None:
        stored.drain_left_s = max(0.0, record.drain_until_s - now)
    return stored


def from_stored(stored: record_pb2.NodeRecord, now: float) -> Record:
    """Read a record; a LOST node counts as lost since `now`."""
    node = pb.Node()
    node.CopyFrom(stored.node)
    is_lost = node.state == pb.NODE_STATE_LOST
    return Record(
        node,
        drain_until_s=now + stored.drain_left_s if stored.drain_left_s >= 0 else None,
        lost_at_s=now if is_lost else None,
    )
