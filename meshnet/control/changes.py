"""The log of a registry's changes, and the watches that read it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from typing import Final

from meshnet.control.registry import Event
from meshnet.errors import Code, MeshError

__all__ = ["ChangeLog"]

LOG_LENGTH: Final = 4096
WATCH_BACKLOG: Final = 4096


class ChangeLog:
    """The last changes, in order of revision.

    Args:
        revision: of the registry before the first change.
    """

    def __init__(self, revision: int) -> None:
        self.revision = revision
        self._floor = revision  # changes after this one are all kept
        self._events: deque[Event] = deque()
        self._watchers: set[asyncio.Queue[Event | None]] = set()
        self._is_stopped = False

    def append(self, event: Event) -> None:
        """Take in a change; its revision is the registry's from now on."""
        self.revision = event.revision
        self._events.append(event)
        if len(self._events) > LOG_LENGTH:
            self._floor = self._events.popleft().revision
        self.notify(event)

    def notify(self, event: Event) -> None:
        """Give watches an event that is not kept."""
        for queue in list(self._watchers):
            if queue.qsize() >= WATCH_BACKLOG - 1:
                self._end(queue)
            else:
                queue.put_nowait(event)

    async def watch(self, after: int) -> AsyncGenerator[Event, None]:
        """Give each change after revision `after`, and events that are not kept as they come.

        Raises:
            MeshError: OUT_OF_RANGE, the changes are not in the log any more, or the
                reader fell too far behind; UNAVAILABLE, the log was stopped.
        """
        if not self._floor <= after <= self.revision:
            raise _compacted(after)
        queue: asyncio.Queue[Event | None] = asyncio.Queue(WATCH_BACKLOG)
        missed = [event for event in self._events if event.revision > after]
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
        if self._is_stopped:
            raise MeshError(Code.UNAVAILABLE, "the control plane is stopping", reason="STOPPING")
        raise _compacted(after)

    def restart(self, revision: int) -> None:
        """Begin anew at `revision`: changes before were missed, so watches have to list again."""
        self.revision = self._floor = revision
        self._events.clear()
        for queue in list(self._watchers):
            self._end(queue)

    def stop(self) -> None:
        """End all watches."""
        self._is_stopped = True
        for queue in list(self._watchers):
            self._end(queue)

    def _end(self, queue: asyncio.Queue[Event | None]) -> None:
        self._watchers.discard(queue)
        queue.put_nowait(None)


def _compacted(after: int) -> MeshError:
    return MeshError(
        Code.OUT_OF_RANGE,
        f"changes after revision {after} are not kept: list again and watch from there",
        field="start_revision",
        reason="REVISION_COMPACTED",
    )
