"""A model directory: its name and shape, and the small files that go with the weights.

A model directory is what Hugging Face publishes: ``config.json``, tokenizer files, and
weights as safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshnet.errors import ConfigError

__all__ = [
    "CONFIG_FILE",
    "NOTE_FILE",
    "TOKENIZER_FILES",
    "ModelDir",
    "parse_object",
    "read_json",
    "read_model_dir",
]

CONFIG_FILE: Final = "config.json"
NOTE_FILE: Final = "meshnet.json"
"""What ``meshnet model import`` notes: the model's name, its source, its files' hashes."""

TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""What turns text into tokens and back, and a conversation into a prompt."""

_MAX_JSON_BYTES: Final = 64 * 1024 * 1024

# Older families name their dimensions differently; transformers maps these names too.
_NUM_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers")
_HIDDEN_SIZE: Final = ("hidden_size", "n_embd", "d_model", "dim", "n_embed")
_TEXT_PARTS: Final = ("text_config", "decoder", "llm_config", "language_config")


@dataclass(frozen=True, slots=True)
class ModelDir:
    """What a model directory says of its model.

    Attributes:
        name: noted by an import, else the directory's own name.
        model_type: the family as transformers names it, for example ``llama``.
        architectures: class names that the model was saved from.
        num_layers: decoder layers of the whole model.
        hidden_size: width of the hidden states between layers.
        vocab_size: width of the logits.
        max_positions: longest session that the model was made for; 0 where it does not say.
        dtype: element type of the saved weights; empty where it does not say.
    """

    name: str
    model_type: str
    architectures: tuple[str, ...]
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int
    dtype: str


def read_model_dir(directory: Path) -> ModelDir:
    """Read ``config.json`` of a model directory, and the name that an import noted.

    Raises:
        ConfigError: the file is missing, is no JSON object or lacks a dimension.
    """
    path = directory / CONFIG_FILE
    if not path.exists():
        raise ConfigError(
            f"{path}: no such file; expected a Hugging Face model directory", field=str(path)
        )
    root, _ = read_json(path)
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
    return ModelDir(
        name=_name(directory),
        model_type=model_type,
        architectures=tuple(str(name) for name in architectures),
        num_layers=_dimension(path, _with_layer_count(text), _NUM_LAYERS),
        hidden_size=_dimension(path, text, _HIDDEN_SIZE),
        vocab_size=_dimension(path, text if "vocab_size" in text else root, ("vocab_size",)),
        max_positions=limit if isinstance(limit, int) and limit > 0 else 0,
        dtype=str(dtype or root.get("torch_dtype") or ""),
    )


def read_json(path: Path, max_bytes: int = _MAX_JSON_BYTES) -> tuple[dict[str, Any], bytes]:
    """Read a JSON object, and give it with the bytes it was read from.

    Raises:
        ConfigError: absent, larger than `max_bytes`, or no JSON object.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", field=str(path)) from error
    if len(raw) > max_bytes:
        raise ConfigError(f"{path}: more than {max_bytes} bytes", field=str(path))
    return parse_object(raw, path), raw


def parse_object(raw: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object that came from `path`.

    Raises:
        ConfigError: no JSON, or another value.
    """
    try:
        value = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}", field=str(path)) from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}: a JSON {type(value).__name__}, expected an object", field=str(path)
        )
    return value


def _name(directory: Path) -> str:
    path = directory / NOTE_FILE
    if path.is_file():
        name = read_json(path)[0].get("name")
        if isinstance(name, str) and name:
            return name
    return directory.resolve().name


def _with_layer_count(text: Mapping[str, Any]) -> Mapping[str, Any]:
    # Hybrid families may say only what each layer is.
    kinds = text.get("layers_block_type", text.get("layer_types"))
    if isinstance(kinds, list) and not any(name in text for name in _NUM_LAYERS):
        return {**text, _NUM_LAYERS[0]: len(kinds)}
    return text


def _dimension(path: Path, values: Mapping[str, Any], names: tuple[str, ...]) -> int:
    found = next((values[name] for name in names if name in values), None)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ConfigError(
            f"{path}: {names[0]} is {found!r}, expected a positive integer", field=str(path)
        )
    return found
