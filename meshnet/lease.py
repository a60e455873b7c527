"""Leases: the right of one incarnation of a node to be routed to (pure; `now` is an argument).

Times are seconds of one monotonic clock. A lease never ends before its time to live has
passed since the last grant or keep-alive, and once ended it never comes back: the
node has to register again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NewType

from meshnet.errors import Code, LeaseExpiredError, MeshError
from meshnet.topology import NodeId

__all__ = ["Lease", "LeaseId", "LeaseTable"]

LeaseId = NewType("LeaseId", str)
"""Opaque; differs for each grant to a new incarnation or after an end."""


@dataclass(frozen=True, slots=True)
class Lease:
    """One live lease.

    Attributes:
        lease_id: what heartbeats carry.
        node: the holder.
        address: ``host:port`` that the holder serves; tells one machine from its clone.
        incarnation: grows with each start of the holder's process.
        ttl_s: seconds that each keep-alive buys.
        deadline_s: the lease has ended once the clock reads this or more.
    """

    lease_id: LeaseId
    node: NodeId
    address: str
    incarnation: int
    ttl_s: float
    deadline_s: float


class LeaseTable:
    """The live leases, at most one a node."""

    def __init__(self) -> None:
        self._by_node: dict[NodeId, Lease] = {}
        self._by_id: dict[LeaseId, Lease] = {}

    def __len__(self) -> int:
        """Give the number of leases not yet collected by `expire`."""
        return len(self._by_node)

    def get(self, node: NodeId, now: float) -> Lease | None:
        """Give the live lease of `node`."""
        lease = self._by_node.get(node)
        return lease if lease is not None and now < lease.deadline_s else None

    def grant(
        self,
        lease_id: LeaseId,
        node: NodeId,
        *,
        address: str,
        incarnation: int,
        ttl_s: float,
        now: float,
    ) -> Lease:
        """Give `node` a lease, or renew the one that this incarnation holds already.

        Args:
            lease_id: id for a new lease, never used before.
            node: who asks.
            address: its ``host:port``.
            incarnation: its process's.
            ttl_s: seconds to live, positive.
            now: the clock.

        Raises:
            MeshError: ALREADY_EXISTS (NODE_ID_IN_USE), a live lease is held from another
                address; ABORTED (STALE_INCARNATION), one is held by a higher incarnation.
        """
        held = self.get(node, now)
        if held is not None and held.address != address:
            raise MeshError(
                Code.ALREADY_EXISTS,
                f"node id {node!r} is in use by a live node at {held.address}, not {address}: "
                "give this node another id, or wait until that lease ends",
                field="node_id",
                reason="NODE_ID_IN_USE",
                retry_after_s=held.deadline_s - now,
            )
        if held is not None and incarnation < held.incarnation:
            raise _stale(node, incarnation, held.incarnation)
        if held is not None and incarnation == held.incarnation:
            lease_id = held.lease_id
        self.revoke(node)
        lease = Lease(lease_id, node, address, incarnation, ttl_s, now + ttl_s)
        self._store(lease)
        return lease

    def keep_alive(self, lease_id: LeaseId, node: NodeId, incarnation: int, now: float) -> Lease:
        """Renew a live lease for its time to live.

        Raises:
            LeaseExpiredError: it has ended, or never was this node's.
            MeshError: ABORTED (STALE_INCARNATION), another incarnation holds it.
        """
        lease = self._by_id.get(lease_id)
        if lease is None or lease.node != node or now >= lease.deadline_s:
            raise LeaseExpiredError(
                f"lease {lease_id!r} of node {node!r} has ended: register the node again"
            )
        if lease.incarnation != incarnation:
            raise _stale(node, incarnation, lease.incarnation)
        renewed = replace(lease, deadline_s=max(lease.deadline_s, now + lease.ttl_s))
        self._store(renewed)
        return renewed

    def revoke(self, node: NodeId) -> Lease | None:
        """End the node's lease now; gives it, or None if there was none."""
        lease = self._by_node.pop(node, None)
        if lease is not None:
            del self._by_id[lease.lease_id]
        return lease

    def expire(self, now: float) -> list[Lease]:
        """Take out the leases that have ended, in order of their end."""
        ended = [lease for lease in self._by_node.values() if now >= lease.deadline_s]
        for lease in ended:
            self.revoke(lease.node)
        return sorted(ended, key=lambda lease: (lease.deadline_s, lease.node))

    def _store(self, lease: Lease) -> None:
        self._by_node[lease.node] = lease
        self._by_id[lease.lease_id] = lease


def _stale(node: NodeId, incarnation: int, held: int) -> MeshError:
    return MeshError(
        Code.ABORTED,
        f"incarnation {incarnation} of node {node!r} is not the one registered, {held}: "
        "another process of this node has taken over",
        field="incarnation",
        reason="STALE_INCARNATION",
    )
