"""Probes a shard: seeded inputs through each of its layers, and digests of its weights.

What is computed here is compared elsewhere: with what a whole model gave, see `meshnet.probes`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from meshnet import probes
from meshnet.errors import Code, MeshError
from meshnet.grammar import Want
from meshnet.probes import HEAD, WHOLE, PartReport, hidden_input, layer_part, make_sketch
from meshnet.topology import LayerRange
from meshnet_node.backend import ShardBackend

__all__ = ["part_input", "probe_part", "probed_parts", "run_layers", "run_part"]


def probed_parts(backend: ShardBackend) -> tuple[str, ...]:
    """Name what is computed of a shard: each layer, the head, and all layers at once."""
    spec = backend.spec
    layers = range(spec.layers.start, spec.layers.end)
    return (*map(layer_part, layers), *([HEAD] if spec.holds_head else []), WHOLE)


def probe_part(backend: ShardBackend, part: str) -> PartReport:
    """Compute one part on its seeded input; gives its sketches.

    Raises:
        MeshError: the computation fails.
    """
    if part != WHOLE:
        return PartReport(sketch=make_sketch(run_part(backend, part)))
    layers = backend.spec.layers
    values = part_input(backend, layers.start)
    whole = run_layers(backend, layers, values)
    for layer in range(layers.start, layers.end):
        values = run_layers(backend, LayerRange(layer, layer + 1), values)
    return PartReport(sketch=make_sketch(whole), against=make_sketch(values))


def run_part(backend: ShardBackend, part: str) -> npt.NDArray[Any]:
    """Compute a layer or the head on its seeded input; gives all of its output.

    Raises:
        MeshError: the computation fails.
    """
    spec = backend.spec
    is_head = part == HEAD
    layer = spec.num_layers - 1 if is_head else int(part.rpartition(".")[2])
    want = Want("logits" if is_head else "hidden")
    return run_layers(backend, LayerRange(layer, layer + 1), part_input(backend, layer), want)


def part_input(backend: ShardBackend, layer: int) -> npt.NDArray[Any]:
    """Give the seeded input of the layers that begin with `layer`."""
    spec = backend.spec
    if layer == 0:
        return probes.token_input(spec.vocab_size)
    return hidden_input(layer, spec.hidden_size)


def run_layers(
    backend: ShardBackend,
    layers: LayerRange,
    values: npt.NDArray[Any],
    want: Want = Want("hidden"),  # noqa: B008 - immutable
) -> npt.NDArray[Any]:
    """Run layers on a cache of their own.

    Raises:
        MeshError: the computation fails; any failure of the backend, whatever its kind.
    """
    try:
        output = backend.forward(backend.open_cache(), values, layers=layers, want=want)
    except MeshError:
        raise
    except Exception as error:
        raise MeshError(Code.INTERNAL, f"layers {layers}: {error}") from error
    if output is None:
        raise MeshError(Code.INTERNAL, f"layers {layers} gave no {want}")
    return np.array(output)
