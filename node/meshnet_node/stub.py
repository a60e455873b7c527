"""A backend that passes chunks through: for tests, and for people who write other nodes."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from meshnet.dtypes import BFLOAT16, item_size
from meshnet.errors import Code, MeshError
from meshnet.grammar import Want
from meshnet.kv import KvLayout
from meshnet.topology import LayerRange
from meshnet.wire import view_tensor
from meshnet_node.backend import Cache, ShardSpec

__all__ = ["StubBackend"]


def _make_stub_binary_activation(shape: tuple[int, ...], dtype: str = BFLOAT16) -> bytes:
    """Make the body of a zeroed activation: row-major little-endian, no framing.

    Raises:
        KeyError: a dtype that the wire does not have.
    """
    return bytes(math.prod(shape) * item_size(dtype))


class _StubCache:
    """Counts tokens, holds none."""

    def __init__(self) -> None:
        self.length = 0
        self.layers: LayerRange | None = None

    def truncate(self, length: int) -> None:
        """Set the count back."""
        self.length = length

    def view_kv(self, layers: LayerRange, tokens: int) -> list[memoryview]:
        """Give nothing: a layer of a stub keeps nothing of a token."""
        return []

    def make_room(self, layers: LayerRange, kv: KvLayout, tokens: int) -> list[memoryview]:
        """Count the tokens."""
        self.layers, self.length = layers, tokens
        return []


class StubBackend:
    """Answers hidden states as they came, and zeros for token ids.

    Args:
        layers: the layers it claims to hold.
        hidden_size: width of the hidden states.
        num_layers: of the model it claims to be part of; by default `layers` ends it.
        head: also answer logits, which favour token 0, where `layers` ends the model;
            without, every chunk passes through.
        vocab_size: token ids taken, and width of the logits.
        model: name that it claims to serve.
        delay_s: slept in every forward, in place of computing.
        busy: keep a thread that computes in Python, which holds the interpreter's lock as a
            tokenizer or another service in the node's process would.
    """

    def __init__(
        self,
        layers: LayerRange,
        *,
        hidden_size: int,
        num_layers: int | None = None,
        head: bool = False,
        vocab_size: int = 32,
        model: str = "stub",
        delay_s: float = 0.0,
        busy: bool = False,
    ) -> None:
        num_layers = layers.end if num_layers is None else num_layers
        self.spec = ShardSpec(
            model=model,
            digest="stub",
            layers=layers,
            num_layers=num_layers,
            hidden_size=hidden_size,
            vocab_size=vocab_size,
            holds_embedding=layers.start == 0,
            holds_head=head and layers.end == num_layers,
            cache_bytes_per_token=0,
        )
        self.kv = KvLayout(BFLOAT16, ((len(layers), None),))
        self._delay_s = delay_s
        if busy:
            threading.Thread(target=_compute_forever, name="busy", daemon=True).start()

    @property
    def keeps_threads(self) -> bool:
        """It has none."""
        return False

    @property
    def weights(self) -> None:
        """It has none."""
        return

    def open_cache(self) -> Cache:
        """Make a counter."""
        return _StubCache()

    def forward(
        self,
        cache: Cache,
        tensor: npt.NDArray[Any],
        *,
        layers: LayerRange,
        want: Want,
    ) -> npt.NDArray[Any] | None:
        """Count the chunk's tokens and hand its hidden states back, uncopied."""
        if not isinstance(cache, _StubCache):
            raise TypeError(f"not a cache of this backend: {type(cache).__name__}")
        if self._delay_s:
            time.sleep(self._delay_s)
        cache.length += tensor.shape[1]
        cache.layers = layers
        match want.kind:
            case "hidden" if tensor.ndim == 3:
                return tensor
            case "hidden":
                shape = (*tensor.shape, self.spec.hidden_size)
                return view_tensor(_make_stub_binary_activation(shape), shape, BFLOAT16)
            case "logits":
                logits = np.zeros((1, 1, self.spec.vocab_size), dtype=np.float32)
                logits[0, 0, 0] = 1.0
                return logits
            case "top":
                return self._top(want.top)
            case "none":
                return None
        raise MeshError(Code.INVALID_ARGUMENT, f"want {want}: not known", field="X-Meshnet-Want")

    def _top(self, count: int) -> npt.NDArray[np.float32]:
        """Give `count` pairs (token id, logit) and the log-sum-exp of the same logits."""
        count = min(count, self.spec.vocab_size)
        pairs = np.zeros((1, count + 1, 2), dtype=np.float32)
        pairs[0, :count, 0] = np.arange(count)
        pairs[0, 0, 1] = 1.0
        pairs[0, count] = (-1.0, math.log(math.e + self.spec.vocab_size - 1))
        return pairs


def _compute_forever() -> None:
    number = 0
    while True:
        number = (number * 5 + 1) % 65536
