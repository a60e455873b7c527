"""Where a completion's time went: hop timings summed over its steps (pure)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from meshnet.timing import HopTiming

__all__ = ["CompletionTimings", "PhaseTimings"]


@dataclass(slots=True)
class _HopSums:
    num_steps: int = 0
    queue_ms: float = 0.0
    compute_ms: float = 0.0
    codec_ms: float = 0.0
    wire_ms: float = 0.0
    total_ms: float = 0.0
    in_bytes: int = 0
    out_bytes: int = 0


@dataclass(slots=True)
class PhaseTimings:
    """Sums over the steps of one phase.

    Attributes:
        num_steps: steps taken.
        num_tokens: tokens fed.
        wall_ms: time the steps took, as the gateway saw it.
        hops: by node, in the order of the route used last.
    """

    num_steps: int = 0
    num_tokens: int = 0
    wall_ms: float = 0.0
    hops: dict[str, _HopSums] = field(default_factory=dict)

    def add(self, num_tokens: int, wall_ms: float, timings: tuple[HopTiming, ...]) -> None:
        """Count one step."""
        self.num_steps += 1
        self.num_tokens += num_tokens
        self.wall_ms += wall_ms
        for index, timing in enumerate(timings):
            after = timings[index + 1].total_ms if index + 1 < len(timings) else timing.next_ms
            sums = self.hops.pop(timing.node, None) or _HopSums()
            self.hops[timing.node] = sums  # re-inserted: the latest route decides the order
            sums.num_steps += 1
            sums.queue_ms += timing.queue_ms
            sums.compute_ms += timing.compute_ms
            sums.codec_ms += timing.codec_ms
            sums.wire_ms += max(0.0, timing.next_ms - after)
            sums.total_ms += timing.total_ms
            sums.in_bytes += timing.in_bytes
            sums.out_bytes += timing.out_bytes

    def merge(self, other: PhaseTimings) -> None:
        """Add another completion's sums."""
        self.num_steps += other.num_steps
        self.num_tokens += other.num_tokens
        self.wall_ms += other.wall_ms
        for node, theirs in other.hops.items():
            ours = self.hops.setdefault(node, _HopSums())
            for name in _HopSums.__slots__:
                setattr(ours, name, getattr(ours, name) + getattr(theirs, name))

    def describe(self) -> dict[str, Any]:
        """Give totals, and each hop's means over the steps it took part in.

        ``wire_ms`` is what of the wait for the hop after does not go to that hop's own time.
        """
        return {
            "steps": self.num_steps,
            "tokens": self.num_tokens,
            "wall_ms": round(self.wall_ms, 3),
            "hops": [
                {
                    "node": node,
                    "steps": sums.num_steps,
                    **{
                        name: round(getattr(sums, name) / sums.num_steps, 3)
                        for name in _HopSums.__slots__
                        if name != "num_steps"
                    },
                }
                for node, sums in self.hops.items()
            ],
        }


@dataclass(slots=True)
class CompletionTimings:
    """Both phases of one completion, or of a request's completions together."""

    prefill: PhaseTimings = field(default_factory=PhaseTimings)
    decode: PhaseTimings = field(default_factory=PhaseTimings)

    def merge(self, other: CompletionTimings) -> None:
        """Add another completion's sums."""
        self.prefill.merge(other.prefill)
        self.decode.merge(other.decode)

    def describe(self) -> dict[str, Any]:
        """Give the ``meshnet`` object of an answer.

        ``hops`` are the means of a decode step, or of the prefill where that was all;
        ``tokens_per_second`` counts decode steps, so not the first token; null without any.
        """
        wall_s = self.decode.wall_ms / 1000
        rate = round(self.decode.num_steps / wall_s, 3) if wall_s > 0 else None
        prefill, decode = self.prefill.describe(), self.decode.describe()
        return {
            "tokens_per_second": rate,
            "hops": decode["hops"] or prefill["hops"],
            "prefill": prefill,
            "decode": decode,
        }
