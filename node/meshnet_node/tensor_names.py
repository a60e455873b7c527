"""Which tensors of a model a shard leaves out, told by their names alone.

Beside the list of layers stand modules that only one end of the model needs: what is
added to or done with the embeddings before the first layer, and the norm after the last.
They are told by the names that model families give them; a tensor of an unknown name is
kept by every shard. `meshnet_node.hf.load` leaves out the same, and makes sure that it had
no effect.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

from meshnet.topology import LayerRange

__all__ = ["FINAL_NORMS", "INPUT_PARTS", "LAYER_LISTS", "NOT_TEXT", "left_out", "unneeded_parts"]

LAYER_LISTS: Final = ("layers", "h", "blocks", "layer")
"""Names of a decoder's list of layers; `layer` is that of encoder-like models."""

NOT_TEXT: Final = re.compile("vision|visual|image|audio|speech")
"""Finds, in a module's path, that it is of a tower for another modality."""

FINAL_NORMS: Final = frozenset(
    {"norm", "norm_f", "ln_f", "final_norm", "final_layernorm", "final_layer_norm", "layer_norm"}
)
"""Modules beside the layers that come after the last one.

`embedding_norm` is not among them: it is the final norm of one family only, by a name that
promises another place.
"""

INPUT_PARTS: Final = frozenset({"wpe", "embed_positions", "word_embeddings_layernorm"})
"""Modules beside the layers that come before the first one: positions and embedding norms.

`layernorm_embedding` is not among them: it is the final norm of one family.
"""

_LAYER: Final = re.compile(rf"(?:^|\.)(?P<list>{'|'.join(LAYER_LISTS)})\.(?P<index>[0-9]+)\.")
_EMBEDDING: Final = re.compile(
    r"(?:^|\.)(?:embed_tokens|wte|word_embeddings|embed_in|tok_embeddings|embeddings?)\.weight"
)
_HEAD: Final = re.compile(r"(?:(?:^|\.)(?:lm_head|embed_out|output_layer)|^output)\.")
# What the embedding stands for where it is not stored; a head may have other tensors besides.
_HEAD_MATRIX: Final = re.compile(_HEAD.pattern + r"(?:decoder\.)?weight$")


def unneeded_parts(list_name: str, layers: LayerRange, num_layers: int) -> frozenset[str]:
    """Give the names of modules beside the list `list_name` that a shard leaves out.

    None beside `layer`: encoder-like models hand positions to every layer there.
    """
    if list_name == "layer":
        return frozenset()
    before = INPUT_PARTS if layers.start > 0 else frozenset()
    return before | (FINAL_NORMS if layers.end < num_layers else frozenset())


def left_out(names: Collection[str], layers: LayerRange, num_layers: int) -> frozenset[str]:
    """Choose, of all tensors of a model, those that a shard does not load.

    They are the layers of other shards; the token embedding, unless the shard is first (or
    last, where the head is tied to it); the head, unless it is last; and `unneeded_parts`.
    """
    first, last = layers.start == 0, layers.end == num_layers
    tied = not any(_HEAD_MATRIX.search(name) for name in names)
    text = {name: _LAYER.search(name) for name in names if not NOT_TEXT.search(name)}
    beside = {
        name[: found.start("list")] + part + "."
        for name, found in text.items()
        if found is not None
        for part in unneeded_parts(found["list"], layers, num_layers)
    }
    unneeded = set()
    for name, found in text.items():
        if found is not None:
            held = layers.start <= int(found["index"]) < layers.end
        elif _HEAD.search(name):
            held = last
        elif _EMBEDDING.search(name):
            held = first or (last and tied)
        else:
            held = name.rpartition(".")[0] + "." not in beside
        if not held:
            unneeded.add(name)
    return frozenset(unneeded)
