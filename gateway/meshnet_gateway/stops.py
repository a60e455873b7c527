"""Stop strings in a stream of text pieces: never shown, not even in part (pure)."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["StopFilter"]


class StopFilter:
    """Passes text on up to the first stop string, holding back what may begin one.

    The stop that ends first wins; of those that end together, the longest. So what is
    passed on depends on the text alone and not on how it was cut into pieces.

    Args:
        stops: non-empty strings.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self._stopped = False

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met; what comes after it is dropped."""
        return self._stopped

    def push(self, piece: str) -> str:
        """Take the text's next piece and give what can be shown now."""
        if self._stopped:
            return ""
        text = self._held + piece
        matches = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if matches:
            self._stopped = True
            self._held = ""
            return text[: min(matches)[1]]
        shown = len(text) - self._num_held(text)
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Give what was held back: the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """Count the characters of `text`'s longest suffix that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            suffix = text[-size:]
            if any(stop.startswith(suffix) for stop in self._stops):
                return size
        return 0
