"""A model directory's weights as files: index, safetensors headers, digest. Loads no tensor."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

from meshnet.errors import ConfigError
from meshnet.model_dir import CONFIG_FILE, parse_object, read_file, read_json

__all__ = [
    "INDEX_FILE",
    "WEIGHTS_FILE",
    "StoredTensor",
    "WeightIndex",
    "model_digest",
    "read_safetensors_header",
    "read_weight_index",
]

INDEX_FILE: Final = "model.safetensors.index.json"
WEIGHTS_FILE: Final = "model.safetensors"

_VOCABULARIES: Final = (("tokenizer.json",), ("tokenizer.model",), ("vocab.json", "merges.txt"))
_MAX_HEADER_BYTES: Final = 32 * 1024 * 1024
_MAX_VOCABULARY_BYTES: Final = 256 * 1024 * 1024
_MAX_DIMENSIONS: Final = 32
_PICKLES: Final = ("*.bin", "*.bin.index.json", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_WEIGHT_FILE: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
_ITEM_BYTES: Final = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
    "C64": 8,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in a safetensors file.

    Attributes:
        dtype: as the file writes it, for example ``BF16``.
        shape: row-major.
        start: offset of the first byte in the file.
        num_bytes: stored size.
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WeightIndex:
    """Which file holds which tensor.

    Attributes:
        weight_map: file name by tensor name; files lie in the model directory itself.
        identity: what of the index the model's digest covers.
    """

    weight_map: Mapping[str, str]
    identity: bytes


def read_weight_index(directory: Path) -> WeightIndex:
    """Read ``model.safetensors.index.json``, or the header of a lone ``model.safetensors``.

    The files that the index names need not be there.

    Raises:
        ConfigError: neither file is there, or one is malformed; names the file.
    """
    path = directory / INDEX_FILE
    if path.exists():
        value, raw = read_json(path)
        weight_map = value.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(
                f"{path}: weight_map is missing or empty, expected file names by tensor name",
                field=str(path),
            )
        for tensor, file in weight_map.items():
            # A path would let an index read, or link, files outside the model.
            if not isinstance(file, str) or _WEIGHT_FILE.fullmatch(file) is None:
                raise ConfigError(
                    f"{path}: tensor {tensor[:200]!r} is in {repr(file)[:200]}, expected the name"
                    " of a .safetensors file in the same directory",
                    field=str(path),
                )
        return WeightIndex(weight_map, raw)
    path = directory / WEIGHTS_FILE
    if not path.exists():
        pickled = next((name for kind in _PICKLES for name in sorted(directory.glob(kind))), None)
        hint = (
            f"; {pickled.name} may hold Python's pickle, which can run code, and is never read"
            if pickled is not None
            else ""
        )
        raise ConfigError(
            f"{directory}: no {INDEX_FILE} and no {WEIGHTS_FILE}: expected a model directory "
            f"with safetensors weights{hint}",
            field=str(directory),
        )
    header = read_safetensors_header(path)
    shapes = {name: [tensor.dtype, list(tensor.shape)] for name, tensor in sorted(header.items())}
    return WeightIndex(
        dict.fromkeys(header, WEIGHTS_FILE), json.dumps(shapes, separators=(",", ":")).encode()
    )


def read_safetensors_header(path: Path) -> dict[str, StoredTensor]:
    """Read and check the header of a safetensors file, tensors by name.

    Raises:
        ConfigError: the header's length, a shape or an offset does not fit the file, or the
            tensors overlap or leave bytes between them.

    Source: safetensors, README, "Format".
    """
    try:
        with path.open("rb") as file:
            file_bytes = path.stat().st_size
            prefix = file.read(8)
            length = int.from_bytes(prefix, "little")
            limit = min(_MAX_HEADER_BYTES, file_bytes - 8)
            if len(prefix) < 8 or length > limit:
                raise ConfigError(
                    f"{path}: safetensors header of {length} bytes, expected at most "
                    f"{max(limit, 0)} in a file of {file_bytes}",
                    field=str(path),
                )
            raw = file.read(length)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}", field=str(path)) from error
    value = parse_object(raw, path)
    value.pop("__metadata__", None)
    data_start = 8 + length
    tensors = {
        name: _stored_tensor(name, entry, data_start, file_bytes - data_start, path)
        for name, entry in value.items()
    }
    _check_contiguous(tensors, data_start, file_bytes, path)
    return tensors


def model_digest(directory: Path) -> str:
    """Give the SHA-256 in hex that every holder of a part of this model computes alike.

    It covers ``config.json`` and the vocabulary (``tokenizer.json``, or the older files in its
    place) byte for byte, and the weight index: the published index file byte for byte, or for
    a lone weight file the names, dtypes and shapes of its header. The values of the weights
    are not covered, so a node need not hold, or read, files of layers that it does not serve.

    Raises:
        ConfigError: a file is missing or malformed.
    """
    parts = {CONFIG_FILE: read_json(directory / CONFIG_FILE)[1]}
    for names in _VOCABULARIES:
        paths = [directory / name for name in names]
        if all(path.is_file() for path in paths):
            parts.update({path.name: read_file(path, _MAX_VOCABULARY_BYTES) for path in paths})
            break
    parts["weights"] = read_weight_index(directory).identity
    digest = hashlib.sha256()
    for name, content in parts.items():
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()


def _check_contiguous(
    tensors: Mapping[str, StoredTensor], data_start: int, file_bytes: int, path: Path
) -> None:
    """Check that each byte of the data is of one tensor."""
    end = data_start
    for name, tensor in sorted(
        tensors.items(), key=lambda item: (item[1].start, item[1].num_bytes)
    ):
        if tensor.start != end:
            what = "overlaps the one before it" if tensor.start < end else "leaves bytes before it"
            raise ConfigError(
                f"{path}: tensor {name[:200]!r} at offset {tensor.start} {what}, expected {end}",
                field=str(path),
            )
        end += tensor.num_bytes
    if end != file_bytes:
        raise ConfigError(
            f"{path}: tensors end at offset {end}, the file at {file_bytes}", field=str(path)
        )


def _stored_tensor(
    name: str, entry: object, data_start: int, data_bytes: int, path: Path
) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)]}:
            item_bytes = _ITEM_BYTES.get(dtype)
            sizes_ok = len(shape) <= _MAX_DIMENSIONS and all(
                type(size) is int and 0 <= size < 1 << 63 for size in shape
            )
            if (
                item_bytes is not None
                and sizes_ok
                and 0 <= start <= end <= data_bytes
                and end - start == prod(shape) * item_bytes
            ):
                return StoredTensor(dtype, tuple(shape), data_start + start, end - start)
        case _:
            pass
    raise ConfigError(
        f"{path}: tensor {name[:200]!r} is declared as {str(entry)[:200]}, which does not fit "
        f"{data_bytes} bytes of data",
        field=str(path),
    )
