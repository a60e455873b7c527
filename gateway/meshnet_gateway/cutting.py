"""Tensors cut along their token axis into chunks, and put together again (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from meshnet.chunk import Answer
from meshnet.errors import Code, MeshError

__all__ = ["cut_tokens", "join_answers", "split_tokens"]


def split_tokens(tensor: npt.NDArray[Any], chunk_tokens: int) -> list[npt.NDArray[Any]]:
    """Cut a tensor along its token axis (the second) into views of at most `chunk_tokens`."""
    return [
        tensor[:, start : start + chunk_tokens] for start in range(0, tensor.shape[1], chunk_tokens)
    ]


def cut_tokens(tensor: npt.NDArray[Any], sizes: Sequence[int]) -> list[npt.NDArray[Any]]:
    """Cut a tensor along its token axis into views of these sizes, which add up to it."""
    return np.split(tensor, np.cumsum(sizes)[:-1], axis=1)


def join_answers(answers: Sequence[Answer]) -> npt.NDArray[Any]:
    """Put the hidden states of a prompt's chunks together again, along the token axis.

    Raises:
        MeshError: a chunk was answered without a tensor, or out of order.
    """
    tensors = []
    for index, answer in enumerate(answers):
        if answer.tensor is None or answer.header.chunk_index != index:
            raise MeshError(
                Code.INTERNAL,
                f"chunk {index} of {len(answers)} was answered as chunk"
                f" {answer.header.chunk_index} of shape {answer.header.shape}",
            )
        tensors.append(answer.tensor)
    return np.concatenate(tensors, axis=1)
