"""The tokens that a session was fed, and in which chunks (pure)."""

from __future__ import annotations

from collections.abc import Sequence

from meshnet.operations import RebuildMode

__all__ = ["History"]


class History:
    """What one session was fed, step by step: all that its caches can be computed from.

    Args:
        chunk_tokens: token positions per chunk of a step.
        mode: in which chunks it is fed again.
    """

    def __init__(self, chunk_tokens: int, mode: RebuildMode) -> None:
        self._chunk_tokens = chunk_tokens
        self._mode = mode
        self._steps: list[list[int]] = []

    def add(self, token_ids: Sequence[int]) -> None:
        """Note one more step."""
        self._steps.append(list(token_ids))

    def tokens(self) -> list[int]:
        """Give all tokens so far."""
        return [token for step in self._steps for token in step]

    def sizes(self, start: int, end: int) -> list[int] | None:
        """Give the chunks to feed tokens in: those of the first time, or None for the usual ones.

        `start` and `end` are where chunks of the first time began or ended.
        """
        if self._mode is RebuildMode.FAST:
            return None
        found = []
        position = 0
        for step in self._steps:
            for first in range(0, len(step), self._chunk_tokens):
                size = min(self._chunk_tokens, len(step) - first)
                if start <= position < end:
                    found.append(size)
                position += size
        return found
