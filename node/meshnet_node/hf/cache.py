"""One session's KV cache over a shard's layers, behind transformers' cache interface.

Attention layers keep keys and values in buffers that grow by blocks, so that a decode
step copies one token rather than the whole history, and forgetting tokens only lowers a
length. A sliding-window layer keeps its whole history for that reason, and shows the
model the window alone. States that cannot be cut back (recurrences, convolutions) stay
transformers' own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DummyLayer,
    DynamicCache,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)
from transformers.configuration_utils import PretrainedConfig

from meshnet.errors import Code, MeshError
from meshnet.topology import LayerRange

__all__ = ["GrowingLayer", "LayersView", "SessionCache", "SlidingLayer"]

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


class LayersView(DynamicCache):
    """Some layers of a session's cache as the model sees them during one forward."""

    def __init__(self, layers: list[Any], length: int) -> None:
        Cache.__init__(self, layers=layers)
        self._length = length

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this chunk; also where no layer here has attention, which counts them."""
        if not any(isinstance(layer, CacheLayerMixin) for layer in self.layers):
            return self._length
        return int(super().get_seq_length(layer_idx))

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Give the mask's length and offset; also where no layer here knows them."""
        if not any(isinstance(layer, CacheLayerMixin) for layer in self.layers):
            return self._length + query_length, 0
        return super().get_mask_sizes(query_length, layer_idx)

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        """Tell whether a recurrent layer has run; False where none is here."""
        if layer_idx is None and all(isinstance(layer, CacheLayerMixin) for layer in self.layers):
            return self._length > 0
        return bool(super().has_previous_state(layer_idx, state_idx))


class SessionCache:
    """One session's cache over the layers of a shard.

    Args:
        config: of the whole model's decoder: says what every layer caches.
        held: the layers of the shard.
    """

    def __init__(self, config: PretrainedConfig, held: LayerRange) -> None:
        self._config = config
        self._held = held
        self._layers = _make_layers(config, held)
        self._length = 0
        self._used: LayerRange | None = None

    @property
    def length(self) -> int:
        """Tokens held."""
        return self._length

    @property
    def can_truncate(self) -> bool:
        """Whether every layer can forget its last tokens."""
        return all(
            isinstance(layer, GrowingLayer | DummyLayer) or type(layer) is DynamicIndexedLayer
            for layer in self._layers
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes; 0 before the first token."""
        return sum(map(_token_bytes, self._layers))

    def truncate(self, length: int) -> None:
        """Forget every token from `length` on.

        Raises:
            MeshError: INVALID_ARGUMENT for a length over the cache's;
                FAILED_PRECONDITION, reason ``CACHE_NOT_TRUNCATABLE``, for recurrent layers,
                which can only go back to 0.
        """
        if not 0 <= length <= self._length:
            raise MeshError(
                Code.INVALID_ARGUMENT,
                f"cannot truncate a cache of {self._length} tokens to {length}",
            )
        if length == self._length:
            return
        if length == 0:
            self._clear()
            return
        if not self.can_truncate:
            raise MeshError(
                Code.FAILED_PRECONDITION,
                f"this model's recurrent state cannot go back from token {self._length} to "
                f"{length}; start again from 0",
                reason="CACHE_NOT_TRUNCATABLE",
            )
        self._crop(length)

    def view(self, layers: LayerRange) -> LayersView:
        """Give the cache of `layers` to hand to the model; shares storage with this cache.

        Raises:
            MeshError: INVALID_ARGUMENT when the session runs other layers here already.
        """
        if self._length and self._used != layers:
            raise MeshError(
                Code.INVALID_ARGUMENT,
                f"the session holds {self._length} tokens of layers {self._used} here and "
                f"cannot go on with layers {layers}",
                field="X-Meshnet-Layers",
            )
        self._used = layers
        start = self._held.start
        return LayersView(self._layers[layers.start - start : layers.end - start], self._length)

    def advance(self, num_tokens: int) -> None:
        """Count tokens that the model has put into every layer of the view."""
        self._length += num_tokens

    def roll_back(self) -> None:
        """Undo a forward that failed between layers.

        Recurrent states are lost by that: then the whole cache is emptied, and the session
        must start again from 0.
        """
        if self.can_truncate:
            self._crop(self._length)
        else:
            self._clear()

    def _crop(self, length: int) -> None:
        for layer in self._layers:
            if isinstance(layer, DynamicLayer):
                # Layers outside the session's range hold nothing.
                layer.crop(min(0, length - layer.get_seq_length()))
        self._length = length

    def _clear(self) -> None:
        self._layers = _make_layers(self._config, self._held)
        self._length = 0


def _make_layers(config: PretrainedConfig, held: LayerRange) -> list[Any]:
    stock = DynamicCache(config=config).layers
    return [_own(layer) for layer in stock[held.start : held.end]]


def _own(layer: Any) -> Any:
    # Exact types only: a subclass stores more than keys and values.
    if type(layer) is DynamicLayer:
        return GrowingLayer()
    if type(layer) is DynamicSlidingWindowLayer:
        return SlidingLayer(layer.sliding_window)
    return layer


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


def _token_bytes(layer: Any) -> int:
    if not isinstance(layer, CacheLayerMixin) or layer.get_seq_length() == 0:
        return 0
    tensors: Iterable[torch.Tensor | None] = (
        layer.keys,
        layer.values,
        getattr(layer, "indexer_keys", None),
    )
    total = sum(tensor.nbytes for tensor in tensors if tensor is not None)
    return total // int(layer.get_seq_length())
