"""One session's KV cache over a shard's layers, behind transformers' cache interface.

Attention layers keep keys and values in buffers of their own, see `meshnet_node.hf.layers`;
states that cannot be cut back (recurrences, convolutions) stay transformers' own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

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
from meshnet.kv import KV_DTYPES, KvLayout
from meshnet.topology import LayerRange
from meshnet_node.hf.layers import GrowingLayer, SlidingLayer

__all__ = ["LayersView", "SessionCache"]


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

    @property
    def layers(self) -> LayerRange | None:
        """Layers whose keys and values are held; None while there are no tokens."""
        return self._used if self._length else None

    def kv(self) -> KvLayout | None:
        """Give what every layer keeps, once tokens of all are held; None if not keys and values."""
        if not all(isinstance(layer, GrowingLayer | DummyLayer) for layer in self._layers):
            return None
        tensors = [layer.keys for layer in self._layers if layer.keys is not None]
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
        dtype = dtypes.pop() if dtypes else "bfloat16"
        if dtypes or dtype not in KV_DTYPES:
            return None
        try:
            kept = [
                layer.kept if isinstance(layer, GrowingLayer) else None for layer in self._layers
            ]
        except ValueError:
            return None
        return KvLayout.of(dtype, kept)

    def view_kv(self, layers: LayerRange, tokens: int) -> list[memoryview]:
        """View keys and values; see `meshnet_node.backend.Cache.view_kv`."""
        return [
            view
            for layer in self._chosen(layers)
            if isinstance(layer, GrowingLayer)
            for view in layer.views(tokens)
        ]

    def make_room(self, layers: LayerRange, kv: KvLayout, tokens: int) -> list[memoryview]:
        """Let an empty cache hold tokens; see `meshnet_node.backend.Cache.make_room`."""
        dtype = getattr(torch, kv.dtype)
        views = []
        for layer, kept in zip(self._chosen(layers), kv.layers(), strict=True):
            if kept is not None:
                layer.make_room(kept, dtype, tokens)
                views += layer.views(tokens)
        self._used, self._length = layers, tokens
        return views

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
        return LayersView(self._chosen(layers), self._length)

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

    def _chosen(self, layers: LayerRange) -> list[Any]:
        start = self._held.start
        return self._layers[layers.start - start : layers.end - start]

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
