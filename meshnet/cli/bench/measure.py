"""Times of things measured side by side: interleaved rounds, percentiles, paired ratios."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Block", "Ratio", "Series", "interleave", "median_of", "time_cpu"]

Block = Callable[[], Awaitable[list[float]]]
"""Measures one thing a few times; gives a number for each."""


@dataclass(frozen=True)
class Ratio:
    """How one series compares with another.

    Attributes:
        median: of the ratios of the medians of each round.
        low: lowest of these ratios.
        high: highest of them.
    """

    median: float
    low: float
    high: float


@dataclass
class Series:
    """What was measured of one thing, round by round; every round has as many values."""

    rounds: list[list[float]] = field(default_factory=list)

    @property
    def values(self) -> list[float]:
        """All values, in the order they were measured."""
        return [value for values in self.rounds for value in values]

    @property
    def medians(self) -> list[float]:
        """The median of each round."""
        return [statistics.median(values) for values in self.rounds]

    @property
    def median(self) -> float:
        """The median of all values."""
        return statistics.median(self.values)

    def percentile(self, percent: float) -> float:
        """Give the smallest value that at least `percent` of all values do not exceed."""
        ordered = sorted(self.values)
        return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]

    def added_to(self, other: Series) -> float:
        """Give what this takes more than `other`: the median over the rounds of that."""
        pairs = zip(self.medians, other.medians, strict=True)
        return statistics.median([a - b for a, b in pairs])

    def ratio_to(self, other: Series) -> Ratio:
        """Compare round by round, so that what slows a whole round down cancels out."""
        ratios = [a / b for a, b in zip(self.medians, other.medians, strict=True)]
        return Ratio(statistics.median(ratios), min(ratios), max(ratios))


async def interleave(
    blocks: Mapping[str, Block], num_rounds: int, advance: Callable[[], None] | None = None
) -> dict[str, Series]:
    """Run every block once a round; each round begins with another one.

    Args:
        blocks: by name.
        num_rounds: how often each block runs.
        advance: called after each block, to show progress.
    """
    names = list(blocks)
    series = {name: Series() for name in names}
    for number in range(num_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            series[name].rounds.append(await blocks[name]())
            if advance is not None:
                advance()
    return series


def median_of(values: Sequence[float]) -> float:
    """Give the median, or 0 of none."""
    return statistics.median(values) if values else 0.0


async def time_cpu(action: Callable[[], object], count: int) -> list[float]:
    """Take the processor time of each of `count` runs: for what uses one thread and waits not."""
    seconds = []
    for _ in range(count):
        started = time.thread_time()
        action()
        seconds.append(time.thread_time() - started)
    return seconds
