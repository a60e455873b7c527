"""Tells a step that hangs from one that is slow, by what steps took before."""

from __future__ import annotations

import threading
from typing import Final

from meshnet.grammar import Phase
from meshnet.patience import Patience, PatienceLimits

__all__ = ["RunningStep"]

_MULTIPLE: Final = 16.0
_LEAST_S: Final = 10.0
"""A machine that swaps, or that was stopped for a moment, makes a step take seconds."""


class RunningStep:
    """The step that a shard computes. May be asked by any thread.

    Args:
        most_s: after which any step hangs.
    """

    def __init__(self, most_s: float) -> None:
        self._lock = threading.Lock()
        self._running: tuple[float, Phase, int] | None = None
        self._usual = Patience(
            PatienceLimits(
                multiple=_MULTIPLE, least_s=min(_LEAST_S, most_s), first_s=most_s, most_s=most_s
            )
        )

    def begin(self, phase: Phase, num_tokens: int, now: float) -> None:
        """Note that a step begins; `end` it in any case."""
        self._running = now, phase, num_tokens

    def end(self, now: float, *, went_well: bool) -> None:
        """Note that it ended, and learn what it took where it went well."""
        running, self._running = self._running, None
        if running is not None and went_well:
            began, phase, num_tokens = running
            with self._lock:
                self._usual.record(phase, num_tokens, now - began)

    def hangs(self, now: float) -> bool:
        """Tell whether a step takes far longer than any of its size did."""
        running = self._running
        if running is None:
            return False
        began, phase, num_tokens = running
        with self._lock:
            return now - began > self._usual.allowed_s(phase, num_tokens)
