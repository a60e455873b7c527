"""A node's life as the control plane sees it: what each event makes of its record.

JOINING → READY (and back, when its self-test fails) → DRAINING → DRAINED; LOST when its
lease ends; QUARANTINED while its probes do not match its model. Each function gives a new
record: snapshots of the registry share the old one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from meshnet.errors import Code, MeshError
from meshnet.topology import NodeId
from meshnet.v1 import node_service_pb2 as pb

__all__ = [
    "Judge",
    "Record",
    "desired_state",
    "differs",
    "drain",
    "existing",
    "heartbeat",
    "lose",
    "models_of",
    "register",
]

_LEAVING = (pb.NODE_STATE_DRAINING, pb.NODE_STATE_DRAINED)
_OUTPUT_ONLY = ("state", "load", "create_time", "heartbeat_time", "drain_reason", "verification")
_MISMATCHES = pb.Verification.STATE_FAILED
_WAITS = pb.Verification.STATE_PENDING

Judge = Callable[[pb.Node, pb.HeartbeatRequest], pb.Verification]
"""Says what is known of a node's numbers, of the node as it was and its heartbeat."""


@dataclass(slots=True)
class Record:
    """One node in the registry.

    Attributes:
        node: as clients see it.
        drain_until_s: while draining, the monotonic time at which sessions are cut off.
        lost_at_s: while LOST, the monotonic time at which that was noticed.
    """

    node: pb.Node
    drain_until_s: float | None = None
    lost_at_s: float | None = None

    def copy(self) -> Record:
        """Give a record that can be changed without changing this one."""
        node = pb.Node()
        node.CopyFrom(self.node)
        return Record(node, self.drain_until_s, self.lost_at_s)


def existing(record: Record | None, node_id: NodeId, etag: str) -> Record:
    """Give the record that a call names.

    Raises:
        MeshError: NOT_FOUND, there is none; ABORTED, `etag` is neither empty nor the node's.
    """
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


def models_of(record: Record | None) -> frozenset[str]:
    """Give the models that a node serves; none for no node."""
    return frozenset(shard.model for shard in record.node.shards) if record else frozenset()


def register(node_id: NodeId, node: pb.Node, before: Record | None, wall_s: float) -> Record:
    """Take in a registration.

    The same process again keeps its state; another one begins anew. What an operator
    has set stays: cordoned always, labels and weight unless the node brings its own.
    """
    record = Record(node).copy()
    fresh = record.node
    for name in _OUTPUT_ONLY:
        fresh.ClearField(name)
    fresh.name = f"nodes/{node_id}"
    fresh.state = pb.NODE_STATE_JOINING
    fresh.create_time.FromNanoseconds(int(wall_s * 1e9))
    fresh.heartbeat_time.CopyFrom(fresh.create_time)
    if before is None:
        return record
    old = before.node
    fresh.cordoned = fresh.cordoned or old.cordoned
    fresh.weight = fresh.weight or old.weight
    if not fresh.labels:
        fresh.labels.MergeFrom(old.labels)
    if fresh.incarnation == old.incarnation and old.state != pb.NODE_STATE_LOST:
        fresh.state = old.state
        fresh.load.CopyFrom(old.load)
        fresh.create_time.CopyFrom(old.create_time)
        fresh.drain_reason = old.drain_reason
        fresh.verification.CopyFrom(old.verification)
        record.drain_until_s = before.drain_until_s
    return record


def heartbeat(
    before: Record,
    request: pb.HeartbeatRequest,
    wall_s: float,
    now: float,
    judge: Judge | None = None,
) -> Record:
    """Take in a heartbeat of the lease's holder; without `judge` its numbers are not looked at."""
    record = before.copy()
    node = record.node
    node.heartbeat_time.FromNanoseconds(int(wall_s * 1e9))
    if request.HasField("load"):
        node.load.CopyFrom(request.load)
    if judge is not None:
        _take_verification(node, judge(before.node, request))
    if node.state not in _LEAVING:
        node.state = _served_state(node, is_ready=request.ready)
    elif node.state == pb.NODE_STATE_DRAINING:
        is_idle = request.HasField("load") and request.load.active_sessions == 0
        if is_idle or (record.drain_until_s is not None and now >= record.drain_until_s):
            node.state = pb.NODE_STATE_DRAINED
    return record


def differs(record: Record, before: Record) -> bool:
    """Tell whether a heartbeat changed what operators and routes see."""
    node, old = record.node, before.node
    return node.state != old.state or node.verification != old.verification


def drain(before: Record, until_s: float, reason: str) -> Record:
    """Take in an operator's wish to drain.

    Raises:
        MeshError: FAILED_PRECONDITION (NODE_LOST), there is nothing to drain.
    """
    if before.node.state == pb.NODE_STATE_LOST:
        raise MeshError(
            Code.FAILED_PRECONDITION,
            f"{before.node.name} is lost: it cannot be drained until it registers again",
            field="name",
            reason="NODE_LOST",
        )
    record = before.copy()
    if record.node.state != pb.NODE_STATE_DRAINED:
        record.node.state = pb.NODE_STATE_DRAINING
        record.node.drain_reason = reason
        record.drain_until_s = until_s
    return record


def lose(before: Record, now: float) -> Record:
    """Take in the end of the node's lease."""
    record = before.copy()
    record.node.state = pb.NODE_STATE_LOST
    record.drain_until_s = None
    record.lost_at_s = now
    return record


def desired_state(node: pb.Node) -> pb.NodeState:
    """Give the state that the control plane wants of a node: what it leaves for, or cordoned."""
    if node.state in _LEAVING:
        return node.state
    return pb.NODE_STATE_CORDONED if node.cordoned else pb.NODE_STATE_READY


def _served_state(node: pb.Node, *, is_ready: bool) -> pb.NodeState:
    if node.verification.state == _MISMATCHES:
        return pb.NODE_STATE_QUARANTINED
    is_ready = is_ready and node.verification.state != _WAITS
    return pb.NODE_STATE_READY if is_ready else pb.NODE_STATE_JOINING


def _take_verification(node: pb.Node, found: pb.Verification) -> None:
    old = node.verification
    is_same = (found.state, found.reason, found.message) == (old.state, old.reason, old.message)
    if not is_same:
        node.verification.CopyFrom(found)
        node.verification.since_time.CopyFrom(node.heartbeat_time)
