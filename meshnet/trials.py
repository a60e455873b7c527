"""Which of several choices is taken, when one that seems worse is tried, when none is (pure).

What is not taken is not measured: an estimate that has become wrong would never be corrected.
So each choice is tried now and then, within a budget: a small share of the time spent may be lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

__all__ = ["COAST_SLOWER", "Coast", "Trials"]

COAST_SLOWER: Final = 1.25
"""Coding that takes this much longer than all of the raw body ends the weighing for a while, and
a link that has become slower by as much begins it again."""
_COASTED: Final = 15
"""Bodies of one size for which it ends. Weighing takes 8 microseconds, and 70 where a long body
has just passed the caches."""

_MARGIN: Final = 0.01
"""Another choice than the last must be better by this share: estimates are no better."""
_PROBE_SHARE: Final = 0.005
"""Of all time spent, what may be lost to trying what is not best."""
_FIRST_PROBE: Final = 8
_PROBE_EVERY: Final = 64
"""Bodies after which a choice not taken is worth trying again: at first few, then twice as many
each time up to this."""


@dataclass(slots=True)
class Trials:
    """What was taken so far of the choices for one kind of bodies.

    Attributes:
        last: choice taken as the best; None is raw.
        since: bodies since each choice was taken.
        probes: how often each was tried though it was not best.
        budget_s: what may be lost to that now.
    """

    last: str | None = None
    since: dict[str | None, int] = field(default_factory=dict)
    probes: dict[str | None, int] = field(default_factory=dict)
    budget_s: float = 0.0

    def pick(self, costs: dict[str | None, float]) -> tuple[str | None, bool]:
        """Give the choice of least cost, or one long not taken whose cost is within the budget.

        The second tells whether it is the latter.
        """
        best = min(costs, key=costs.__getitem__)
        last = self.last
        if last in costs and costs[best] > costs[last] * (1 - _MARGIN):
            best = last
        for name, cost in costs.items():
            loss = cost - costs[best]
            patience = min(_PROBE_EVERY, _FIRST_PROBE << self.probes.get(name, 0))
            if name != best and self.since.get(name, 0) >= patience and loss <= self.budget_s:
                return name, True
        return best, False

    def spend(self, costs: dict[str | None, float], taken: str | None, *, is_probe: bool) -> None:
        """Count a choice, and what a probe is expected to lose."""
        best_s = min(costs.values())
        self.budget_s += _PROBE_SHARE * best_s
        for name in costs:
            self.since[name] = 0 if name == taken else self.since.get(name, 0) + 1
        if is_probe:
            self.budget_s -= max(0.0, costs[taken] - best_s)
            self.probes[taken] = min(8, self.probes.get(taken, 0) + 1)
        else:
            self.last = taken


@dataclass(slots=True)
class Coast:
    """Bodies that go raw without another look, since no ratio could make coding pay.

    Attributes:
        size: of theirs.
        most_s_per_byte: of the link, beyond which they are looked at again.
        left: how many they are.
    """

    size: int
    most_s_per_byte: float
    left: int = _COASTED

    def takes(self, size: int, s_per_byte: float) -> bool:
        """Tell whether a body over such a link is one of them, and count it."""
        if size != self.size or self.left == 0 or s_per_byte > self.most_s_per_byte:
            return False
        self.left -= 1
        return True
