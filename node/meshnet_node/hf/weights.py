"""A loaded shard's weights in parts, for digests of them as they lie in memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from meshnet.probes import layer_part
from meshnet.topology import LayerRange
from meshnet_node.hf.load import LoadedShard

__all__ = ["ShardWeights"]


class ShardWeights:
    """Parameters and saved buffers of a shard: one part a layer, one for each tensor beside.

    Tensors are looked up anew for each digest, so that one which was replaced counts as it is
    now. What was left out of the shard and what is computed when loading (rotations) is none.

    Args:
        shard: as loaded, before any part of its layers was selected.
        layers: that it holds.
    """

    def __init__(self, shard: LoadedShard, layers: LayerRange) -> None:
        self._model = shard.model
        self._dtype = str(shard.dtype).removeprefix("torch.")
        held = list(getattr(shard.owner, shard.list_name))
        self._layers = {layer_part(layers.start + index): held[index] for index in range(len(held))}
        path = next(path for path, each in shard.model.named_modules() if each is shard.owner)
        self._prefix = f"{path}.{shard.list_name}." if path else f"{shard.list_name}."
        self._beside = tuple(
            name for name in shard.model.state_dict() if not name.startswith(self._prefix)
        )
        self._parts = {
            part: sum(tensor.nbytes for _, tensor in self._tensors(part))
            for part in (*self._layers, *self._beside)
        }

    @property
    def dtype(self) -> str:
        """What they are computed in."""
        return self._dtype

    @property
    def parts(self) -> Mapping[str, int]:
        """Bytes by part."""
        return self._parts

    def digest(self, part: str) -> bytes:
        """Give the SHA-256 of a part's names, element types, shapes and values."""
        digest = hashlib.sha256()
        for name, tensor in self._tensors(part):
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            if tensor.numel():
                flat = tensor.detach().contiguous().reshape(-1)
                digest.update(flat.view(torch.uint8).numpy().data)
        return digest.digest()

    def _tensors(self, part: str) -> Iterator[tuple[str, Any]]:
        layer = self._layers.get(part)
        if layer is not None:
            yield from sorted(layer.state_dict().items())
        else:
            yield "", self._model.state_dict()[part]
