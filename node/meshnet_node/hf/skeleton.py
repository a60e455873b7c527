"""The skeleton of a causal language model with places for one shard's weights only.

The model class builds it whole, without memory (on torch's meta device); every part that
the shard does not hold is then replaced by an empty module, so that loading finds no home
for those tensors and never reads them.

Some parts left out are still called, since the model's own forward runs: the final norm
where the shard is not last, learned positions where it is not first. Their results are not
used. They compute with NaN for weights, so that one that is used after all cannot go unnoticed.
"""

from __future__ import annotations

import inspect
from typing import Any, Final

import torch
from torch import nn
from transformers.configuration_utils import PretrainedConfig

from meshnet.errors import Code, MeshError
from meshnet.topology import LayerRange
from meshnet_node.tensor_names import LAYER_LISTS, NOT_TEXT, unneeded_parts

__all__ = ["arguments_of", "fill_left_out", "find_layers", "shard_class"]


class _Hole(nn.Module):
    """Stands where the shard holds no weights; calling it is a programming error."""


def find_layers(model: Any, num_layers: int) -> tuple[Any, Any, str]:
    """Find the decoder, the module that lists its layers and that list's attribute.

    Raises:
        MeshError: UNIMPLEMENTED when there is not exactly one candidate.
    """
    found = [
        (path, name)
        for path, owner in model.named_modules()
        for name, child in owner.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == num_layers and name in LAYER_LISTS
    ]
    if len(found) > 1:
        # A wrapper may have as many layers in its vision tower.
        text = [(path, name) for path, name in found if not NOT_TEXT.search(path)]
        found = text or found
    if len(found) != 1:
        raise MeshError(
            Code.UNIMPLEMENTED,
            f"{type(model).__name__} has {len(found)} lists of {num_layers} layers, expected one",
            reason="ARCHITECTURE_NOT_VERIFIED",
        )
    path, name = found[0]
    parts = path.split(".") if path else []
    ancestors = [model.get_submodule(".".join(parts[:end])) for end in range(len(parts), -1, -1)]
    # Encoder-like models list their layers in a module that takes hidden states only.
    decoder = next((each for each in ancestors if "inputs_embeds" in arguments_of(each)), model)
    return decoder, ancestors[0], name


def arguments_of(module: nn.Module) -> frozenset[str]:
    """Give the names that a module's forward takes."""
    return frozenset(inspect.signature(module.forward).parameters)


def fill_left_out(model: Any, owner: Any) -> tuple[str, ...]:
    """Put the parts left out beside the layers back, each parameter one NaN in its shape.

    Call it when the weights of `model`, of a `shard_class`, are loaded. Gives the parts' names.
    """
    parts: dict[str, nn.Module] = model.meshnet_left_out
    for name, part in parts.items():
        for module in part.modules():
            for key, parameter in list(module.named_parameters(recurse=False)):
                nan = torch.full((), torch.nan, dtype=parameter.dtype)
                delattr(module, key)
                module.register_buffer(key, nan.expand(parameter.shape), persistent=False)
        setattr(owner, name, part.eval())
    return tuple(parts)


def shard_class(cls: Any, num_layers: int, layers: LayerRange) -> Any:
    """Derive from a model's class one whose instances have places for `layers` only."""
    first, last = layers.start == 0, layers.end == num_layers

    class Shard(cls):  # type: ignore[misc]  # a class chosen at run time
        _keys_to_ignore_on_load_unexpected: Final = [".*"]

        def __init__(self, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            decoder, owner, name = find_layers(self, num_layers)
            skeleton = getattr(owner, name)
            for index in range(num_layers):
                if not layers.start <= index < layers.end:
                    skeleton[index] = _Hole()
            unneeded = unneeded_parts(name, layers, num_layers)
            # Computed buffers would stay without values; what has them is loaded.
            self.meshnet_left_out = {
                part: module
                for part, module in owner.named_children()
                if part in unneeded and _holds_only_parameters(module)
            }
            for part in self.meshnet_left_out:
                setattr(owner, part, _Hole())
            embedding = self.get_input_embeddings()
            self.meshnet_embedding_width = embedding.weight.shape[1]
            tied_keys: dict[str, str] = vars(self)["all_tied_weights_keys"]
            if not last:
                _remove(self, self.get_output_embeddings())
                _remove_around(self, decoder)
            # A tied head borrows the embedding's weights.
            if not first and not (last and tied_keys):
                _remove(self, embedding)
            kept = {key for key, _ in self.named_parameters(remove_duplicate=False)}
            self.all_tied_weights_keys = {
                target: source for target, source in tied_keys.items() if {target, source} <= kept
            }

    # Under its own name transformers takes it for foreign code and skips weight renames.
    Shard.__name__, Shard.__qualname__, Shard.__module__ = (
        cls.__name__,
        cls.__qualname__,
        cls.__module__,
    )
    return Shard


def _remove(model: nn.Module, module: nn.Module) -> None:
    # By path: a model's own setters copy attributes that a hole does not have.
    path = next((path for path, each in model.named_modules() if each is module), None)
    if path is not None:
        model.set_submodule(path, _Hole())


def _remove_around(model: nn.Module, decoder: nn.Module) -> None:
    """Remove all modules that are not in the decoder: heads, towers of other modalities.

    Without a head only the decoder is called.
    """
    path = next(path for path, each in model.named_modules() if each is decoder)
    module = model
    for part in path.split(".") if path else ():
        for name, _ in list(module.named_children()):
            if name != part:
                setattr(module, name, _Hole())
        module = module.get_submodule(part)


def _holds_only_parameters(module: nn.Module) -> bool:
    has = next(module.parameters(), None) is not None
    return has and next(module.buffers(), None) is None
