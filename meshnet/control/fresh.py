"""Reads something anew for those who need it as of now, and not more often than is good."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

__all__ = ["Fresh"]


class Fresh:
    """A reading that many may ask for: they share one, which began after they asked.

    Args:
        read: does it; what it raises, those who wait for it get too.
        every_s: seconds between the beginnings of two readings, at least.
    """

    def __init__(self, read: Callable[[], Awaitable[object]], every_s: float) -> None:
        self._read = read
        self._every_s = every_s
        self._began = -every_s
        self._failure: Exception | None = None
        self._lock = asyncio.Lock()

    async def read(self) -> None:
        """Return when a reading is done that began after this call."""
        asked = time.monotonic()
        async with self._lock:
            if self._began < asked:
                await asyncio.sleep(max(0.0, self._began + self._every_s - asked))
                self._began, self._failure = time.monotonic(), None
                try:
                    await self._read()
                except Exception as error:
                    self._failure = error
                    raise
            elif self._failure is not None:
                raise self._failure
