"""A rate limit as a token bucket, and how OpenAI's header fields tell it (pure)."""

from __future__ import annotations

import math

__all__ = ["TokenBucket", "duration_text"]


class TokenBucket:
    """Lets `per_minute` requests through at once, and as many in each minute after.

    Args:
        per_minute: at least 1.
        now_s: seconds that only grow; the bucket is full then.
    """

    def __init__(self, per_minute: int, now_s: float) -> None:
        self.per_minute = per_minute
        self._per_second = per_minute / 60
        self._tokens = float(per_minute)
        self._at_s = now_s

    def take(self, now_s: float) -> float:
        """Take a token; gives 0, or without one the seconds until there is one."""
        self._fill(now_s)
        if self._tokens >= 1:
            self._tokens -= 1
            return 0.0
        return (1 - self._tokens) / self._per_second

    def headers(self, now_s: float) -> dict[str, str]:
        """Give the header fields that tell a client how much is left.

        Source: OpenAI API, Rate limits in headers.
        """
        self._fill(now_s)
        return {
            "x-ratelimit-limit-requests": str(self.per_minute),
            "x-ratelimit-remaining-requests": str(math.floor(self._tokens)),
            "x-ratelimit-reset-requests": duration_text(
                (self.per_minute - self._tokens) / self._per_second
            ),
        }

    def _fill(self, now_s: float) -> None:
        passed_s = max(0.0, now_s - self._at_s)
        self._at_s = max(self._at_s, now_s)
        self._tokens = min(self.per_minute, self._tokens + passed_s * self._per_second)


def duration_text(seconds: float) -> str:
    """Write a duration as OpenAI's header fields do: ``0s``, ``120ms``, ``8.64s``, ``6m0s``."""
    milliseconds = math.ceil(seconds * 1000 - 1e-6)
    if milliseconds < 1000:
        return f"{milliseconds}ms" if milliseconds > 0 else "0s"
    minutes, rest = divmod(milliseconds, 60_000)
    text = f"{rest / 1000:g}s"
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}h{minutes}m{text}"
    return f"{minutes}m{text}" if minutes else text
