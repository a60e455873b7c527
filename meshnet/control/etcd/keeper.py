"""What a replica does in etcd by itself: publish reports, mark nodes LOST, forget them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable
from typing import Final

from meshnet.control.etcd.client import EtcdClient, LeaseGoneError
from meshnet.control.etcd.feed import Feed
from meshnet.control.etcd.index import Entry, Index
from meshnet.control.etcd.keys import (
    ALIVE,
    NODES,
    REPORTS,
    delete,
    holds_lease,
    put,
    unchanged,
)
from meshnet.control.lifecycle import lose
from meshnet.control.stored import to_stored
from meshnet.errors import MeshError
from meshnet.internal.etcd.v3 import etcd_pb2 as etcd
from meshnet.internal.store.v1 import record_pb2
from meshnet.tasks import end_task
from meshnet.topology import NodeId

__all__ = ["Keeper"]

TICK_S: Final = 0.25
REPORT_INTERVAL_S: Final = 2.0
CONCURRENT_WRITES: Final = 16

_log = logging.getLogger(__name__)


class Keeper:
    """Acts on an index at every tick, whether or not anybody calls.

    Replicas do the same without speaking to each other: what they write is under the
    condition that nothing has changed, so that the first one wins and the others see it.

    Args:
        client: the cluster.
        index: what it holds.
        feed: asked whether the index is current.
        forget_after_s: seconds for which a LOST node is still listed.
    """

    def __init__(self, client: EtcdClient, index: Index, feed: Feed, forget_after_s: float) -> None:
        self._client = client
        self._index = index
        self._feed = feed
        self._forget_after_s = forget_after_s
        self._pending: dict[NodeId, tuple[int, record_pb2.Report]] = {}
        self._published_s: dict[NodeId, float] = {}
        self._task: asyncio.Task[None] | None = None

    def open(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop."""
        await end_task(self._task)

    def report(self, node_id: NodeId, lease: int, report: record_pb2.Report) -> None:
        """Take in a report to publish soon, in place of one that was not published yet.

        It is published at most every `REPORT_INTERVAL_S`, or four times in the lease's time
        to live if that is less, so that every heartbeat in time is one.
        """
        self._pending[node_id] = lease, report

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            if not self._feed.health().is_connected:
                continue
            now = time.monotonic()
            entries = self._index.items()
            writes = [
                *self._due_reports(now),
                *(
                    self._lose(node_id, entry, now)
                    for node_id, entry in entries
                    if _has_ended(entry, now)
                ),
                *(
                    self._forget(node_id, entry)
                    for node_id, entry in entries
                    if self._is_forgotten(entry, now)
                ),
            ]
            gate = asyncio.Semaphore(CONCURRENT_WRITES)
            await asyncio.gather(*(self._quietly(write, gate) for write in writes))

    async def _quietly(self, write: Awaitable[object], gate: asyncio.Semaphore) -> None:
        async with gate:
            try:
                await write
            except LeaseGoneError:
                return
            except MeshError as error:
                _log.warning("%s", error)

    def _due_reports(self, now: float) -> list[Awaitable[object]]:
        due: list[Awaitable[object]] = []
        for node_id, (lease, report) in list(self._pending.items()):
            entry = self._index.get(node_id)
            if entry is None:
                del self._pending[node_id]
                self._published_s.pop(node_id, None)
                continue
            interval_s = min(REPORT_INTERVAL_S, entry.stored.ttl_s / 4)
            if now >= self._published_s.get(node_id, 0.0) + interval_s:
                del self._pending[node_id]
                self._published_s[node_id] = now
                due.append(self._publish(node_id, lease, report))
        return due

    async def _publish(self, node_id: NodeId, lease: int, report: record_pb2.Report) -> None:
        request = etcd.TxnRequest(
            compare=[holds_lease(node_id, lease)], success=[put(REPORTS, node_id, report)]
        )
        try:
            await self._client.txn(request)
        except MeshError:
            self._pending.setdefault(node_id, (lease, report))  # unless there is a newer one
            self._published_s.pop(node_id, None)
            raise

    async def _lose(self, node_id: NodeId, entry: Entry, now: float) -> None:
        await self._client.txn(
            etcd.TxnRequest(
                compare=[unchanged(NODES, node_id, entry.revision), unchanged(ALIVE, node_id, 0)],
                success=[put(NODES, node_id, to_stored(lose(entry.record, now), None, now))],
            )
        )

    async def _forget(self, node_id: NodeId, entry: Entry) -> None:
        await self._client.txn(
            etcd.TxnRequest(
                compare=[unchanged(NODES, node_id, entry.revision)],
                success=[delete(NODES, node_id), delete(REPORTS, node_id)],
            )
        )

    def _is_forgotten(self, entry: Entry, now: float) -> bool:
        lost_at_s = entry.record.lost_at_s
        return lost_at_s is not None and now >= lost_at_s + self._forget_after_s


def _has_ended(entry: Entry, now: float) -> bool:
    """Whether a lease has ended: in etcd, and by this replica's own clock.

    A member that led and was stopped may end leases early when it goes on
    (github.com/etcd-io/etcd/issues/15247): etcd's word alone is not taken.
    """
    return not entry.alive and not entry.is_lost and not entry.is_heard(now)
