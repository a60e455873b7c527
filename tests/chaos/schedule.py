"""What happens in one run: which requests, which faults, and when; all of it from a seed (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from random import Random

__all__ = ["CI_SEEDS", "NUM_STAGES", "Fault", "Kind", "Schedule", "make_schedule"]

NUM_STAGES = 3
CI_SEEDS = (0, 1, 2, 4, 5, 6, 7, 8, 9, 12)
"""What every test run tries; together they hold every kind of fault."""


class Kind(StrEnum):
    """Kinds of faults, in the order in which the seeds begin with them."""

    KILL = "kill"
    STOP = "stop"
    TRUNCATE = "truncate"
    CONTROL_RESTART = "control-restart"
    CLOSE = "close"
    DROP = "drop"
    SLOW = "slow"
    FULL = "full"
    SPLIT = "split"
    CONTROL_AWAY = "control-away"
    DELAY = "delay"
    KILL_ALL = "kill-all"
    TERM = "term"
    DRAIN = "drain"


ON_CONTROL = frozenset({Kind.CONTROL_RESTART, Kind.CONTROL_AWAY})
_DURATIONS_S = {
    Kind.KILL: (0.0, 0.5, 2.0),  # until another node of the stage is started
    Kind.KILL_ALL: (0.0, 1.0),
    Kind.STOP: (0.3, 1.5, 6.0),  # shorter and longer than a lease
    Kind.TRUNCATE: (0.0,),
    Kind.CONTROL_RESTART: (0.0, 1.0, 5.0),
    Kind.CLOSE: (0.0, 0.2, 2.0),
    Kind.DROP: (0.5, 2.0),
    Kind.SLOW: (1.0, 3.0),
    Kind.FULL: (0.5, 3.0),
    Kind.SPLIT: (1.0, 3.0),
    Kind.CONTROL_AWAY: (1.0, 5.0),
    Kind.DELAY: (1.0, 3.0),
    Kind.TERM: (0.0, 1.0),
    Kind.DRAIN: (0.0,),
}


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        session: whose progress it waits for.
        after: pieces of text that this session has received.
        stage: of the node that it hits, from 0; None for the control plane.
        busy: hits the node of that stage that holds most sessions, else the one with fewest.
        for_s: seconds until it is over; of a kill, until another node is started.
        amount: milliseconds of a delay, bytes before a cut, bytes of a piece.
    """

    kind: Kind
    session: int
    after: int
    stage: int | None
    busy: bool
    for_s: float
    amount: int

    def __str__(self) -> str:
        where = (
            "" if self.stage is None else f" {'busy' if self.busy else 'idle'} stage {self.stage}"
        )
        size = f" amount {self.amount}" if self.amount else ""
        lasting = f" for {self.for_s:g} s" if self.for_s else ""
        return f"{self.kind}{where}{size}{lasting} at {self.after} of session {self.session}"


@dataclass(frozen=True)
class Schedule:
    """One run.

    Attributes:
        requests: which of the prepared requests run, in order of their start.
        starts_s: when each begins.
        faults: in no order.
    """

    seed: int
    requests: tuple[int, ...]
    starts_s: tuple[float, ...]
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        return f"seed {self.seed}, {len(self.requests)} sessions: " + "; ".join(
            str(fault) for fault in self.faults
        )


def make_schedule(seed: int, *, num_requests: int, num_tokens: int) -> Schedule:
    """Draw a schedule: the same for the same arguments, on any machine.

    Args:
        seed: also chooses the first fault's kind, so that neighbours differ in it.
        num_requests: prepared.
        num_tokens: that each of them generates.
    """
    random = Random(seed)
    count = random.randint(2, 4)
    requests = tuple(random.randrange(num_requests) for _ in range(count))
    starts = (0.0, *(round(random.uniform(0.0, 0.6), 2) for _ in range(count - 1)))
    kinds = [list(Kind)[seed % len(Kind)]]
    kinds += random.choices(list(Kind), k=random.choice((0, 1, 1, 2)))
    faults = tuple(_draw(random, kind, count, num_tokens) for kind in kinds)
    return Schedule(seed, requests, starts, faults)


def _draw(random: Random, kind: Kind, num_sessions: int, num_tokens: int) -> Fault:
    amount = 0
    match kind:
        case Kind.DELAY:
            amount = random.choice((5, 30, 120))
        case Kind.TRUNCATE:
            amount = random.randint(1, 6000)
        case Kind.SPLIT:
            amount = random.choice((1, 7, 100))
    return Fault(
        kind,
        session=random.randrange(num_sessions),
        after=random.randint(0, num_tokens * 3 // 4),
        stage=None if kind in ON_CONTROL else random.randrange(NUM_STAGES),
        busy=random.random() < 0.8,
        for_s=random.choice(_DURATIONS_S[kind]),
        amount=amount,
    )
