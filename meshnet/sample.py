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
_WINDOW_VALUES: Final = 64
_C_LOG_C: Final = np.arange(2 * _WINDOWS * _WINDOW_VALUES + 1) * np.log2(
    np.maximum(1, np.arange(2 * _WINDOWS * _WINDOW_VALUES + 1))
)
"""c log2(c) of every count that a sample can have."""


def predict_ratio(encoding: str, body: Body, width: int | None) -> float:
    """Give the ratio to expect of an encoding, from 1,024 values spread over `body`.

    Takes about 15 microseconds, whatever the size. On real activations it is within 5 % of the
    ratio. A tensor whose mantissas are coarse gets less than it deserves: only exponents count.

    Args:
        encoding: ``bf16p``, which codes exponents alone, or one that codes all bytes.
        body: C-contiguous, not empty.
        width: see `meshnet.codec.compress`.
    """
    values = _spread(np.frombuffer(body, np.uint8 if width is None else np.uint16))
    if encoding == "bf16p":
        return 16.0 / (8.0 + _entropy(values >> 7 & 0xFF))
    return 8.0 / max(_entropy(values.view(np.uint8)), 0.05)


def ends_in_repeats(body: Body, width: int | None) -> bool:
    """Tell whether a bfloat16 tensor's last two rows are equal, as padding's are."""
    if width is None:
        return False
    row = 2 * width
    view = memoryview(body).cast("B")
    return len(view) >= 2 * row and view[-row:] == view[-2 * row : -row]


def _spread(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Take windows at even distances; of a short tensor, its beginning."""
    distance = values.size // _WINDOWS
    if distance <= _WINDOW_VALUES:
        return values[: _WINDOWS * _WINDOW_VALUES]
    return values[: _WINDOWS * distance].reshape(_WINDOWS, -1)[:, :_WINDOW_VALUES].reshape(-1)


def _entropy(values: npt.NDArray[Any]) -> float:
    """Give the bits that one of `values`, each below 256, takes by their frequencies."""
    counts = np.bincount(values)
    return float(np.log2(values.size) - _C_LOG_C[counts].sum() / values.size)
