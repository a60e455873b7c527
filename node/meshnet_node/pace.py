"""How long a layer takes for one token, from a stage's counters (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["Counters", "LayerPace"]

_WEIGHT: Final = 0.3


@dataclass(frozen=True, slots=True)
class Counters:
    """What a stage has done since it began.

    Attributes:
        num_chunks: chunks computed.
        num_tokens: token positions in them.
        compute_s: seconds that they took.
    """

    num_chunks: int
    num_tokens: int
    compute_s: float


class LayerPace:
    """A running estimate; decode steps tell it best, prompts bound it.

    Args:
        num_layers: of the shard; routes that run a part of it make the estimate low.
    """

    def __init__(self, num_layers: int) -> None:
        self._num_layers = num_layers
        self._before = Counters(0, 0, 0.0)
        self._layer_s = 0.0
        self._is_of_decode = False

    @property
    def microseconds(self) -> int:
        """Time of one layer for one token, rounded up; 0 while nothing was computed."""
        return -int(-self._layer_s * 1e6 // 1)

    def update(self, now: Counters) -> None:
        """Take in the counters, as often as convenient.

        Chunks of one token are decode steps. A window that holds longer chunks says what a
        token of a prompt took, which is less; it counts only until a decode step was seen.
        """
        chunks = now.num_chunks - self._before.num_chunks
        tokens = now.num_tokens - self._before.num_tokens
        seconds = now.compute_s - self._before.compute_s
        self._before = now
        if chunks <= 0 or tokens <= 0 or seconds <= 0:
            return
        is_decode = chunks == tokens
        if self._is_of_decode and not is_decode:
            return
        sample = seconds / tokens / self._num_layers
        if self._layer_s == 0 or is_decode != self._is_of_decode:
            self._layer_s = sample
        else:
            self._layer_s += _WEIGHT * (sample - self._layer_s)
        self._is_of_decode = is_decode
