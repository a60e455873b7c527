"""A model directory: its name and shape, and the small files that go with the weights.

A model directory is what Hugging Face publishes: ``config.json``, tokenizer files, and
weights as safetensors.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshnet.errors import ConfigError
from meshnet.jsontext import check_nesting

__all__ = [
    "CONFIG_FILE",
    "NOTE_FILE",
    "READ_SUFFIXES",
    "TOKENIZER_FILES",
    "ModelDir",
    "check_files",
    "parse_object",
    "read_file",
    "read_json",
    "read_model_dir",
    "read_text",
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

READ_SUFFIXES: Final = frozenset({".jinja", ".json", ".model", ".safetensors", ".txt"})
"""Of the files that are read, or linked for loaders; code and pickles are not among them."""

_MAX_JSON_BYTES: Final = 64 * 1024 * 1024
_MAX_CONTAINERS: Final = 2_000_000  # three a tensor in a safetensors header
_MAX_LAYERS: Final = 10_000
_MAX_WIDTH: Final = 1 << 24

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
        raise ConfigError(
            f"{path}: model_type {repr(model_type)[:200]}, expected a name", field=str(path)
        )
    architectures = root.get("architectures") or []
    if not isinstance(architectures, list):
        raise ConfigError(
            f"{path}: architectures {repr(architectures)[:200]}, expected a list of names",
            field=str(path),
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
    raw = read_file(path, max_bytes)
    return parse_object(raw, path), raw


def read_file(path: Path, max_bytes: int) -> bytes:
    """Read a file of a model directory.

    Raises:
        ConfigError: absent, no regular file, or larger than `max_bytes`.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise ConfigError(f"{path}: not a regular file", field=str(path))
        with path.open("rb") as file:
            raw = file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", field=str(path)) from error
    if len(raw) > max_bytes:
        raise ConfigError(f"{path}: more than {max_bytes} bytes", field=str(path))
    return raw


def read_text(path: Path, max_bytes: int = _MAX_JSON_BYTES) -> str:
    """Read a text file of a model directory.

    Raises:
        ConfigError: as `read_file`, or not UTF-8.
    """
    try:
        return read_file(path, max_bytes).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: {error}", field=str(path)) from None


def check_files(directory: Path) -> None:
    """Check that what loaders read of a model directory are files, and the directory's own.

    A link may lead anywhere within the directory, and from a snapshot in the hub's cache to
    that cache's own blobs; elsewhere it could make any file of this machine part of a model.
    Call it for a directory that a user names, before anything of it is read.

    Raises:
        ConfigError: a pipe or device, or a link that leads out.
    """
    root = directory.resolve()
    homes = [root]
    if root.parent.name == "snapshots":
        homes.append(root.parent.parent / "blobs")
    for path in sorted(directory.iterdir()):
        if path.suffix not in READ_SUFFIXES or path.is_dir():
            continue
        real = path.resolve()
        if not any(real.is_relative_to(home) for home in homes):
            raise ConfigError(
                f"{path}: a link to {real}, which lies outside of the model's directory",
                field=str(path),
            )
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: not a regular file", field=str(path))


def parse_object(raw: bytes, path: Path) -> dict[str, Any]:
    """Parse a JSON object that came from `path`.

    Raises:
        ConfigError: no JSON in UTF-8, nested too deeply, a key that repeats, or another value.
    """
    try:
        check_nesting(raw, max_containers=_MAX_CONTAINERS)
        value = json.loads(raw.decode(), object_pairs_hook=_unique)
    except ValueError as error:
        raise ConfigError(f"{path}: not JSON: {error}", field=str(path)) from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"{path}: a JSON {type(value).__name__}, expected an object", field=str(path)
        )
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"the key {name[:200]!r} is there twice")
        values[name] = value
    return values


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
    most = _MAX_LAYERS if names is _NUM_LAYERS else _MAX_WIDTH
    if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= most:
        raise ConfigError(
            f"{path}: {names[0]} is {repr(found)[:200]}, expected a positive integer of at most"
            f" {most}",
            field=str(path),
        )
    return found
