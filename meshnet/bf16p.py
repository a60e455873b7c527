"""bfloat16 bodies split into planes: exponents entropy-coded, the rest as it is (pure).

Of a bfloat16's 16 bits only the exponent's eight shrink: sign and mantissa are close to random
on real activations (7.8 to 8.0 bits). One zstd frame over whole values codes both in the same
blocks and gains 1.27; apart, the exponents alone gain about 1.48. Matches in the exponents'
plane are chance and cost more than literals, so the encoder is set to find hardly any.

Everything that a body says is checked against the tensor's size before memory is taken.

Source: proto/WIRE.md, Bodies.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from meshnet.dtypes import Body
from meshnet.zstd import check_frame, compress_frame, decompress_frame

if TYPE_CHECKING:
    import zstandard

__all__ = ["Bf16pCodec"]

_MAGIC: Final = b"BFP1"
_VERSION: Final = 1
_HAS_BASE: Final = 1
_BLOCK_LOG: Final = 17
_HEADER: Final = struct.Struct("<4sBBHII")
_LENGTHS: Final = struct.Struct("<II")
_STEP: Final = 1 << 16
"""Values worked on at a time, so that the temporaries stay in cache."""

_BASE_MIN_ROWS: Final = 64
"""Fewer rows do not earn back the base's own bytes and the time to choose it."""
_SAMPLED_ROWS: Final = 32
_SAMPLED_VALUES: Final = 1024
_MAX_COLLISIONS: Final = 1 / 150
"""Two random bytes are equal 1 time in 256; above this the second plane is worth a frame."""

_U8 = npt.NDArray[np.uint8]
_U16 = npt.NDArray[np.uint16]


class Bf16pCodec:
    """The encoding ``bf16p``, version 1."""

    def compress(self, data: Body, level: int, width: int | None) -> Body:
        """Encode the bfloat16 rows in `data`, each of `width` values.

        Args:
            data: whole rows, read in place.
            level: 0 leaves out the base, which holds the scale of each channel: up to a
                quarter less time, and bodies up to 4 % longer. All others write it where
                there are 64 rows or more.
            width: values in a row; None for tensors of other dtypes, which have no planes.

        Raises:
            ValueError: no `width`, or `data` is not whole rows of it.
            ImportError: zstandard is not installed.
            MemoryError: no memory for the encoder.
        """
        values = _rows(data, width)
        space = _take_space()
        try:
            return _encode(values, space, with_base=level > 0 and len(values) >= _BASE_MIN_ROWS)
        finally:
            _idle_spaces.append(space)

    def decompress(self, body: memoryview, max_bytes: int, width: int | None) -> Body:
        """Decode the whole of `body`, rows of `width` values, at most `max_bytes` bytes.

        Raises:
            ValueError: no `width`, another width or more rows than fit, malformed,
                truncated or trailing bytes.
            ImportError: zstandard is not installed.
        """
        if width is None:
            raise ValueError("holds bfloat16 tensors only; expected X-Meshnet-Dtype: bfloat16")
        layout = _walk(body, max_bytes, width)
        out = np.empty((layout.num_rows, width), np.uint16)
        space = _take_space()
        try:
            for block in layout.blocks:
                rows = out[block.first_row : block.first_row + layout.rows_per_block]
                _decode_block(body, block, layout.base, rows, space)
        finally:
            _idle_spaces.append(space)
        return out.reshape(-1).view(np.uint8).data


class _Space:
    """Temporaries of one call, of fixed size, and its encoder."""

    def __init__(self) -> None:
        import zstandard

        parameters = zstandard.ZstdCompressionParameters(
            window_log=17,
            hash_log=6,
            chain_log=6,
            search_log=1,
            min_match=7,
            target_length=0,
            strategy=zstandard.STRATEGY_FAST,
            write_checksum=True,
        )
        self.exponents: zstandard.ZstdCompressor = zstandard.ZstdCompressor(
            compression_params=parameters
        )
        self.rest: zstandard.ZstdCompressor = zstandard.ZstdCompressor(level=1, write_checksum=True)
        self.wide: _U16 = np.empty(_STEP, np.uint16)
        self.wide2: _U16 = np.empty(_STEP, np.uint16)
        self._plane: _U8 = np.empty(1 << _BLOCK_LOG, np.uint8)

    def plane(self, num_values: int) -> _U8:
        """Give memory for a block's plane; only a row over 2^17 values needs new memory."""
        if num_values <= self._plane.size:
            return self._plane[:num_values]
        return np.empty(num_values, np.uint8)


_idle_spaces: list[_Space] = []
"""Those that no call uses now; see `meshnet.zstd` on sharing contexts between threads."""


def _take_space() -> _Space:
    try:
        return _idle_spaces.pop()
    except IndexError:
        return _Space()


class _Block(NamedTuple):
    """Where a block's planes lie in the body; `rest_is_frame` tells how the second is coded."""

    first_row: int
    exponents: slice
    rest: slice
    rest_is_frame: bool


class _Layout(NamedTuple):
    """What the headers of a body prove; every frame is whole and of its plane's size."""

    num_rows: int
    rows_per_block: int
    base: _U8 | None
    blocks: list[_Block]


def _rows(data: Body, width: int | None) -> _U16:
    if width is None:
        raise ValueError("bf16p encodes bfloat16 tensors only")
    num_bytes = memoryview(data).nbytes
    if width < 1 or num_bytes % (2 * width):
        raise ValueError(f"{num_bytes} bytes; expected whole rows of {width} bfloat16 values")
    return np.frombuffer(data, np.uint16).reshape(-1, width)


def _rows_per_block(width: int) -> int:
    return max(1, (1 << _BLOCK_LOG) // width)


def _encode(values: _U16, space: _Space, *, with_base: bool) -> memoryview:
    """Write header, base and blocks into one buffer; gives the part of it that was used."""
    num_rows, width = values.shape
    step = _rows_per_block(width)
    num_blocks = -(-num_rows // step)
    out = np.empty(
        _HEADER.size + width + 2 * values.size + values.size // 64 + 128 * num_blocks, "u1"
    )
    view = out.data
    _HEADER.pack_into(
        view, 0, _MAGIC, _VERSION, _HAS_BASE if with_base else 0, _BLOCK_LOG, num_rows, width
    )
    at = _HEADER.size
    base: _U8 | None = None
    if with_base:
        base = out[at : at + width]
        base[:] = _choose_base(values)
        at += width
    rest_shrinks = _rest_shrinks(values)
    for row in range(0, num_rows, step):
        block = values[row : row + step].reshape(-1)
        plane = space.plane(block.size)
        _take_exponents(block, base, plane, space)
        frame = compress_frame(space.exponents, plane.data)
        lengths_at, at = at, at + _LENGTHS.size
        view[at : at + len(frame)] = frame
        at += len(frame)
        rest = out[at : at + block.size]
        _take_rest(block, rest, space)
        rest_length = 0
        if rest_shrinks:
            rest_frame = compress_frame(space.rest, rest.data)
            if len(rest_frame) < block.size:
                rest_length = len(rest_frame)
                view[at : at + rest_length] = rest_frame
        _LENGTHS.pack_into(view, lengths_at, len(frame), rest_length)
        at += rest_length or block.size
    return view[:at]


def _take_exponents(block: _U16, base: _U8 | None, plane: _U8, space: _Space) -> None:
    """Write the exponent of each value, or how far it lies under its channel's base."""
    for start in range(0, block.size, _STEP):
        part = block[start : start + _STEP]
        wide = space.wide[: part.size]
        np.right_shift(part, 7, out=wide)
        np.copyto(plane[start : start + part.size], wide, casting="unsafe")
    if base is not None:
        rows = plane.reshape(-1, base.size)
        np.subtract(base, rows, out=rows)


def _take_rest(block: _U16, rest: _U8, space: _Space) -> None:
    """Write the sign and the mantissa of each value: bit 7, bits 6 to 0."""
    for start in range(0, block.size, _STEP):
        part = block[start : start + _STEP]
        wide, sign = space.wide[: part.size], space.wide2[: part.size]
        np.bitwise_and(part, 0x807F, out=wide)
        np.right_shift(wide, 8, out=sign)
        np.bitwise_or(wide, sign, out=wide)
        np.copyto(rest[start : start + part.size], wide, casting="unsafe")


def _choose_base(values: _U16) -> _U8:
    """Give the exponent of each channel's scale, from at most 96 rows.

    The greatest magnitude in each third of the tensor; of the three, the middle one: a token
    with outliers, as the first of a prompt, lies in one third only.
    """
    third = len(values) // 3
    stride = max(1, third // _SAMPLED_ROWS)
    first, second, last = (
        np.maximum.reduce(values[start : start + third : stride][:_SAMPLED_ROWS] & 0x7FFF, axis=0)
        for start in (0, third, 2 * third)
    )
    low, high = np.minimum(first, second), np.maximum(first, second)
    middle = np.maximum(low, np.minimum(high, last))
    base: _U8 = (middle >> 7).astype(np.uint8)
    return base


def _rest_shrinks(values: _U16) -> bool:
    """Tell by equal pairs among a sample whether signs and mantissas are far from random.

    They are in padded, sparse or coarsely quantised tensors.
    """
    if values.size < 4 * _SAMPLED_VALUES:
        return False
    # An odd stride visits every channel of an even width.
    sample = values.reshape(-1)[:: values.size // _SAMPLED_VALUES | 1][:_SAMPLED_VALUES]
    counts = np.bincount(sample >> 8 & 0x80 | sample & 0x7F, minlength=256)
    size = sample.size
    return int(counts @ counts) - size > _MAX_COLLISIONS * size * (size - 1)


def _walk(body: memoryview, max_bytes: int, width: int) -> _Layout:
    """Check all headers of `body`; see `Bf16pCodec.decompress`."""
    flags, num_rows = _check_header(body, max_bytes, width)
    at = _HEADER.size
    base = None
    if flags & _HAS_BASE:
        base = np.frombuffer(_part(body, at, width), np.uint8)
        at += width
    step = _rows_per_block(width)
    blocks = []
    for row in range(0, num_rows, step):
        num_values = min(step, num_rows - row) * width
        exponents_length, rest_length = _LENGTHS.unpack(_part(body, at, _LENGTHS.size))
        at += _LENGTHS.size
        exponents = slice(at, at + exponents_length)
        check_frame(_part(body, at, exponents_length), num_values)
        at += exponents_length
        rest = slice(at, at + (rest_length or num_values))
        part = _part(body, at, rest_length or num_values)
        if rest_length:
            check_frame(part, num_values)
        at = rest.stop
        blocks.append(_Block(row, exponents, rest, rest_length > 0))
    if at != len(body):
        raise ValueError(f"{len(body) - at} bytes after the last block, at byte {at}")
    return _Layout(num_rows, step, base, blocks)


def _check_header(body: memoryview, max_bytes: int, width: int) -> tuple[int, int]:
    """Check the header; gives its flags and the number of rows."""
    magic, version, flags, block_log, num_rows, stated_width = _HEADER.unpack(
        _part(body, 0, _HEADER.size)
    )
    if magic != _MAGIC or version != _VERSION:
        raise ValueError(
            f"begins with {magic!r}, version {version}; expected {_MAGIC!r}, version {_VERSION}"
        )
    if flags & ~_HAS_BASE:
        raise ValueError(f"flags {flags:#04x}; expected 0 or 1")
    if block_log != _BLOCK_LOG:
        raise ValueError(f"blocks of 2^{block_log} values; expected 2^{_BLOCK_LOG}")
    if stated_width != width:
        raise ValueError(f"states rows of {stated_width} values; expected {width}, as the shape")
    if 2 * num_rows * width > max_bytes:
        raise ValueError(
            f"states {num_rows} rows, {2 * num_rows * width} bytes; expected at most {max_bytes}"
        )
    return flags, num_rows


def _part(body: memoryview, at: int, length: int) -> memoryview:
    part = body[at : at + length]
    if len(part) != length:
        raise ValueError(f"ends after {len(body)} bytes; expected at least {at + length}")
    return part


def _decode_block(
    body: memoryview, block: _Block, base: _U8 | None, rows: _U16, space: _Space
) -> None:
    """Put a block's planes together in `rows`, its part of the tensor."""
    values = rows.reshape(-1)
    exponents = _plane(body[block.exponents], values.size)
    if base is not None:
        plane = space.plane(values.size)
        np.subtract(base, exponents.reshape(rows.shape), out=plane.reshape(rows.shape))
        exponents = plane
    rest = body[block.rest]
    # Signed, so that widening repeats the sign, which then stands in bit 15 too.
    signed = (
        _plane(rest, values.size) if block.rest_is_frame else np.frombuffer(rest, np.uint8)
    ).view(np.int8)
    for start in range(0, values.size, _STEP):
        part = values[start : start + _STEP]
        wide = space.wide[: part.size]
        np.copyto(part.view(np.int16), signed[start : start + part.size])
        np.bitwise_and(part, 0x807F, out=part)
        np.copyto(wide, exponents[start : start + part.size])
        np.left_shift(wide, 7, out=wide)
        np.bitwise_or(part, wide, out=part)


def _plane(frame: memoryview, num_values: int) -> npt.NDArray[Any]:
    return np.frombuffer(decompress_frame(frame, num_values), np.uint8)
