"""Loads some layers of a Hugging Face causal language model, and nothing else of it.

The model class builds its whole skeleton without memory (on torch's meta device); every
part that the shard does not hold is then replaced by an empty module, so that loading
finds no home for those tensors and never reads them. Renamed, fused and tied weights are
left to transformers.
"""

from __future__ import annotations

import copy
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn
from transformers import AutoConfig
from transformers.configuration_utils import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging as transformers_logging

from meshnet.errors import Code, ConfigError, MeshError
from meshnet.model_dir import ModelDir
from meshnet.topology import LayerRange
from meshnet_node.architectures import verified_model_types

__all__ = ["LoadedShard", "arguments_of", "find_layers", "load_shard", "resolve_dtype"]

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_LIST_NAMES: Final = ("layers", "h", "blocks", "layer")
# These have the flag is_decoder and do not heed it; of encoder families it tells the truth.
_CAUSAL_WITHOUT_FLAG: Final = ("gpt_neox", "gpt_neox_japanese")
_NOT_TEXT: Final = re.compile("vision|visual|image|audio|speech")


@dataclass(frozen=True, slots=True)
class LoadedShard:
    """A causal model whose decoder holds only some layers.

    Attributes:
        model: the model with its head; evaluation mode.
        decoder: the module inside that turns token ids or hidden states into the last
            layer's; has no head.
        owner: the module inside that lists the layers, often the decoder itself.
        list_name: attribute of `owner` that lists the layers held.
        config: of the whole decoder, as it was before anything was cut.
        embedding_width: of the token embedding, where some models project to the hidden size.
        dtype: of the weights and the arithmetic.
    """

    model: Any
    decoder: Any
    owner: Any
    list_name: str
    config: PretrainedConfig
    embedding_width: int
    dtype: torch.dtype


class _Hole(nn.Module):
    """Stands where the shard holds no weights; calling it is a programming error."""


def resolve_dtype(name: str, saved: str) -> torch.dtype:
    """Choose the arithmetic: `name`, or what the weights were saved in where it is ``auto``.

    float16 weights are computed in bfloat16: the layer boundary is bfloat16 whichever it is.

    Raises:
        ConfigError: `name` is none of auto, bfloat16 and float32.
    """
    if name == "auto":
        return torch.float32 if saved == "float32" else torch.bfloat16
    if name not in _DTYPES:
        raise ConfigError(f"dtype {name!r}, expected auto, bfloat16 or float32", field="dtype")
    return _DTYPES[name]


def load_shard(
    directory: Path,
    shape: ModelDir,
    layers: LayerRange,
    *,
    dtype: str = "auto",
    allow_unverified: bool = False,
) -> LoadedShard:
    """Load `layers` from the safetensors files of `directory`.

    Tensors that already have the wanted element type stay views of the mapped file.

    Raises:
        MeshError: the directory cannot be used: ConfigError for its files or the layers;
            UNIMPLEMENTED, reason ``ARCHITECTURE_NOT_VERIFIED``, for an architecture that
            was not shown to run in shards.
    """
    if layers.end > shape.num_layers:
        raise ConfigError(
            f"layers {layers}: {directory} has {shape.num_layers} layers", field="layers"
        )
    if not allow_unverified and shape.model_type not in verified_model_types():
        raise MeshError(
            Code.UNIMPLEMENTED,
            f"{directory}: model type {shape.model_type!r} is not among those verified to run "
            "in shards exactly as in one process; `meshnet model survey` lists and checks them",
            field=str(directory),
            reason="ARCHITECTURE_NOT_VERIFIED",
        )
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(
            f"{directory}: no .safetensors file; weights in other formats are not read",
            field=str(directory),
        )
    try:
        return _load(directory, shape, layers, resolve_dtype(dtype, shape.dtype))
    except MeshError:
        raise
    # transformers raises almost anything for a directory that it cannot read.
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"{directory}: cannot load layers {layers}: {type(error).__name__}: {first_line}",
            field=str(directory),
        ) from error


def find_layers(model: Any, num_layers: int) -> tuple[Any, Any, str]:
    """Find the decoder, the module that lists its layers and that list's attribute.

    Raises:
        MeshError: UNIMPLEMENTED when there is not exactly one candidate.
    """
    found = [
        (path, name)
        for path, owner in model.named_modules()
        for name, child in owner.named_children()
        if isinstance(child, nn.ModuleList) and len(child) == num_layers and name in _LIST_NAMES
    ]
    if len(found) > 1:
        # A wrapper may have as many layers in its vision tower.
        text = [(path, name) for path, name in found if not _NOT_TEXT.search(path)]
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


def _load(directory: Path, shape: ModelDir, layers: LayerRange, dtype: torch.dtype) -> LoadedShard:
    # A node's log is no terminal.
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    _check_config(directory, config)
    whole = copy.deepcopy(config.get_text_config(decoder=True))
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, info = _shard_class(cls, shape.num_layers, layers).from_pretrained(
        directory,
        config=config,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
        # Mismatches are refused below, by name.
        ignore_mismatched_sizes=True,
    )
    for what, names in (
        ("are missing", info["missing_keys"]),
        ("have another shape than config.json says", [key[0] for key in info["mismatched_keys"]]),
    ):
        if names:
            raise ConfigError(
                f"{directory}: {len(names)} tensors {what}, the first is {min(names)}",
                field=str(directory),
            )
    if (
        getattr(model.config, "is_decoder", True) is False
        and shape.model_type not in _CAUSAL_WITHOUT_FLAG
    ):
        raise ConfigError(
            f"{directory}: config.json says is_decoder: false, expected true: "
            "an encoder looks at later tokens and cannot generate",
            field=str(directory),
        )
    model.eval().requires_grad_(False)
    decoder, owner, list_name = find_layers(model, shape.num_layers)
    held = list(getattr(owner, list_name))[layers.start : layers.end]
    setattr(owner, list_name, nn.ModuleList(held))
    return LoadedShard(
        model, decoder, owner, list_name, whole, model.meshnet_embedding_width, dtype
    )


def _check_config(directory: Path, config: PretrainedConfig) -> None:
    text = config.get_text_config(decoder=True)
    if getattr(text, "hidden_size_per_layer_input", 0):
        raise MeshError(
            Code.UNIMPLEMENTED,
            f"{directory}: every layer of a {config.model_type} model takes the token ids; "
            "only its first shard would have them",
            field=str(directory),
            reason="ARCHITECTURE_NOT_VERIFIED",
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{directory}: quantized weights are not supported; "
            "expected bfloat16, float16 or float32",
            field=str(directory),
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{directory}: model type {config.model_type!r} is no causal language model",
            field=str(directory),
        )


def _shard_class(cls: Any, num_layers: int, layers: LayerRange) -> Any:
    first, last = layers.start == 0, layers.end == num_layers

    class Shard(cls):  # type: ignore[misc]  # a class chosen at run time
        _keys_to_ignore_on_load_unexpected: Final = [".*"]

        def __init__(self, config: PretrainedConfig, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            _, owner, name = find_layers(self, num_layers)
            skeleton = getattr(owner, name)
            for index in range(num_layers):
                if not layers.start <= index < layers.end:
                    skeleton[index] = _Hole()
            embedding = self.get_input_embeddings()
            self.meshnet_embedding_width = embedding.weight.shape[1]
            tied_keys: dict[str, str] = vars(self)["all_tied_weights_keys"]
            if not last:
                _remove(self, self.get_output_embeddings())
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
