"""Loads some layers of a Hugging Face causal language model, and nothing else of it.

The skeleton of the model decides what is read; see `meshnet_node.hf.skeleton`. Renamed, fused
and tied weights are left to transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
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
from meshnet_node.hf.skeleton import fill_left_out, find_layers, shard_class

__all__ = [
    "LoadedShard",
    "load_shard",
    "quiet_transformers",
    "resolve_dtype",
]

_DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# These have the flag is_decoder and do not heed it; of encoder families it tells the truth.
_CAUSAL_WITHOUT_FLAG: Final = ("gpt_neox", "gpt_neox_japanese")


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
        left_out: names of the modules of `owner` whose weights are NaN instead of loaded.
    """

    model: Any
    decoder: Any
    owner: Any
    list_name: str
    config: PretrainedConfig
    embedding_width: int
    dtype: torch.dtype
    left_out: tuple[str, ...]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep progress bars and warnings of transformers, not its errors, off stderr.

    What a load report warns of is raised as an error here, and the rest is advice to
    programmers. The settings are those of the process; they are put back at the end.
    """
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # untyped
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]  # untyped
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]  # untyped


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
        with quiet_transformers():
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


def _load(directory: Path, shape: ModelDir, layers: LayerRange, dtype: torch.dtype) -> LoadedShard:
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False, local_files_only=True)
    _check_config(directory, config)
    whole = copy.deepcopy(config.get_text_config(decoder=True))
    cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    model, info = shard_class(cls, shape.num_layers, layers).from_pretrained(
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
    left_out = fill_left_out(model, owner)
    return LoadedShard(
        model,
        decoder,
        owner,
        list_name,
        whole,
        model.meshnet_embedding_width,
        dtype,
        left_out,
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
