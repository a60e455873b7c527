"""Where the replicas of a control plane are reached, which they tell each other by documents.

So a join token names all of them, and whoever joins knows them all.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from meshnet.control.documents import Document, Documents
from meshnet.errors import MeshError
from meshnet.tasks import end_task

__all__ = ["Reached", "Replicas"]

KIND: Final = "replicas"
_TELL_EVERY_S: Final = 15.0
_LIFE_S: Final = 60.0
_MAX: Final = 8

_log = logging.getLogger(__name__)


class Reached(NamedTuple):
    """``host:port`` of both faces of a replica, as others reach them."""

    http: str
    grpc: str


class Replicas:
    """Tells where this replica is, from `start` to `close`, and knows where the others are.

    Args:
        documents: that all replicas share; they are open.
        wall_clock: seconds since 1970.
    """

    def __init__(self, documents: Documents, wall_clock: Callable[[], float] = time.time) -> None:
        self._documents = documents
        self._wall_clock = wall_clock
        self._own: Reached | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self, own: Reached) -> None:
        """Tell where this one is.

        Raises:
            MeshError: UNAVAILABLE.
        """
        self._own = own
        await self._tell(own)
        self._task = asyncio.create_task(self._run(own))

    async def close(self) -> None:
        """Be there no more."""
        own, self._own = self._own, None
        if own is None:
            return
        await end_task(self._task)
        try:
            await self._documents.delete(KIND, own.http)
        except MeshError as error:
            _log.info("this replica is named for %g s more: %s", _LIFE_S, error)

    async def reached(self) -> list[Reached]:
        """Give where replicas are reached that were there within a minute, this one first.

        Raises:
            MeshError: UNAVAILABLE.
        """
        now_s = self._wall_clock()
        found = [] if self._own is None else [self._own]
        for document in await self._documents.list(KIND):
            other, until_s = _read(document)
            if other not in found and until_s > now_s:
                found.append(other)
        return found[:_MAX]

    async def _run(self, own: Reached) -> None:
        while True:
            await asyncio.sleep(_TELL_EVERY_S)
            try:
                await self._tell(own)
                for document in await self._documents.list(KIND):
                    if _read(document)[1] <= self._wall_clock():
                        await self._documents.delete(KIND, document.key)
            except MeshError as error:
                _log.info("other replicas are not told of this one: %s", error)

    async def _tell(self, own: Reached) -> None:
        told = {"grpc": own.grpc, "until_s": self._wall_clock() + _LIFE_S}
        await self._documents.put(KIND, own.http, json.dumps(told).encode())


def _read(document: Document) -> tuple[Reached, float]:
    """Read where a replica is, and until when that is so; what cannot be read is over."""
    try:
        told: Any = json.loads(document.value)
        return Reached(document.key, str(told["grpc"])), float(told["until_s"])
    except (ValueError, TypeError, KeyError):
        return Reached(document.key, ""), 0.0
