"""What etcd holds of the registry, fed by a watch: reads are answered from here."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from google.protobuf.message import DecodeError

from meshnet.control.changes import ChangeLog
from meshnet.control.etcd.keys import ALIVE, NODES, REPORTS, split
from meshnet.control.lifecycle import Record, models_of
from meshnet.control.registry import Event
from meshnet.control.stored import from_stored
from meshnet.internal.etcd.v3 import etcd_pb2 as etcd
from meshnet.internal.store.v1 import record_pb2
from meshnet.topology import NodeId
from meshnet.v1 import node_service_pb2 as pb

__all__ = ["Entry", "Index"]

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Entry:
    """One node.

    Attributes:
        record: the node, with its last report; not to be changed.
        stored: the same as etcd keeps it.
        revision: at which it was last written.
        alive: the etcd lease that it is alive under; 0 if none.
        heard_s: when this replica last had a sign of the node's life.
    """

    record: Record
    stored: record_pb2.NodeRecord
    revision: int
    alive: int = 0
    heard_s: float = -math.inf

    @property
    def is_lost(self) -> bool:
        """Whether the node is LOST."""
        return self.record.node.state == pb.NODE_STATE_LOST

    def is_heard(self, now: float) -> bool:
        """Whether the node gave a sign of life within its lease's time to live."""
        return now < self.heard_s + self.stored.ttl_s


class Index:
    """The registry at one revision of etcd.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._entries: dict[NodeId, Entry] = {}
        self._nodes: dict[NodeId, tuple[record_pb2.NodeRecord, int]] = {}  # with mod_revision
        self._alive: dict[NodeId, int] = {}
        self._reports: dict[NodeId, record_pb2.Report] = {}
        self._values: dict[str, dict[NodeId, Any]] = {
            NODES: self._nodes,
            ALIVE: self._alive,
            REPORTS: self._reports,
        }
        self._moved = asyncio.Event()
        self.changes = ChangeLog(0)
        self.applied = 0

    def get(self, node_id: NodeId) -> Entry | None:
        """Give one node."""
        return self._entries.get(node_id)

    def items(self) -> list[tuple[NodeId, Entry]]:
        """Give all nodes in order of id."""
        return sorted(self._entries.items())

    def reset(self, values: Iterable[etcd.KeyValue], revision: int) -> None:
        """Take all that etcd holds at `revision`; watches are told to list again."""
        self._entries.clear()
        for held in self._values.values():
            held.clear()
        for value in sorted(values, key=lambda value: split(value.key)[0] != NODES):
            self._take(etcd.Event(kv=value), is_news=value.lease != 0)
        self.changes.restart(revision)
        self._move(revision)

    def apply(self, events: Iterable[etcd.Event], news_after: int) -> None:
        """Take in what a watch gave.

        Args:
            events: in order of revision.
            news_after: events up to this revision are history, told late: they say what
                etcd holds, but not that a node is alive now.
        """
        for revision, group in groupby(events, lambda event: event.kv.mod_revision):
            self._apply_together(list(group), revision, is_news=revision > news_after)
            self._move(revision)

    def hear(self, node_id: NodeId, at_s: float) -> None:
        """Take in a sign of a node's life."""
        entry = self._entries.get(node_id)
        if entry is not None:
            entry.heard_s = max(entry.heard_s, at_s)

    async def reach(self, revision: int, timeout_s: float) -> bool:
        """Wait until the index is at `revision` or later; whether it is in time."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.applied < revision:
                    await self._moved.wait()
        except TimeoutError:
            return False
        return True

    def _move(self, revision: int) -> None:
        self.applied = revision
        self._moved.set()
        self._moved = asyncio.Event()

    def _apply_together(self, events: list[etcd.Event], revision: int, *, is_news: bool) -> None:
        before = {
            node_id: self._entries.get(node_id)
            for node_id in (split(event.kv.key)[1] for event in events)
        }
        kinds = {self._take(event, is_news=is_news) for event in events}
        for node_id, old in before.items():
            new = self._entries.get(node_id)
            models = models_of(old.record if old is not None else None)
            if new is None:
                if old is not None:
                    gone = Event(revision, old.record.node, models, is_deleted=True)
                    self.changes.append(gone)
            elif old is None or old.revision != new.revision:
                self.changes.append(Event(revision, new.record.node, models))
            elif REPORTS in kinds:
                self.changes.notify(Event(self.changes.revision, new.record.node, is_load=True))

    def _take(self, event: etcd.Event, *, is_news: bool) -> str:
        """Take in one value; gives its kind."""
        kind, node_id = split(event.kv.key)
        is_put = event.type == etcd.Event.PUT
        values: dict[NodeId, Any] | None = self._values.get(kind)
        if values is None:
            return kind
        values.pop(node_id, None)
        if is_put:
            try:
                values[node_id] = _read(kind, event.kv)
            except DecodeError:
                _log.error("etcd holds no %s record under %r", kind, event.kv.key)
        self._build(node_id, is_heard=is_put and is_news and kind != NODES)
        return kind

    def _build(self, node_id: NodeId, *, is_heard: bool) -> None:
        """Make the node's entry from the values held."""
        now = self._clock()
        old = self._entries.pop(node_id, None)
        if node_id not in self._nodes:
            return
        stored, revision = self._nodes[node_id]
        record = from_stored(stored, now)
        record.node.etag = f"{revision:x}"
        report = self._reports.get(node_id)
        if report is not None:
            record.node.heartbeat_time.CopyFrom(report.heartbeat_time)
            record.node.load.CopyFrom(report.load)
        entry = Entry(record, stored, revision, self._alive.get(node_id, 0))
        if old is not None:
            entry.heard_s = old.heard_s
            if old.revision == revision:
                record.drain_until_s = old.record.drain_until_s
            if record.lost_at_s is not None and old.record.lost_at_s is not None:
                record.lost_at_s = old.record.lost_at_s
        if is_heard:
            entry.heard_s = now
        self._entries[node_id] = entry


def _read(kind: str, value: etcd.KeyValue) -> Any:
    if kind == NODES:
        return record_pb2.NodeRecord.FromString(value.value), value.mod_revision
    return value.lease if kind == ALIVE else record_pb2.Report.FromString(value.value)
