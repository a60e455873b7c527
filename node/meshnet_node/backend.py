"""What computes a shard, as the rest of a node sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy.typing as npt

from meshnet.grammar import Want
from meshnet.kv import KvLayout
from meshnet.topology import LayerRange

__all__ = ["Cache", "LoadedWeights", "ShardBackend", "ShardSpec"]


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """What a backend holds.

    Attributes:
        model: the model's name, without ``models/``.
        digest: of the model's configuration, tokenizer and weight index; the hops of a
            route must agree on it.
        layers: layers held, half-open.
        num_layers: layers of the whole model.
        hidden_size: width of the hidden states.
        vocab_size: size of the vocabulary; 0 where neither embedding nor head is held.
        holds_embedding: takes int32 token ids ``[1, seq]``.
        holds_head: gives logits.
        cache_bytes_per_token: KV cache of one token over the layers held; 0 where the
            cache does not grow.
    """

    model: str
    digest: str
    layers: LayerRange
    num_layers: int
    hidden_size: int
    vocab_size: int
    holds_embedding: bool
    holds_head: bool
    cache_bytes_per_token: int


class Cache(Protocol):
    """One session's KV cache in this shard."""

    @property
    def length(self) -> int:
        """Tokens held."""
        ...

    def truncate(self, length: int) -> None:
        """Forget every token from `length` on, 0 <= `length` <= the cache's length.

        Raises:
            MeshError: FAILED_PRECONDITION, reason ``CACHE_NOT_TRUNCATABLE``: this model's
                state cannot be cut back (recurrent layers, a window slid past).
        """
        ...

    @property
    def layers(self) -> LayerRange | None:
        """Layers whose keys and values are held; None while there are no tokens."""
        ...

    def view_kv(self, layers: LayerRange, tokens: int) -> list[memoryview]:
        """View the first `tokens` tokens of `layers`, in the order of the wire, uncopied.

        Args:
            layers: some of `Cache.layers`.
            tokens: 1 to the cache's length.

        Returns:
            Bytes as `ShardBackend.kv` describes them. They hold until the cache is next
            computed with or truncated.
        """
        ...

    def make_room(self, layers: LayerRange, kv: KvLayout, tokens: int) -> list[memoryview]:
        """Let an empty cache hold `tokens` tokens of `layers`, whatever their bytes are.

        Args:
            layers: some of those of the shard.
            kv: what `ShardBackend.kv` says of them.
            tokens: at least 1.

        Returns:
            The memory to fill with what another cache's `view_kv` gave, in its order.
        """
        ...


class LoadedWeights(Protocol):
    """The weights of a shard as they lie in memory, in parts; may be read while it computes."""

    @property
    def dtype(self) -> str:
        """What they are computed in: ``bfloat16`` or ``float32``."""
        ...

    @property
    def parts(self) -> Mapping[str, int]:
        """Bytes by part: ``layer.N`` for each layer held, and tensors beside the layers."""
        ...

    def digest(self, part: str) -> bytes:
        """Give the SHA-256 of a part's names, element types, shapes and values."""
        ...


class ShardBackend(Protocol):
    """Runs a shard. One `forward` runs at a time; `open_cache` may be called meanwhile."""

    @property
    def spec(self) -> ShardSpec:
        """What is held."""
        ...

    @property
    def keeps_threads(self) -> bool:
        """Whether a pool of threads is kept for each thread that computes, as OpenMP does.

        Such a backend is given one thread; others compute on the threads that bring chunks.
        """
        ...

    @property
    def kv(self) -> KvLayout | None:
        """What a cache holds of the layers of `spec`.

        None where keys and values are not all of it (recurrent layers, indexes beside): such
        caches cannot go to another node, and `Cache.view_kv` and `Cache.make_room` are not
        called.
        """
        ...

    @property
    def weights(self) -> LoadedWeights | None:
        """The weights held; None for a backend that has none, and cannot be probed."""
        ...

    def open_cache(self) -> Cache:
        """Make an empty cache for a new session."""
        ...

    def forward(
        self,
        cache: Cache,
        tensor: npt.NDArray[Any],
        *,
        layers: LayerRange,
        want: Want,
    ) -> npt.NDArray[Any] | None:
        """Run `layers` on one chunk and append it to `cache`.

        Args:
            cache: of the session; the chunk's first token has position ``cache.length``.
            tensor: bfloat16 ``[1, seq, hidden]``, or int32 ``[1, seq]`` token ids where the
                embedding is held and `layers` begins at 0. A view: valid during the call.
            layers: a sub-range of the layers held.
            want: ``hidden`` gives bfloat16 ``[1, seq, hidden]``; ``logits`` float32
                ``[1, 1, vocab]`` of the last position; ``top`` float32 ``[1, K + 1, 2]``, K
                pairs (token id, logit) by falling logit, then (-1, log-sum-exp over the
                vocabulary); ``none`` gives None.

        Raises:
            MeshError: INVALID_ARGUMENT for a tensor or `want` that this shard cannot take;
                the cache is unchanged then.
        """
        ...
