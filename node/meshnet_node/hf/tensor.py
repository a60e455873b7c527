"""Hands bfloat16 tensors between numpy and torch without copying.

numpy knows bfloat16 through ml_dtypes, which torch does not read: both sides meet at
uint16 of the same bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from meshnet.dtypes import BFLOAT16, numpy_dtype

__all__ = ["from_torch", "to_torch"]


def to_torch(values: npt.NDArray[Any]) -> torch.Tensor:
    """View a C-contiguous bfloat16 array as a tensor; a read-only one is copied.

    torch has no read-only tensors: it would let a layer write into memory that is not its own.
    """
    bits = values.view(np.uint16)
    return torch.from_numpy(bits if bits.flags.writeable else bits.copy()).view(torch.bfloat16)


def from_torch(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """Give a tensor as bfloat16; a view where it is contiguous bfloat16 already."""
    bits = tensor.to(torch.bfloat16).contiguous().view(torch.uint16).numpy()
    return bits.view(numpy_dtype(BFLOAT16))
