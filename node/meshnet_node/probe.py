"""Probes a shard: seeded inputs through each of its layers, and digests of its weights.

What is computed here is compared elsewhere: with what a whole model gave, see `meshnet.probes`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from meshnet.errors import Code, MeshError
from meshnet.grammar import Want
from meshnet.probes import (
    HEAD,
    WHOLE,
    PartReport,
    hidden_input,
    layer_part,
    make_sketch,
    token_input,
)
from meshnet.topology import LayerRange
from meshnet_node.backend import ShardBackend

__all__ = ["Output", "Work", "part_input", "part_layer", "probed_parts", "probing", "run_part"]

Output = npt.NDArray[Any]

Work = Callable[[], Output]
"""One forward, for when the shard may compute.

Raises:
    MeshError: the computation fails.
"""

_HIDDEN: Final = Want("hidden")


def probed_parts(backend: ShardBackend) -> tuple[str, ...]:
    """Name what is computed of a shard: each layer, the head, and all layers at once."""
    spec = backend.spec
    layers = range(spec.layers.start, spec.layers.end)
    return (*map(layer_part, layers), *([HEAD] if spec.holds_head else []), WHOLE)


def probing(backend: ShardBackend, part: str) -> Generator[Work, Output, PartReport]:
    """Compute one part on its seeded input: gives out each forward, takes in what it gave.

    Returns:
        Its sketches.
    """
    if part != WHOLE:
        return PartReport(sketch=make_sketch((yield lambda: run_part(backend, part))))
    layers = backend.spec.layers
    values = given = part_input(backend, layers.start)
    whole = yield lambda: _run(backend, layers, given, _HIDDEN)
    for layer in range(layers.start, layers.end):
        values = yield _step(backend, layer, values)
    return PartReport(sketch=make_sketch(whole), against=make_sketch(values))


def run_part(backend: ShardBackend, part: str) -> Output:
    """Compute a layer or the head on its seeded input; gives all of its output.

    Raises:
        MeshError: the computation fails.
    """
    layer = part_layer(backend, part)
    want = Want("logits") if part == HEAD else _HIDDEN
    return _run(backend, LayerRange(layer, layer + 1), part_input(backend, layer), want)


def part_layer(backend: ShardBackend, part: str) -> int:
    """Give the layer that a part is computed with."""
    return backend.spec.num_layers - 1 if part == HEAD else int(part.rpartition(".")[2])


def part_input(backend: ShardBackend, layer: int) -> Output:
    """Give the seeded input of the layers that begin with `layer`."""
    spec = backend.spec
    return token_input(spec.vocab_size) if layer == 0 else hidden_input(layer, spec.hidden_size)


def _step(backend: ShardBackend, layer: int, values: Output) -> Work:
    return lambda: _run(backend, LayerRange(layer, layer + 1), values, _HIDDEN)


def _run(backend: ShardBackend, layers: LayerRange, values: Output, want: Want) -> Output:
    """Run layers on a cache of their own; any failure of the backend is a MeshError."""
    try:
        output = backend.forward(backend.open_cache(), values, layers=layers, want=want)
    except MeshError:
        raise
    except Exception as error:
        raise MeshError(Code.INTERNAL, f"layers {layers}: {error}") from error
    if output is None:
        raise MeshError(Code.INTERNAL, f"layers {layers} gave no {want}")
    return np.array(output)
