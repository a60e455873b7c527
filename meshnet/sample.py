"""What a sample of a tensor says of its encodings, before any of it is encoded (pure).

The entropy of single values bounds what an entropy coder gains, and on activations, which hold
no repeats, it is all there is to gain. Long repeats are seen in one form: a padded end.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from meshnet.dtypes import Body

__all__ = ["ends_in_repeats", "predict_ratio"]

_WINDOWS: Final = 16
_WINDOW_VALUES: Final = 128
_RANDOM_BITS: Final = 7.5
"""Entropy of a byte's sample above which its plane is sent as it is."""


def predict_ratio(encoding: str, body: Body, width: int | None) -> float:
    """Give the ratio to expect of an encoding, from 2,048 values spread over `body`.

    Takes about 30 microseconds, whatever the size. On real activations it is within 5 % of the
    ratio up to a factor that is the encoding's own (for zstd and bf16p near 1).

    Args:
        encoding: ``bf16p``, which codes exponents alone, or one that codes all bytes.
        body: C-contiguous, not empty.
        width: see `meshnet.codec.compress`.
    """
    values = _spread(np.frombuffer(body, np.uint8 if width is None else np.uint16))
    if encoding == "bf16p":
        rest = _entropy(values >> 8 & 0x80 | values & 0x7F)
        bits = _entropy(values >> 7 & 0xFF) + (8.0 if rest > _RANDOM_BITS else rest)
        return 16.0 / max(bits, 0.1)
    return 8.0 / max(_entropy(values.view(np.uint8)), 0.05)


def ends_in_repeats(body: Body, width: int | None) -> bool:
    """Tell whether a bfloat16 tensor's last two rows are equal, as padding's are."""
    if width is None:
        return False
    row = 2 * width
    view = memoryview(body).cast("B")
    return len(view) >= 2 * row and view[-row:] == view[-2 * row : -row]


def _spread(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    spare = values.size - _WINDOW_VALUES
    if spare < _WINDOWS * _WINDOW_VALUES:
        return values
    starts = np.arange(_WINDOWS) * spare // (_WINDOWS - 1)
    return np.concatenate([values[start : start + _WINDOW_VALUES] for start in starts.tolist()])


def _entropy(values: npt.NDArray[Any]) -> float:
    """Give the bits that one of `values`, each below 256, takes by their frequencies."""
    counts = np.bincount(values, minlength=256)
    counts = counts[counts > 0]
    return float(np.log2(values.size) - (counts @ np.log2(counts)) / values.size)
