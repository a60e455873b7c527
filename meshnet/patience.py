"""When an answer is late, by what answers took before (pure).

Late says nothing of why: a node that is busy is late as one that has died. It is when to ask.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from meshnet.errors import NextHopError
from meshnet.grammar import Phase
from meshnet.topology import NodeId

__all__ = ["Flight", "Flights", "Patience", "PatienceLimits"]

_NUM_KEPT: Final = 64
_NUM_ENOUGH: Final = 3
_QUANTILE: Final = 0.95
_MAX_HOPS: Final = 256
"""Hops that times are kept of: callers name any number of them in routes."""


@dataclass(frozen=True, slots=True)
class PatienceLimits:
    """How long answers are waited for before one is late.

    Attributes:
        multiple: of what all but one in twenty took.
        least_s: at least; a pause of the machine is shorter.
        first_s: while too few were measured.
        most_s: at most, also between one question and the next.
    """

    multiple: float = 4.0
    least_s: float = 1.0
    first_s: float = 5.0
    most_s: float = 10.0


class Patience:
    """What chunks took at one hop, with all that comes after it, by phase and size.

    Args:
        limits: see there.
    """

    def __init__(self, limits: PatienceLimits) -> None:
        self._limits = limits
        self._taken: dict[tuple[Phase, int], deque[float]] = {}

    def record(self, phase: Phase, num_tokens: int, seconds: float) -> None:
        """Learn from an answer; the last 64 of each size count."""
        size = num_tokens.bit_length()
        taken = self._taken.get((phase, size))
        if taken is None:
            taken = self._taken[phase, size] = deque(maxlen=_NUM_KEPT)
        taken.append(seconds)

    def allowed_s(self, phase: Phase, num_tokens: int) -> float:
        """Give the seconds after which an answer is late.

        A size that was not measured is judged by the nearest larger one; a smaller one
        says too little.
        """
        limits = self._limits
        size = num_tokens.bit_length()
        measured = [
            (other, taken)
            for (of, other), taken in self._taken.items()
            if of is phase and other >= size and len(taken) >= _NUM_ENOUGH
        ]
        if not measured:
            return min(limits.first_s, limits.most_s)
        taken = sorted(min(measured, key=lambda item: item[0])[1])
        usual = taken[math.ceil(_QUANTILE * len(taken)) - 1]
        return min(limits.most_s, max(limits.least_s, limits.multiple * usual))


@dataclass(slots=True, eq=False)
class Flight:
    """A request whose answer is waited for.

    Attributes:
        address: ``host:port`` of the node that owes it.
        node: its id.
        phase: of the chunk.
        num_tokens: in it.
        give_up: ends the wait with an error.
        sent: when it was sent.
        late: when to look next.
        asked: how often it was found late.
    """

    address: str
    node: NodeId
    phase: Phase
    num_tokens: int
    give_up: Callable[[NextHopError], object]
    sent: float
    late: float
    asked: int = 0


class Flights:
    """Requests under way, and which of them are late. Not for several threads at a time.

    Args:
        limits: see there.
    """

    def __init__(self, limits: PatienceLimits) -> None:
        self._limits = limits
        self._hops: dict[str, Patience] = {}
        self._flights: dict[Flight, None] = {}

    def __len__(self) -> int:
        """Give the number of requests under way."""
        return len(self._flights)

    def begin(
        self,
        address: str,
        node: NodeId,
        phase: Phase,
        num_tokens: int,
        give_up: Callable[[NextHopError], object],
        now: float,
    ) -> Flight:
        """Note that a request is sent; `end` it in any case."""
        late = now + self._limits.least_s
        flight = Flight(address, node, phase, num_tokens, give_up, now, late)
        self._flights[flight] = None
        return flight

    def end(self, flight: Flight, now: float, *, answered: bool) -> None:
        """Note that a request was answered, or that its answer is given up."""
        del self._flights[flight]
        if answered:
            patience = self._patience(flight.address)
            patience.record(flight.phase, flight.num_tokens, now - flight.sent)

    def late(self, now: float) -> list[Flight]:
        """Give the requests that are late, each again after twice the time, up to the most more."""
        late = []
        for flight in self._flights:
            if flight.late > now:
                continue
            if not flight.asked:
                # Judged only now: nearly every request is answered before.
                patience = self._patience(flight.address)
                allowed_s = patience.allowed_s(flight.phase, flight.num_tokens)
                flight.late = flight.sent + allowed_s
                if flight.late > now:
                    continue
            flight.asked += 1
            flight.late = now + min(now - flight.sent, self._limits.most_s)
            late.append(flight)
        return late

    def owed_by(self, address: str, sent_before: float) -> list[Flight]:
        """Give the requests that one address owes since before a moment."""
        return [
            flight
            for flight in self._flights
            if flight.address == address and flight.sent <= sent_before
        ]

    def _patience(self, address: str) -> Patience:
        patience = self._hops.get(address)
        if patience is None:
            if len(self._hops) >= _MAX_HOPS:
                del self._hops[next(iter(self._hops))]
            patience = self._hops[address] = Patience(self._limits)
        return patience
