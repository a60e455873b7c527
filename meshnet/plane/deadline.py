"""One deadline that moves with every message, behind a timer that rarely does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

__all__ = ["Deadline"]


class Deadline:
    """Calls `on_late` once when the time set passes.

    The event loop's timer is left where it is while the deadline moves away, and set again
    when it fires too early: moving the deadline then costs no more than reading the clock.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_late: Callable[[], None]) -> None:
        self._loop = loop
        self._on_late = on_late
        self._when: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def check(self) -> None:
        """Raise TimeoutError where a deadline is set and has passed."""
        if self._when is not None and self._when <= self._loop.time():
            raise TimeoutError

    def set(self, seconds: float | None) -> None:
        """Set the deadline `seconds` from now; None sets none."""
        if seconds is None:
            self._when = None
            return
        self._when = self._loop.time() + seconds
        if self._timer is not None and self._timer.when() > self._when:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(self._when, self._fire)

    def cancel(self) -> None:
        """Set none, and drop the timer."""
        self._when = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _fire(self) -> None:
        self._timer = None
        if self._when is None:
            return
        if self._when > self._loop.time():
            self._timer = self._loop.call_at(self._when, self._fire)
        else:
            self._on_late()
