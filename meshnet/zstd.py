"""zstd bodies, decoded strictly and in bounded memory (pure).

Nothing that a body says of itself is believed. Its frame and block headers are walked
first, at about a microsecond for each 128 KiB block and a few for each frame: that proves
every frame whole and every declared size and window within the bound, which the library
alone does not (it ignores its output limit where a frame declares a size, passes truncated
and trailing bytes over in silence, and takes a declared window as memory to reserve). Only
then is memory taken.

Source: RFC 8878; proto/WIRE.md, Bodies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from meshnet.dtypes import Body

if TYPE_CHECKING:
    import zstandard

__all__ = ["MAX_LEVEL", "ZstdCodec", "check_frame", "compress_frame", "decompress_frame"]

MAX_LEVEL: Final = 22
"""Highest level. Negative ones are refused: they switch off the entropy coding of literals,
which is all that shrinks activations (measured ratio: 1.000)."""

_MAGIC: Final = 0xFD2FB528
_SKIPPABLE_MAGIC: Final = 0x184D2A50  # to 0x184D2A5F
_MAX_BLOCK_BYTES: Final = 128 * 1024
_MIN_WINDOW_LIMIT: Final = 8 * 1024 * 1024  # RFC 8878 §3.1.1.1.2: a decoder should take 8 MB
_RAW, _RLE, _COMPRESSED = range(3)


class ZstdCodec:
    """One or more zstd frames whose content, concatenated, is the body's."""

    def compress(self, data: Body, level: int, _width: int | None = None) -> bytes:
        """Encode `data` as one frame that states its size and carries a checksum.

        The checksum costs 6 % of the encoder's time and turns a flipped bit into an error.

        Raises:
            ValueError: `level` is not 0 to `MAX_LEVEL`; 0 is zstd's default, 3.
            ImportError: zstandard is not installed.
            MemoryError: no memory for the encoder.
        """
        if not 0 <= level <= MAX_LEVEL:
            raise ValueError(f"zstd level {level}; expected 0 to {MAX_LEVEL}")
        compressor = _take_compressor(level)
        try:
            return compress_frame(compressor, data)
        finally:
            _idle_compressors[level].append(compressor)

    def decompress(self, body: memoryview, max_bytes: int, _width: int | None = None) -> Body:
        """Decode every frame of `body`, at most `max_bytes` bytes in all.

        Raises:
            ValueError: malformed, truncated, trailing or too many bytes, a window over the
                greater of 8 MiB and `max_bytes`, a dictionary, or more than
                4096 + max_bytes / 1024 blocks and frames.
            ImportError: zstandard is not installed.
        """
        import zstandard

        extent = _walk(body, max_bytes)
        if extent.single_size:
            return decompress_frame(body, extent.single_size)
        try:
            return _stream(body, min(extent.max_bytes, max_bytes), extent.window)
        except zstandard.ZstdError as error:
            raise ValueError(str(error)) from None


def compress_frame(compressor: zstandard.ZstdCompressor, data: Body) -> bytes:
    """Encode `data` as one frame with a context that no other thread uses.

    Raises:
        MemoryError: no memory for the encoder.
    """
    import zstandard

    try:
        return compressor.compress(data)
    except zstandard.ZstdError as error:
        raise MemoryError(str(error)) from error


def check_frame(body: memoryview, num_bytes: int) -> None:
    """Check, by its headers alone, that `body` is one whole frame that states `num_bytes` > 0.

    Raises:
        ValueError: it is not.
    """
    stated = _walk(body, num_bytes).single_size
    if stated != num_bytes:
        raise ValueError(
            f"a plane's frame states {stated} bytes; expected one frame of {num_bytes}"
        )


def decompress_frame(body: memoryview, num_bytes: int) -> bytes:
    """Decode a frame that `check_frame` has found good.

    Raises:
        ValueError: its content is malformed.
        ImportError: the decoder is not installed.
    """
    import zstandard

    try:
        return _decompress_single(body, num_bytes)
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None


_idle_compressors: dict[int, list[zstandard.ZstdCompressor]] = {}
_idle_decompressors: list[zstandard.ZstdDecompressor] = []
"""Contexts that no call uses now. One used by two threads at once gives wrong bytes or a
crash, so a call takes one out (`list.pop` is atomic) and puts it back. Made anew each time
they would cost 15 to 20 microseconds, several times the work on a one-token body."""


def _take_compressor(level: int) -> zstandard.ZstdCompressor:
    try:
        return _idle_compressors.setdefault(level, []).pop()
    except IndexError:
        import zstandard

        return zstandard.ZstdCompressor(level=level, write_checksum=True)


def _decompress_single(body: memoryview, num_bytes: int) -> bytes:
    """Decode one whole frame that states `num_bytes`; no window is allocated for it."""
    try:
        decompressor = _idle_decompressors.pop()
    except IndexError:
        import zstandard

        decompressor = zstandard.ZstdDecompressor()
    try:
        return decompressor.decompress(body, max_output_size=num_bytes, allow_extra_data=False)
    finally:
        _idle_decompressors.append(decompressor)


def _stream(body: memoryview, capacity: int, window: int) -> bytearray:
    """Decode frames of any kind, none wider than `window`, into one buffer of `capacity` bytes.

    The decompressor is not kept: it would hold on to its window.
    """
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=max(window, _MIN_WINDOW_LIMIT))
    out = bytearray(capacity)
    num_bytes = 0
    with (
        memoryview(out) as view,
        decompressor.stream_reader(body, read_across_frames=True) as reader,
    ):
        while num_bytes < capacity:
            got = reader.readinto(view[num_bytes:])
            if not got:
                break
            num_bytes += got
        # Also drives the decoder past the last frame's checksum.
        if reader.read(1):
            raise ValueError(f"decodes to more than {capacity} bytes; expected at most {capacity}")
    del out[num_bytes:]
    return out


@dataclass(slots=True)
class _Extent:
    """What the headers of a body's frames prove.

    Attributes:
        max_bytes: no more than this can come out.
        min_bytes: no fewer than this can come out.
        window: the widest window, in bytes.
        single_size: content size where the body is one frame that states it, else 0.
    """

    max_bytes: int = 0
    min_bytes: int = 0
    window: int = 0
    single_size: int = 0


class _Cursor:
    """Reads little-endian numbers from a body; an end before its time is a ValueError."""

    def __init__(self, body: memoryview, max_parts: int) -> None:
        self._body = body
        self._parts_left = max_parts
        self.offset = 0

    def at_end(self) -> bool:
        return self.offset == len(self._body)

    def number(self, num_bytes: int) -> int:
        start = self.offset
        self.skip(num_bytes)
        return int.from_bytes(self._body[start : self.offset], "little")

    def skip(self, num_bytes: int) -> None:
        if num_bytes > len(self._body) - self.offset:
            raise ValueError(
                f"ends within a frame, after {len(self._body)} bytes; expected at least"
                f" {self.offset + num_bytes}"
            )
        self.offset += num_bytes

    def count_part(self) -> None:
        if self._parts_left == 0:
            raise ValueError(f"too many blocks and frames by byte {self.offset}")
        self._parts_left -= 1


def _walk(body: memoryview, max_bytes: int) -> _Extent:
    """Check all frame and block headers of `body`; see `ZstdCodec.decompress`."""
    extent = _Extent()
    cursor = _Cursor(body, 4096 + max_bytes // 1024)
    while not cursor.at_end():
        is_first = cursor.offset == 0
        cursor.count_part()
        magic = cursor.number(4)
        if magic & ~0xF == _SKIPPABLE_MAGIC:
            cursor.skip(cursor.number(4))
            continue
        if magic != _MAGIC:
            raise ValueError(
                f"no zstd frame at byte {cursor.offset - 4}: {magic:#010x}; expected {_MAGIC:#x}"
            )
        stated = _walk_frame(cursor, extent, max_bytes)
        if is_first and cursor.at_end() and stated is not None:
            extent.single_size = stated
    return extent


def _walk_frame(cursor: _Cursor, extent: _Extent, max_bytes: int) -> int | None:
    """Check one frame after its magic number and add it to `extent`; gives its stated size."""
    descriptor = cursor.number(1)
    if descriptor & 0x08:
        raise ValueError(f"reserved bit set in the frame header at byte {cursor.offset - 1}")
    single_segment = bool(descriptor & 0x20)
    window = 0 if single_segment else _window(cursor.number(1))
    if cursor.number((0, 1, 2, 4)[descriptor & 3]):
        raise ValueError("a frame needs a dictionary; expected none")
    size_bytes = (1 if single_segment else 0, 2, 4, 8)[descriptor >> 6]
    stated: int | None = None
    if size_bytes:
        stated = cursor.number(size_bytes) + (256 if size_bytes == 2 else 0)
        _check_total(extent.min_bytes + stated, max_bytes, "states")
        window = stated if single_segment else window
    if window > max(_MIN_WINDOW_LIMIT, max_bytes):
        raise ValueError(
            f"a frame needs a window of {window} bytes; expected at most"
            f" {max(_MIN_WINDOW_LIMIT, max_bytes)}"
        )
    extent.window = max(extent.window, window)
    least, most = _walk_blocks(cursor, extent.min_bytes, max_bytes)
    if stated is not None:
        if not least <= stated <= most:
            raise ValueError(f"a frame states {stated} bytes; its blocks hold {least} to {most}")
        least = most = stated
    extent.min_bytes += least
    extent.max_bytes += most
    if descriptor & 0x04:
        cursor.skip(4)  # the checksum, which the decoder verifies
    return stated


def _walk_blocks(cursor: _Cursor, before: int, max_bytes: int) -> tuple[int, int]:
    """Check a frame's blocks; gives the fewest and the most bytes they can decode to."""
    least = most = 0
    is_last = False
    while not is_last:
        cursor.count_part()
        header = cursor.number(3)
        is_last = bool(header & 1)
        kind, size = header >> 1 & 3, header >> 3
        if kind > _COMPRESSED or size > _MAX_BLOCK_BYTES:
            raise ValueError(
                f"block header {header:#08x} at byte {cursor.offset - 3}: expected raw, RLE or"
                f" compressed, at most {_MAX_BLOCK_BYTES} bytes"
            )
        cursor.skip(1 if kind == _RLE else size)
        if kind == _COMPRESSED:
            most += _MAX_BLOCK_BYTES
        else:
            least += size
            most += size
            _check_total(before + least, max_bytes, "decodes to")
    return least, most


def _check_total(num_bytes: int, max_bytes: int, verb: str) -> None:
    if num_bytes > max_bytes:
        raise ValueError(f"{verb} {num_bytes} bytes or more; expected at most {max_bytes}")


def _window(descriptor: int) -> int:
    base = 1 << 10 + (descriptor >> 3)
    return base + (base >> 3) * (descriptor & 7)
