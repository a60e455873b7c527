"""What a shard does with a chunk: the layers it runs, what it gives, what it refuses (pure)."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from meshnet.dtypes import INT32
from meshnet.errors import WireError
from meshnet.grammar import Want
from meshnet.topology import LayerRange, Route
from meshnet.wire import ChunkHeader
from meshnet_node.backend import ShardSpec

__all__ = ["check_layers", "check_route", "plan"]


def plan(spec: ShardSpec, header: ChunkHeader, tensor: npt.NDArray[Any]) -> tuple[LayerRange, Want]:
    """Check a chunk against the shard; gives the layers to run and what to compute of them.

    A chunk that goes on needs hidden states here, whatever the caller wants at the end.

    Raises:
        WireError: naming the header that this shard cannot serve.
    """
    layers = check_layers(spec, header.layers)
    if header.dtype == INT32:
        _check_token_ids(spec, layers, tensor)
    elif tensor.ndim != 3 or tensor.shape[0] != 1 or tensor.shape[2] != spec.hidden_size:
        raise WireError(
            f"X-Meshnet-Shape: {','.join(map(str, header.shape))};"
            f" expected 1,SEQ,{spec.hidden_size} for bfloat16 hidden states",
            field="X-Meshnet-Shape",
        )
    ends_model = spec.holds_head and layers.end == spec.num_layers
    if header.route:
        check_route(layers, header.route)
        return layers, Want("hidden")
    if header.journal:
        return layers, _plan_kept(spec, layers, header)
    want = header.want or Want("logits" if ends_model else "hidden")
    if want.kind in ("logits", "top") and not ends_model:
        raise WireError(
            f"X-Meshnet-Want: {want}; expected hidden or none, since layers {layers} of"
            f" {spec.num_layers} have no head",
            field="X-Meshnet-Want",
        )
    if want.top > spec.vocab_size:
        want = Want("top", spec.vocab_size)
    return layers, want


def _plan_kept(spec: ShardSpec, layers: LayerRange, header: ChunkHeader) -> Want:
    """Say what to compute of a chunk whose output is kept here, as if it were sent on."""
    if header.want != Want("none"):
        raise WireError(
            f"X-Meshnet-Want: {header.want}; expected none beside X-Meshnet-Journal",
            field="X-Meshnet-Want",
        )
    return Want("hidden" if layers.end < spec.num_layers else "none")


def check_layers(spec: ShardSpec, asked: LayerRange | None) -> LayerRange:
    """Give the layers to run: those asked, or all.

    Raises:
        WireError: some are not held here.
    """
    layers = asked or spec.layers
    if not spec.layers.contains(layers):
        raise WireError(
            f"X-Meshnet-Layers: {layers}; expected a part of this node's {spec.layers}",
            field="X-Meshnet-Layers",
        )
    return layers


def _check_token_ids(spec: ShardSpec, layers: LayerRange, tensor: npt.NDArray[Any]) -> None:
    if not spec.holds_embedding or layers.start != 0:
        raise WireError(
            f"X-Meshnet-Dtype: int32; expected bfloat16, since layers {layers} have no embedding",
            field="X-Meshnet-Dtype",
        )
    if tensor.ndim != 2 or tensor.shape[0] != 1:
        raise WireError(
            f"X-Meshnet-Shape: {','.join(map(str, tensor.shape))}; expected 1,SEQ for token ids",
            field="X-Meshnet-Shape",
        )
    low, high = int(tensor.min()), int(tensor.max())
    if low < 0 or high >= spec.vocab_size:
        wrong = low if low < 0 else high
        raise WireError(
            f"body: token id {wrong}; expected 0 to {spec.vocab_size - 1}", field="body"
        )


def check_route(layers: LayerRange, route: Route) -> None:
    """Refuse a route that does not go on where these layers end: the numbers would be wrong."""
    end = layers.end
    for hop in route:
        if hop.layers.start != end:
            raise WireError(
                f"X-Meshnet-Route: node {hop.node} begins at layer {hop.layers.start};"
                f" expected {end}, where the hop before ends",
                field="X-Meshnet-Route",
            )
        end = hop.layers.end
