"""Keys and values of one layer, in buffers that grow by blocks.

A decode step copies one token rather than the whole history, and forgetting tokens only
lowers a length. A sliding-window layer keeps its whole history for that reason, and shows
the model the window alone.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers.cache_utils import DynamicLayer

from meshnet.kv import LayerKv

__all__ = ["GrowingLayer", "SlidingLayer"]

_BLOCK_TOKENS: Final = 256


class GrowingLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # partly untyped base
    """Keys and values of one attention layer, ``[1, heads, capacity, width]`` each."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # partly untyped base
        self.length = 0
        self._key_buffer: torch.Tensor | None = None
        self._value_buffer: torch.Tensor | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append ``[1, heads, seq, width]``; gives views of all that the model may look at."""
        start, end = self.length, self.length + key_states.shape[-2]
        self._key_buffer = _room(self._key_buffer, key_states, start, end)
        self._value_buffer = _room(self._value_buffer, value_states, start, end)
        self._key_buffer[..., start:end, :] = key_states
        self._value_buffer[..., start:end, :] = value_states
        self.is_initialized = True
        self._set_length(end)
        first = self._first_visible(start)
        return self._key_buffer[..., first:end, :], self._value_buffer[..., first:end, :]

    def get_seq_length(self) -> int:
        """Tokens held."""
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Give how many positions the next `update` shows, and the first one's position."""
        first = self._first_visible(self.length)
        return self.length + query_length - first, first

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` tokens (transformers counts them below zero)."""
        self._set_length(self.length - abs(tokens_to_remove))

    @property
    def kept(self) -> LayerKv | None:
        """What is kept of a token; None before the first one.

        Raises:
            ValueError: keys and values have not the same heads, or not the same type.
        """
        keys, values = self._key_buffer, self._value_buffer
        if keys is None or values is None:
            return None
        if keys.shape[:2] != values.shape[:2] or keys.dtype != values.dtype:
            raise ValueError("keys and values differ in heads or type")
        return LayerKv(keys.shape[1], keys.shape[3], values.shape[3])

    def make_room(self, kept: LayerKv, dtype: torch.dtype, tokens: int) -> None:
        """Hold `tokens` tokens, whatever their bytes are."""
        keys = torch.empty((1, kept.heads, 0, kept.key_width), dtype=dtype)
        values = torch.empty((1, kept.heads, 0, kept.value_width), dtype=dtype)
        self._key_buffer = _room(None, keys, 0, tokens)
        self._value_buffer = _room(None, values, 0, tokens)
        self.is_initialized = True
        self._set_length(tokens)

    def views(self, tokens: int) -> list[memoryview]:
        """View the bytes of the first `tokens` tokens: each head's keys, then each one's values."""
        buffers = (self._key_buffer, self._value_buffer)
        return [
            head[:tokens].view(torch.uint8).numpy().data.cast("B")
            for buffer in buffers
            if buffer is not None
            for head in buffer[0]
        ]

    def _set_length(self, length: int) -> None:
        self.length = length
        if self._key_buffer is not None and self._value_buffer is not None:
            # Some models read these rather than what `update` gives.
            self.keys = self._key_buffer[..., :length, :]
            self.values = self._value_buffer[..., :length, :]

    def _first_visible(self, _start: int) -> int:
        return 0


class SlidingLayer(GrowingLayer):  # type: ignore[no-untyped-call]  # partly untyped base
    """Keys and values of a layer that looks back over `sliding_window` positions only."""

    is_sliding = True

    def __init__(self, sliding_window: int) -> None:
        super().__init__()
        self.sliding_window = sliding_window

    def _first_visible(self, start: int) -> int:
        return max(0, start - self.sliding_window + 1)


def _room(
    buffer: torch.Tensor | None, states: torch.Tensor, used: int, needed: int
) -> torch.Tensor:
    if buffer is not None and needed <= buffer.shape[-2]:
        return buffer
    # A quarter more than needed keeps the copies of a growing session linear in its length.
    blocks = -(-max(needed, used + used // 4) // _BLOCK_TOKENS)
    *lead, _, width = states.shape
    grown = states.new_empty((*lead, blocks * _BLOCK_TOKENS, width))
    if buffer is not None:
        grown[..., :used, :] = buffer[..., :used, :]
    return grown
