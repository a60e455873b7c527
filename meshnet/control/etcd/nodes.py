"""What every write to a node needs: its record as it is now, and the change of it."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from meshnet.control.etcd.client import EtcdClient
from meshnet.control.etcd.index import Index
from meshnet.control.etcd.transaction import Held, Write, transact
from meshnet.control.lifecycle import Record
from meshnet.control.stored import from_stored, to_stored
from meshnet.errors import MeshError
from meshnet.internal.store.v1 import record_pb2
from meshnet.lease import LeaseId, LeaseTable
from meshnet.topology import NodeId

__all__ = ["Nodes", "grant_as_stored", "report_of"]

REACH_S: Final = 1.0

_log = logging.getLogger(__name__)


class Nodes:
    """The nodes in etcd, as one replica reads and writes them.

    Attributes:
        client: the cluster.
        index: what it holds.
        wall_clock: seconds since the epoch.
    """

    def __init__(self, client: EtcdClient, index: Index, wall_clock: Callable[[], float]) -> None:
        self.client = client
        self.index = index
        self.wall_clock = wall_clock

    def record(self, node_id: NodeId, held: Held) -> Record | None:
        """Give the record read, with the times and the report that the index knows of it."""
        entry = self.index.get(node_id)
        if entry is not None and entry.revision == held.revision:
            return entry.record
        if held.stored is None:
            return None
        record = from_stored(held.stored, time.monotonic())
        record.node.etag = f"{held.revision:x}"
        return record

    def stored(self, node_id: NodeId, record: Record, held: Held) -> record_pb2.NodeRecord:
        """Give a changed record with the lease as it was."""
        stored = to_stored(record, None, time.monotonic())
        if held.stored is not None:
            stored.lease_id = held.stored.lease_id
            stored.address = held.stored.address
            stored.ttl_s = held.stored.ttl_s
        return stored

    async def change(
        self, node_id: NodeId, decide: Callable[[Held], Awaitable[Write]]
    ) -> tuple[record_pb2.NodeRecord, int]:
        """Write what `decide` makes of a node, never its removal; reads give it from now on.

        Raises:
            MeshError: what `decide` raised; UNAVAILABLE; ABORTED.
        """
        stored, revision = await transact(self.client, node_id, decide)
        assert stored is not None  # noqa: S101 - it was not removed
        await self.reach(revision)
        return stored, revision

    def written(self, node_id: NodeId, stored: record_pb2.NodeRecord, revision: int) -> Record:
        """Give a record written at `revision`."""
        held = Held(stored, revision, 0, 0)
        record = self.record(node_id, held)
        assert record is not None  # noqa: S101 - `stored` is one
        return record

    async def reach(self, revision: int) -> None:
        """Wait until reads give what was written."""
        if not await self.index.reach(revision, REACH_S):
            _log.warning("the watch is behind revision %d", revision)

    async def revoke(self, lease_id: str) -> None:
        """End a lease that nobody holds; if etcd is away it ends by itself."""
        try:
            await self.client.revoke(int(lease_id, 16))
        except MeshError as error:
            _log.warning("%s", error)


def grant_as_stored(
    table: LeaseTable, node_id: NodeId, stored: record_pb2.NodeRecord, at_s: float
) -> None:
    """Put the lease of a record into `table`, renewed at `at_s`."""
    table.grant(
        LeaseId(stored.lease_id),
        node_id,
        address=stored.address,
        incarnation=stored.node.incarnation,
        ttl_s=stored.ttl_s,
        now=at_s,
    )


def report_of(record: Record) -> record_pb2.Report:
    """Give what is published of a node's last heartbeat."""
    return record_pb2.Report(heartbeat_time=record.node.heartbeat_time, load=record.node.load)
