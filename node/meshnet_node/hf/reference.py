"""Makes the reference of a model: what each layer gives, in each dtype that nodes compute in.

A few layers are loaded at a time, so that a model larger than memory has a reference too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np

from meshnet.model_dir import read_model_dir
from meshnet.model_weights import model_digest
from meshnet.probes import HEAD, WHOLE, PartReference, Reference, part_reference
from meshnet.topology import LayerRange
from meshnet_node.hf.shard import TransformersShard
from meshnet_node.probe import Output, part_input, part_layer, probed_parts, run_part

__all__ = ["make_reference"]

_GROUP_BYTES: Final = 1 << 30
_DTYPES: Final = ("float32", "bfloat16")


def make_reference(
    directory: Path,
    *,
    threads: int | None = None,
    allow_unverified: bool = False,
    on_layers: Callable[[int, int], None] | None = None,
) -> Reference:
    """Run every layer of a model on its seeded input.

    Args:
        directory: of the whole model.
        threads: for torch; None leaves its default.
        allow_unverified: also of an architecture that was not shown to run in shards.
        on_layers: told how many layers are done, and how many there are.

    Raises:
        MeshError: the model cannot be loaded, or a layer cannot be computed.
    """
    shape = read_model_dir(directory)
    num_layers = shape.num_layers
    digest = model_digest(directory)
    size = _layers_at_once(directory, num_layers)
    variants: dict[str, dict[str, PartReference]] = {dtype: {} for dtype in _DTYPES}
    for start in range(0, num_layers, size):
        layers = LayerRange(start, min(start + size, num_layers))
        exact: dict[str, Output] = {}
        for dtype in _DTYPES:
            shard = TransformersShard(
                directory,
                layers,
                model=shape.name,
                digest=digest,
                dtype=dtype,
                threads=threads,
                allow_unverified=allow_unverified,
            )
            variants[dtype].update(_parts(shard, exact))
            del shard
        if on_layers is not None:
            on_layers(layers.end, num_layers)
    return Reference(shape.name, digest, num_layers, variants)


def _parts(shard: TransformersShard, exact: dict[str, Output]) -> dict[str, PartReference]:
    """Give what a shard's parts give; `exact` keeps what the first dtype gave."""
    weights = shard.weights
    digests = {part: weights.digest(part) for part in weights.parts}
    parts = {name: PartReference(digest) for name, digest in digests.items()}
    for name in probed_parts(shard):
        if name == WHOLE:
            continue
        output = run_part(shard, name)
        given = part_input(shard, part_layer(shard, name))
        is_added_to = name != HEAD and given.shape == output.shape
        parts[name] = part_reference(
            digests.get(name, b""),
            output.astype(np.float32),
            exact.setdefault(name, output).astype(np.float32),
            given.astype(np.float32) if is_added_to else None,
        )
    return parts


def _layers_at_once(directory: Path, num_layers: int) -> int:
    stored = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    # Twice, since bfloat16 weights are computed in float32 too.
    return max(1, min(num_layers, _GROUP_BYTES * num_layers // max(1, 2 * stored)))
