"""What a Hugging Face model directory says of its shape, read without torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

from meshnet.errors import ConfigError

__all__ = ["ModelConfig", "read_model_config", "verified_model_types"]

_MAX_CONFIG_BYTES: Final = 16 * 1024 * 1024

# Older families name their dimensions differently; transformers maps these names too.
_NUM_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_HIDDEN_SIZE: Final = ("hidden_size", "n_embd", "d_model", "dim", "n_embed")
_TEXT_PARTS: Final = ("text_config", "decoder", "llm_config", "language_config")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's shape.

    Attributes:
        model_type: the family as transformers names it, for example ``llama``.
        architectures: class names that the model was saved from.
        num_layers: decoder layers of the whole model.
        hidden_size: width of the hidden states between layers.
        vocab_size: width of the logits.
        max_positions: longest session that the model was made for; 0 where it does not say.
        dtype: element type of the saved weights; empty where it does not say.
    """

    model_type: str
    architectures: tuple[str, ...]
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    dtype: str


def read_model_config(directory: Path) -> ModelConfig:
    """Read ``config.json`` of a model directory.

    Raises:
        ConfigError: the file is missing, is no JSON object or lacks a dimension.
    """
    path = directory / "config.json"
    root = _read_object(path)
    text = next((root[name] for name in _TEXT_PARTS if isinstance(root.get(name), dict)), root)
    model_type = root.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ConfigError(f"{path}: model_type {model_type!r}, expected a name", field=str(path))
    architectures = root.get("architectures") or []
    if not isinstance(architectures, list):
        raise ConfigError(
            f"{path}: architectures {architectures!r}, expected a list of names", field=str(path)
        )
    dtype = text.get("dtype") or text.get("torch_dtype") or root.get("dtype")
    limit = text.get("max_position_embeddings", text.get("n_positions", 0))
    return ModelConfig(
        model_type=model_type,
        architectures=tuple(str(name) for name in architectures),
        num_layers=_dimension(path, text, _NUM_LAYERS),
        hidden_size=_dimension(path, text, _HIDDEN_SIZE),
        vocab_size=_dimension(path, text if "vocab_size" in text else root, ("vocab_size",)),
        max_positions=limit if isinstance(limit, int) and limit > 0 else 0,
        dtype=str(dtype or root.get("torch_dtype") or ""),
    )


def verified_model_types() -> frozenset[str]:
    """Give the model types that were shown to run in shards exactly as in one process.

    Source: architectures.json, written by `meshnet_node.hf_survey`.
    """
    text = resources.files("meshnet_node").joinpath("architectures.json").read_text("utf-8")
    return frozenset(json.loads(text)["verified"])


def _read_object(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MAX_CONFIG_BYTES:
            raise ConfigError(f"{path}: more than {_MAX_CONFIG_BYTES} bytes", field=str(path))
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}; expected a Hugging Face model directory",
            field=str(path),
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}", field=str(path)) from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}: a JSON {type(value).__name__}, expected an object", field=str(path)
        )
    return value


def _dimension(path: Path, values: Mapping[str, Any], names: tuple[str, ...]) -> int:
    found = next((values[name] for name in names if name in values), None)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ConfigError(
            f"{path}: {names[0]} is {found!r}, expected a positive integer", field=str(path)
        )
    return found
