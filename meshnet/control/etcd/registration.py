"""Registration of a node in etcd, under a lease of etcd."""

from __future__ import annotations

import math
import secrets
import time

from meshnet.control.etcd.keys import ALIVE, REPORTS, delete, put, unchanged
from meshnet.control.etcd.nodes import Nodes, grant_as_stored
from meshnet.control.etcd.transaction import Held, Write
from meshnet.control.lifecycle import register
from meshnet.control.stored import to_stored
from meshnet.lease import Lease, LeaseId, LeaseTable
from meshnet.topology import NodeId
from meshnet.v1 import node_service_pb2 as pb

__all__ = ["Registration", "lease_name"]


class Registration:
    """One call of one node to register.

    Leases that an attempt has made and lost, and the one that the new lease replaces,
    are ended; if etcd is away by then, they end by themselves.

    Args:
        nodes: the nodes in etcd.
        node_id: who registers.
        node: what it says of itself.
        address: ``host:port`` that it serves.
        ttl_s: seconds to live that it asks for, at least.
    """

    def __init__(
        self, nodes: Nodes, node_id: NodeId, node: pb.Node, address: str, ttl_s: float
    ) -> None:
        self._nodes = nodes
        self._node_id = node_id
        self._node = node
        self._address = address
        self._ttl_s = ttl_s
        self._granted: set[str] = set()
        self._replaced: set[str] = set()

    async def run(self) -> tuple[pb.Node, Lease, int]:
        """Register; gives the node as stored, its lease and the revision.

        Raises:
            MeshError: the id is held by another address or a newer incarnation; UNAVAILABLE.
        """
        unused = self._granted
        kept = ""
        try:
            stored, revision = await self._nodes.change(self._node_id, self._decide)
            kept = stored.lease_id
            unused |= self._replaced
        finally:
            for name in unused - {kept}:
                await self._nodes.revoke(name)
        now = time.monotonic()
        self._nodes.index.hear(self._node_id, now)
        record = self._nodes.written(self._node_id, stored, revision)
        return record.node, self._lease(kept, stored.ttl_s, now), revision

    async def _decide(self, held: Held) -> Write:
        name, granted_s = await self._lease_for(held)
        before = self._nodes.record(self._node_id, held)
        record = register(self._node_id, self._node, before, self._nodes.wall_clock())
        operations = [put(ALIVE, self._node_id, None, int(name, 16))]
        if record.node.state == pb.NODE_STATE_JOINING:  # another process: its reports are to come
            operations.append(delete(REPORTS, self._node_id))
        now = time.monotonic()
        return Write(
            to_stored(record, self._lease(name, granted_s, now), now),
            operations,
            [unchanged(ALIVE, self._node_id, held.alive_revision)],
        )

    async def _lease_for(self, held: Held) -> tuple[str, float]:
        """Give the lease to hold from now on, and its seconds to live.

        Raises:
            MeshError: as LeaseTable.grant; UNAVAILABLE.
        """
        fresh = lease_name(secrets.randbits(63) | 1)
        lease = self._leases(held).grant(
            LeaseId(fresh),
            self._node_id,
            address=self._address,
            incarnation=self._node.incarnation,
            ttl_s=self._ttl_s,
            now=time.monotonic(),
        )
        if held.stored is not None and held.stored.lease_id:
            self._replaced.add(held.stored.lease_id)
            if lease.lease_id == held.stored.lease_id and held.stored.ttl_s >= self._ttl_s:
                left_s = await self._nodes.client.keep_alive(int(lease.lease_id, 16))
                if left_s > 0:
                    return lease.lease_id, held.stored.ttl_s
        granted_s = await self._nodes.client.grant(int(fresh, 16), math.ceil(self._ttl_s))
        self._granted.add(fresh)
        return fresh, float(granted_s)

    def _leases(self, held: Held) -> LeaseTable:
        """Give the lease that the node holds now, as far as etcd or this replica knows."""
        table = LeaseTable()
        stored = held.stored
        if stored is None or stored.node.state == pb.NODE_STATE_LOST:
            return table
        now = time.monotonic()
        entry = self._nodes.index.get(self._node_id)
        if entry is not None and entry.stored.lease_id == stored.lease_id and entry.is_heard(now):
            grant_as_stored(table, self._node_id, stored, entry.heard_s)
        elif held.alive:
            grant_as_stored(table, self._node_id, stored, now)
        return table

    def _lease(self, name: str, ttl_s: float, now: float) -> Lease:
        return Lease(
            LeaseId(name), self._node_id, self._address, self._node.incarnation, ttl_s, now + ttl_s
        )


def lease_name(number: int) -> str:
    """Write the number of a lease of etcd as nodes get it."""
    return f"{number:016x}"
