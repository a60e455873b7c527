"""How many chunks of a prompt are in flight at once (pure).

With S stages of equal time t, N chunks take (N + S - 1) x t when enough chunks are on
their way that no stage waits: as many as a chunk's whole journey holds stage times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from meshnet.timing import HopTiming

__all__ = ["MAX_WINDOW", "Window"]

MAX_WINDOW: Final = 16
"""Bounds the memory that a prompt takes at every hop: at most this many chunks."""

_SPARE: Final = 2
"""Chunks beyond the journey: one that waits where the slowest stage takes it next, and one
more, since a chunk's answer is heard of late. Fewer leave gaps; more only queue."""

_WEIGHT: Final = 0.3


class Window:
    """The number of chunks in flight, from the stage times that answers report.

    Args:
        num_hops: of the route; begins with a window for stages of equal time.
        fixed: always this many; 1 is sequential. None adapts.
    """

    def __init__(self, num_hops: int, fixed: int | None = None) -> None:
        self._fixed = fixed
        self._stages = float(num_hops)

    @property
    def size(self) -> int:
        """Chunks in flight at most, 1 to `MAX_WINDOW`."""
        wanted = math.ceil(self._stages) + _SPARE if self._fixed is None else self._fixed
        return max(1, min(wanted, MAX_WINDOW))

    def observe(self, timings: Sequence[HopTiming]) -> None:
        """Take in one chunk's journey; waiting in queues is not part of it."""
        slowest = max((hop.compute_ms + hop.codec_ms for hop in timings), default=0.0)
        if slowest <= 0.0:
            return
        journey = 0.0
        for index, hop in enumerate(timings):
            after = timings[index + 1].total_ms if index + 1 < len(timings) else hop.next_ms
            journey += hop.compute_ms + hop.codec_ms + max(0.0, hop.next_ms - after)
        self._stages += _WEIGHT * (min(journey / slowest, MAX_WINDOW) - self._stages)
