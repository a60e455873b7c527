"""What a shard's KV cache looks like as bytes: layer by layer, keys then values (pure).

Keys and values are ``[heads, tokens, width]`` each, row-major, little-endian, in the cache's
own element type, so that every bit crosses. One head's tokens are contiguous in a cache that
grows by tokens, and so are they on the wire: neither end needs to copy.

Source: proto/WIRE.md, Sessions.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

__all__ = ["KV_DTYPES", "KvLayout", "LayerKv", "format_kv", "parse_kv", "parse_kv_dtype"]

KV_DTYPES: Final = {"bfloat16": 2, "float16": 2, "float32": 4}
"""Element types of caches, and their bytes."""

_RUN = re.compile(
    r"(?:(?P<count>[1-9][0-9]{0,5})\*)?"
    r"(?:none|(?P<heads>[1-9][0-9]{0,5})x(?P<key>[1-9][0-9]{0,5})x(?P<value>[1-9][0-9]{0,5}))"
)


@dataclass(frozen=True, slots=True)
class LayerKv:
    """What one layer keeps of each token.

    Attributes:
        heads: key and value heads, equally many.
        key_width: elements of a key in one head.
        value_width: elements of a value in one head.
    """

    heads: int
    key_width: int
    value_width: int

    @property
    def width(self) -> int:
        """Elements of one token, keys and values over all heads."""
        return self.heads * (self.key_width + self.value_width)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """What a range of layers keeps of each token; equal where the bytes mean the same.

    Attributes:
        dtype: of keys and values, one of `KV_DTYPES`.
        runs: (number of layers, what each of them keeps); None for layers that keep nothing.
            Runs that follow one another differ.
    """

    dtype: str
    runs: tuple[tuple[int, LayerKv | None], ...]

    @staticmethod
    def of(dtype: str, layers: Iterable[LayerKv | None]) -> KvLayout:
        """Make the layout of these layers, in order."""
        return KvLayout(dtype, _joined((1, layer) for layer in layers))

    @property
    def num_layers(self) -> int:
        """Layers in all."""
        return sum(count for count, _ in self.runs)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token over all layers, in unbounded integers."""
        elements = sum(count * layer.width for count, layer in self.runs if layer is not None)
        return elements * KV_DTYPES[self.dtype]

    def layers(self) -> Iterator[LayerKv | None]:
        """Give what each layer keeps, in order; as many as `num_layers` says."""
        for count, layer in self.runs:
            yield from itertools.repeat(layer, count)

    def cut(self, start: int, end: int) -> KvLayout:
        """Give the layout of the layers `start` to `end`, half-open, counted from its first.

        Raises:
            ValueError: it has no such layers.
        """
        if not 0 <= start < end <= self.num_layers:
            raise ValueError(f"layers {start}-{end} of {self.num_layers}")
        return KvLayout.of(self.dtype, itertools.islice(self.layers(), start, end))


def parse_kv(text: str, dtype: str) -> KvLayout:
    """Read ``[COUNT*]HEADSxKEYxVALUE`` or ``[COUNT*]none`` runs joined by commas.

    A layer costs nothing until `KvLayout.layers` is asked for it.

    Raises:
        ValueError: out of that grammar.
    """
    runs = []
    for item in text.split(","):
        match = _RUN.fullmatch(item)
        if match is None:
            raise ValueError(
                "runs of layers [COUNT*]HEADSxKEYxVALUE or [COUNT*]none joined by ',',"
                " as 10*3x64x64"
            )
        layer = None
        if match["heads"]:
            layer = LayerKv(int(match["heads"]), int(match["key"]), int(match["value"]))
        runs.append((int(match["count"] or 1), layer))
    return KvLayout(dtype, _joined(runs))


def format_kv(layout: KvLayout) -> str:
    """Write a layout's layers as `parse_kv` reads them."""
    return ",".join(
        ("" if count == 1 else f"{count}*")
        + ("none" if layer is None else f"{layer.heads}x{layer.key_width}x{layer.value_width}")
        for count, layer in layout.runs
    )


def parse_kv_dtype(text: str) -> str:
    """Read the element type of a cache.

    Raises:
        ValueError: it is none.
    """
    if text not in KV_DTYPES:
        raise ValueError(f"{', '.join(KV_DTYPES)} in lower case")
    return text


def _joined(runs: Iterable[tuple[int, LayerKv | None]]) -> tuple[tuple[int, LayerKv | None], ...]:
    return tuple(
        (sum(count for count, _ in same), layer)
        for layer, same in itertools.groupby(runs, key=lambda run: run[1])
    )
