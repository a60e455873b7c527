"""Keys of members that were removed from the mesh, as far as a process has heard (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = ["Removals"]

_MAX_KEYS: Final = 16_384


class Removals:
    """Whose certificates are good no more; one thread learns, any may look.

    What was learnt stays until its last certificate has ended, whatever is said later: one
    replica may have heard of a removal before another.

    Attributes:
        generation: how many times something was learnt that may change who is believed.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._keys: Mapping[str, int] = {}

    def learn(self, keys: Mapping[str, int], now: float) -> bool:
        """Take in keys; tells whether any is new.

        Args:
            keys: SHA-256 of each in hexadecimal, with the Unix seconds after which it need
                not be known.
            now: Unix seconds, by the clock of whom says so.
        """
        is_new = not keys.keys() <= self._keys.keys()
        known = {**self._keys, **keys}
        living = [(until_s, key) for key, until_s in known.items() if until_s >= now]
        self._keys = {key: until_s for until_s, key in sorted(living)[-_MAX_KEYS:]}
        if is_new:  # only now: who sees the new number must find the new keys
            self.generation += 1
        return is_new

    def __contains__(self, key_sha256: str) -> bool:
        """Tell whether a key was removed."""
        return key_sha256 in self._keys
