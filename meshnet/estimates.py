"""Running estimates of links, codecs and ratios, from single measurements (pure)."""

from __future__ import annotations

from typing import Final, Literal

__all__ = ["CodecSpeeds", "LinkSpeed", "Ratio"]

_SHORT_BYTES: Final = 16 * 1024
_LONG_BYTES: Final = 48 * 1024
_SETTLED_S: Final = 0.003
"""A transfer of this length counts half, what was known before the other half."""
_WEIGHT: Final = 0.2
_JUMP: Final = 2.0
_UNSURE: Final = 4
"""Calls of a codec until what was taken for granted counts for nothing."""
_LONGER: Final = 2
"""As many times as long as expected is what a call counts for at most after these."""
_ODD: Final = 0.08


class LinkSpeed:
    """Seconds a byte of one link in one direction.

    Args:
        s_per_byte: taken until a body is measured.

    Attributes:
        s_per_byte: the estimate.
        latency_s: what a body of no length takes.
        num_samples: bodies that told of the speed.
    """

    def __init__(self, s_per_byte: float) -> None:
        self.s_per_byte = s_per_byte
        self.latency_s: float | None = None
        self.num_samples = 0

    def record(self, num_bytes: int, seconds: float) -> None:
        """Learn from a body's transfer; a short one tells the latency, a long one the speed.

        Delays of other causes only ever lengthen a transfer. So one that was much faster is
        believed at once, and one that was slower by its length: a long one outweighs all
        before, as it must where the link has become slower, a short one may be a hiccup.
        """
        if seconds <= 0:
            return
        if num_bytes <= _SHORT_BYTES:
            known = seconds if self.latency_s is None else self.latency_s
            self.latency_s = min(seconds, known + _WEIGHT / 4 * (seconds - known))
            return
        if num_bytes < _LONG_BYTES:
            return
        # A latency that is most of the time leaves nothing to learn but that.
        transfer_s = max(seconds - (self.latency_s or 0.0), seconds / 4)
        sample = transfer_s / num_bytes
        if self.num_samples == 0 or sample * _JUMP < self.s_per_byte:
            self.s_per_byte = sample
        else:
            weight = max(_WEIGHT, transfer_s / (transfer_s + _SETTLED_S))
            self.s_per_byte += weight * (sample - self.s_per_byte)
        self.num_samples += 1


_Work = Literal["encode", "decode"]

_FIRST_COSTS: Final[dict[tuple[str, _Work], tuple[float, float]]] = {
    ("zstd", "encode"): (20e-6, 1.05e-9),
    ("zstd", "decode"): (20e-6, 1.05e-9),
    ("bf16p", "encode"): (50e-6, 0.95e-9),
    ("bf16p", "decode"): (40e-6, 0.7e-9),
}
"""Seconds a call and a byte, measured on one core of a 2.x GHz Xeon; taken at first."""


class CodecSpeeds:
    """What calls of one kind take, by encoding and size: short bodies pay more for each byte.

    Args:
        work: of the calls.
        like: calls on a machine that is taken to be as fast, for encodings not measured.
    """

    def __init__(self, work: _Work = "encode", *, like: CodecSpeeds | None = None) -> None:
        self._work: _Work = work
        self._like = like
        self._s_per_byte: dict[str, dict[int, tuple[float, int]]] = {}

    def record(self, encoding: str, num_bytes: int, seconds: float) -> None:
        """Learn from one call."""
        if num_bytes <= 0 or seconds <= 0:
            return
        expected = self.seconds(encoding, num_bytes) / num_bytes
        sizes = self._s_per_byte.setdefault(encoding, {})
        size = num_bytes.bit_length()
        _, count = sizes.get(size, (expected, 0))
        # The first call finds cold caches, and one that was interrupted says little. An
        # estimate that is too long is the worse mistake: what it keeps from being taken is
        # not measured again for long.
        most = 1 if not count else 4 if count < _UNSURE else _LONGER
        sample = min(seconds / num_bytes, most * expected)
        weight = max(_WEIGHT, 1 / (count + 1))
        sizes[size] = expected + weight * (sample - expected), count + 1

    def seconds(self, encoding: str, num_bytes: int) -> float:
        """Give what a call on `num_bytes` takes, by the size measured that is nearest."""
        sizes = self._s_per_byte.get(encoding)
        if sizes:
            size = num_bytes.bit_length()
            known = sizes.get(size)
            if known is None:
                known = sizes[min(sizes, key=lambda measured: abs(measured - size))]
            return num_bytes * known[0]
        slowness = 1.0 if self._like is None else self._like.slowness(encoding, num_bytes)
        return slowness * self._first(encoding, num_bytes)

    def slowness(self, encoding: str, num_bytes: int) -> float:
        """Give how many times longer a call takes than was taken for granted."""
        return self.seconds(encoding, num_bytes) / self._first(encoding, num_bytes)

    def _first(self, encoding: str, num_bytes: int) -> float:
        call_s, s_per_byte = _FIRST_COSTS.get((encoding, self._work), (50e-6, 2e-9))
        return call_s + num_bytes * s_per_byte


class Ratio:
    """What one encoding gives on the bodies of one kind.

    Args:
        first: taken until a body is measured.

    Attributes:
        actual: running mean of the ratios; on activations it is within 1 % of the next one,
            which no sample is.
    """

    def __init__(self, first: float) -> None:
        self.actual = first
        self._sampled: float | None = None

    def record(self, actual: float, sampled: float) -> None:
        """Learn from a body that was encoded, and what a sample of it had predicted."""
        if self._sampled is None:
            self.actual, self._sampled = actual, sampled
            return
        self.actual += _WEIGHT * (actual - self.actual)
        self._sampled += _WEIGHT * (sampled - self._sampled)

    def relax(self, sampled: float) -> None:
        """Believe a sample that promised more a little, where it was not put to the test."""
        self.actual += _WEIGHT / 20 * max(0.0, sampled - self.actual)

    def given(self, sampled: float) -> float:
        """Give the ratio to expect of a body with such a sample.

        That of the bodies before, unless the sample is unlike theirs.
        """
        if self._sampled is None:
            return sampled
        unlike = sampled / self._sampled
        return self.actual if abs(unlike - 1) < _ODD else self.actual * unlike
