"""Which failures sessions outlive, by what, and how often they did (pure)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from meshnet.errors import Code, MeshError, NextHopError, PositionError, UnknownSessionError
from meshnet.operations import RebuildMode

__all__ = ["RecoveryCounts", "RecoverySettings", "Way", "can_recover", "with_cause"]

_AGAIN: Final = (
    Code.UNAVAILABLE,
    Code.INTERNAL,
    Code.DATA_LOSS,
    Code.DEADLINE_EXCEEDED,
    Code.NEXT_HOP_FAILED,
)

_REASONS: Final = (
    "SESSION_RELEASED",
    "HOP_UNKNOWN",
    "GRANT_EXPIRED",
    "GRANT_MISMATCH",
    "GRANT_SPENT",
)
"""Of a session that was ended, and of grants that fit no more: another route has a new one."""


class Way(StrEnum):
    """By what a session went on after a failure."""

    RESENT = "resent"
    """Every node still had its cache: the step was sent again."""
    JOURNAL = "journal"
    """The lost caches were computed again from what the nodes before had sent on."""
    REPLAY = "replay"
    """All tokens went through the whole route again."""
    ANEW = "anew"
    """Nothing had been computed yet: the session began on another route."""


@dataclass(frozen=True, slots=True)
class RecoverySettings:
    """What a session does when its route breaks.

    Attributes:
        mode: in which chunks lost caches are computed again.
        spare_wait_s: seconds to wait for nodes that cover the layers.
    """

    mode: RebuildMode = RebuildMode.FAST
    spare_wait_s: float = 30.0


@dataclass(slots=True)
class RecoveryCounts:
    """What happened so far, for metrics.

    Attributes:
        opened: sessions begun.
        abandoned: sessions that ended with an error all the same.
        ways: times that a session went on after a failure, by way.
        recomputed_tokens: token positions computed again, by way: of lost layers for
            `Way.JOURNAL`, of all layers for `Way.REPLAY`.
        pause_s: seconds from noticing to the next token, summed.
    """

    opened: int = 0
    abandoned: int = 0
    ways: Counter[Way] = field(default_factory=Counter)
    recomputed_tokens: Counter[Way] = field(default_factory=Counter)
    pause_s: float = 0.0

    @property
    def recovered(self) -> int:
        """Times that a session went on after a failure."""
        return self.ways.total()


def with_cause(error: MeshError, first: MeshError) -> MeshError:
    """Have an error say too what another route was needed for."""
    error.message = f"{error.message}; another route was needed, since {first.message}"
    error.args = (error.message,)
    return error


def can_recover(error: MeshError) -> bool:
    """Tell whether another route could serve what this one could not."""
    if isinstance(error, PositionError | UnknownSessionError | NextHopError):
        return True
    return error.code in _AGAIN or error.reason in _REASONS
