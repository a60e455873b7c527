"""The header of a GGUF file: metadata and tensor table, every length checked against the file.

Only what an import decides by is kept. Reading the values again through a library is safe
once `read_header` has passed: the libraries trust the counts that it checks.

Source: ggml, docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Final

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from meshnet.errors import ConfigError

__all__ = ["GgufHeader", "GgufTensor", "read_header"]

_MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_DEFAULT_ALIGNMENT: Final = 32
_MAX_DIMS: Final = 4  # GGML_MAX_DIMS
_MAX_TENSOR_ELEMENTS: Final = 1 << 48
_MAX_STRING_BYTES: Final = 16 * 1024 * 1024
_MAX_ENTRIES: Final = 100_000  # of metadata, and of tensors
_MAX_ARRAY: Final = 4_000_000  # a vocabulary's merges are some hundred thousand
_MAX_SHOWN: Final = 80
_SCALARS: Final = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING: Final = 8
_ARRAY: Final = 9

_Scalar = int | float | bool | str


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Where one tensor lies.

    Attributes:
        name: ggml's name, for example ``blk.0.attn_q.weight``.
        shape: row-major, so reversed from the file's order.
        type: how the elements are stored.
        start: offset of the first byte in the file.
        num_bytes: stored size.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What the file declares.

    Attributes:
        architecture: ``general.architecture``.
        metadata: scalar values and strings by key; arrays are left out.
        tensors: in the file's order.
    """

    architecture: str
    metadata: dict[str, _Scalar]
    tensors: tuple[GgufTensor, ...]


class _Reader:
    """Reads forward through a mapped file, never past its end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._path = path
        self.position = 0

    def error(self, what: str) -> ConfigError:
        return ConfigError(f"{self._path}: {what}", field=str(self._path))

    def skip(self, num_bytes: int) -> int:
        """Pass over `num_bytes` and give where they began."""
        start = self.position
        if num_bytes > len(self._data) - start:
            raise self.error(
                f"truncated GGUF file: {num_bytes} bytes expected at offset {start}, "
                f"the file ends at {len(self._data)}"
            )
        self.position = start + num_bytes
        return start

    def scalar(self, form: str) -> int | float | bool:
        start = self.skip(struct.calcsize(form))
        value: int | float | bool = struct.unpack_from(form, self._data, start)[0]
        return value

    def count(self, form: str = "<Q") -> int:
        return int(self.scalar(form))

    def bounded(self, most: int, what: str) -> int:
        """Read a count, refusing one that would make others allocate without end."""
        count = self.count()
        if count > most:
            raise self.error(
                f"{count} {what} at offset {self.position - 8}, expected at most {most}"
            )
        return count

    def string(self) -> str:
        num_bytes = self.bounded(_MAX_STRING_BYTES, "bytes of a string")
        start = self.skip(num_bytes)
        try:
            return self._data[start : start + num_bytes].decode("utf-8")
        except UnicodeDecodeError:
            raise self.error(f"string at offset {start} is not UTF-8") from None

    def value(self) -> _Scalar | None:
        """Read one metadata value; arrays are passed over and give None."""
        kind = self.count("<I")
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise self.error(f"metadata value of type {kind}, expected a GGUF type 0 to 12")
        element, length = self.count("<I"), self.bounded(_MAX_ARRAY, "elements of an array")
        if element in _SCALARS:
            self.skip(length * struct.calcsize(_SCALARS[element]))
        elif element == _STRING:
            # Each string takes 8 bytes at least: a false length ends at the end of the file.
            for _ in range(length):
                self.skip(self.count())
        else:
            raise self.error(
                f"metadata array of element type {element}, expected scalars or strings"
            )
        return None


def read_header(path: Path) -> GgufHeader:
    """Read and check the header, and that the file holds every tensor it declares.

    Raises:
        ConfigError: not a GGUF file, truncated, or with a type that gguf does not know.
    """
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path}: not a regular file", field=str(path))
    try:
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise ConfigError(
                    f"{path}: not a GGUF file (the first four bytes are not 'GGUF')",
                    field=str(path),
                )
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(_Reader(data, path), len(data))
    except OSError as error:
        raise ConfigError(f"{path}: cannot read: {error.strerror}", field=str(path)) from error


def _parse(reader: _Reader, file_bytes: int) -> GgufHeader:
    reader.skip(4)
    version = reader.count("<I")
    if version not in _VERSIONS:
        raise reader.error(f"GGUF version {version}, expected 2 or 3 (little-endian)")
    num_tensors = reader.bounded(_MAX_ENTRIES, "tensors")
    num_values = reader.bounded(_MAX_ENTRIES, "metadata values")
    metadata: dict[str, _Scalar] = {}
    for _ in range(num_values):
        key = reader.string()
        value = reader.value()
        if key in metadata:
            raise reader.error(f"metadata key {key[:_MAX_SHOWN]!r} is there twice")
        if value is not None:
            metadata[key] = value
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise reader.error("no general.architecture in the metadata")
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
        raise reader.error(
            f"general.alignment {repr(alignment)[:_MAX_SHOWN]}, expected a power of two"
        )
    table = [_table_entry(reader) for _ in range(num_tensors)]
    names = {name for name, *_ in table}
    if len(names) != len(table):
        raise reader.error(f"{len(table) - len(names)} tensor names are used twice")
    data_start = -(-reader.position // alignment) * alignment
    tensors = []
    for name, shape, kind, offset in table:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        if prod(shape) > _MAX_TENSOR_ELEMENTS or shape[-1] % block:
            raise reader.error(
                f"tensor {name[:_MAX_SHOWN]!r}: shape {shape} does not fit type {kind.name}"
            )
        tensor = GgufTensor(
            name, shape, kind, data_start + offset, prod(shape) // block * block_bytes
        )
        if tensor.start + tensor.num_bytes > file_bytes:
            raise reader.error(
                f"truncated GGUF file: tensor {name[:_MAX_SHOWN]!r} ends at offset "
                f"{tensor.start + tensor.num_bytes}, the file at {file_bytes}"
            )
        tensors.append(tensor)
    _check_apart(tensors, reader)
    return GgufHeader(architecture, metadata, tuple(tensors))


def _check_apart(tensors: list[GgufTensor], reader: _Reader) -> None:
    """Refuse tensors that share bytes."""
    end, before = 0, ""
    for tensor in sorted(tensors, key=lambda item: (item.start, item.num_bytes)):
        if tensor.start < end and tensor.num_bytes:
            raise reader.error(
                f"tensor {tensor.name[:_MAX_SHOWN]!r} at offset {tensor.start} overlaps"
                f" {before[:_MAX_SHOWN]!r}, which ends at {end}"
            )
        end, before = max(end, tensor.start + tensor.num_bytes), tensor.name


def _table_entry(reader: _Reader) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
    name = reader.string()
    num_dims = reader.count("<I")
    if not 1 <= num_dims <= _MAX_DIMS:
        raise reader.error(
            f"tensor {name[:_MAX_SHOWN]!r}: {num_dims} dimensions, expected 1 to {_MAX_DIMS}"
        )
    shape = tuple(reversed([reader.count() for _ in range(num_dims)]))
    number = reader.count("<I")
    try:
        kind = GGMLQuantizationType(number)
    except ValueError:
        raise reader.error(f"tensor {name[:_MAX_SHOWN]!r}: unknown ggml type {number}") from None
    return name, shape, kind, reader.count()
