"""Bytes put aside in one temporary file that has no name, in blocks, under a bound."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Final

from meshnet.dtypes import Body

__all__ = ["Extent", "SpillFile"]

_BLOCK_BYTES: Final = 64 * 1024


class Extent:
    """One owner's bytes in the file: a run of them, over blocks anywhere.

    Attributes:
        length: bytes held.
    """

    __slots__ = ("blocks", "length")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.length = 0


class SpillFile:
    """A file of blocks that extents take and give back. Not for several threads at once.

    It is made with the first byte, readable by this user alone and without a name, so that
    nothing of it stays behind however the process ends.

    Args:
        directory: for the file; None is the system's for temporary files.
        max_bytes: of the file.
    """

    def __init__(self, directory: Path | None, max_bytes: int) -> None:
        self._directory = directory
        self._max_blocks = max_bytes // _BLOCK_BYTES
        self._file: IO[bytes] | None = None
        self._free: list[int] = []
        self._num_blocks = 0

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that extents hold."""
        return (self._num_blocks - len(self._free)) * _BLOCK_BYTES

    def has_room(self, extent: Extent, num_bytes: int) -> bool:
        """Tell whether `num_bytes` more fit behind what `extent` holds."""
        more = _blocks(extent.length + num_bytes) - len(extent.blocks)
        return more <= len(self._free) + self._max_blocks - self._num_blocks

    def append(self, extent: Extent, pieces: Sequence[Body]) -> None:
        """Write `pieces` behind what `extent` holds; there must be room.

        Raises:
            OSError: the file cannot be made or written; the extent is as before then.
        """
        if self._file is None:
            # Lives as long as this object, so that no `with` block could hold it.
            self._file = tempfile.TemporaryFile(  # noqa: SIM115
                prefix="meshnet-journal-", dir=self._directory, buffering=0
            )
        data = b"".join(pieces)
        before = extent.length
        self._grow(extent, before + len(data))
        try:
            for start, end, place in _spans(extent, before, before + len(data)):
                _write_all(self._file.fileno(), data[start - before : end - before], place)
        except OSError:
            self.cut(extent, before)
            raise

    def read(self, extent: Extent, start: int, end: int) -> bytearray:
        """Read bytes `start` to `end` of what `extent` holds.

        Raises:
            OSError: the file cannot be read.
        """
        if self._file is None or not start <= end <= extent.length:
            raise ValueError(f"bytes {start} to {end} of an extent of {extent.length}")
        data = bytearray(end - start)
        view = memoryview(data)
        for first, last, place in _spans(extent, start, end):
            _read_all(self._file.fileno(), view[first - start : last - start], place)
        return data

    def cut(self, extent: Extent, length: int) -> None:
        """Forget what `extent` holds from `length` on; blocks that it needs no more are free."""
        extent.length = min(extent.length, length)
        kept = _blocks(extent.length)
        self._free += extent.blocks[kept:]
        del extent.blocks[kept:]
        if self._file is not None and len(self._free) == self._num_blocks:
            os.ftruncate(self._file.fileno(), 0)
            self._free.clear()
            self._num_blocks = 0

    def close(self) -> None:
        """Give the file back."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _grow(self, extent: Extent, length: int) -> None:
        for _ in range(_blocks(length) - len(extent.blocks)):
            if self._free:
                extent.blocks.append(self._free.pop())
            else:
                extent.blocks.append(self._num_blocks)
                self._num_blocks += 1
        extent.length = length


def _blocks(num_bytes: int) -> int:
    return -(-num_bytes // _BLOCK_BYTES)


def _spans(extent: Extent, start: int, end: int) -> list[tuple[int, int, int]]:
    """Cut a range of an extent where its blocks end: (start, end, place in the file)."""
    spans = []
    while start < end:
        index, within = divmod(start, _BLOCK_BYTES)
        last = min(end, start + _BLOCK_BYTES - within)
        spans.append((start, last, extent.blocks[index] * _BLOCK_BYTES + within))
        start = last
    return spans


def _write_all(file: int, data: bytes, place: int) -> None:
    while data:
        written = os.pwrite(file, data, place)
        data, place = data[written:], place + written


def _read_all(file: int, target: memoryview, place: int) -> None:
    while target:
        count = os.preadv(file, [target], place)
        if count == 0:
            raise OSError("the temporary file is shorter than what was written to it")
        target, place = target[count:], place + count
