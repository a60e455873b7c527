"""Chunked transfer coding, read piece by piece into a buffer of known size (sans-IO).

Source: RFC 9112, section 7.1. Trailer fields are read and dropped.
"""

from __future__ import annotations

import re
from enum import Enum, auto
from typing import Final

from meshnet.errors import WireError

__all__ = ["ChunkedDecoder"]

_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,16})[ \t]*(?:;[^\x00-\x08\x0a-\x1f\x7f]*)?\r\n")
_MAX_LINE_BYTES: Final = 1024
_MAX_TRAILER_BYTES: Final = 8192


class _Expect(Enum):
    SIZE = auto()
    DATA = auto()
    DATA_END = auto()
    TRAILER = auto()
    NOTHING = auto()


class ChunkedDecoder:
    """Decoder of one body.

    Args:
        out: receives the body; a body longer than this is refused.

    Attributes:
        size: bytes written to `out`.
    """

    def __init__(self, out: memoryview) -> None:
        self.size = 0
        self._out = out
        self._state = _Expect.SIZE
        self._remaining = 0
        self._trailer_bytes = 0

    @property
    def done(self) -> bool:
        """Tell whether the body's last chunk and trailer have been read."""
        return self._state is _Expect.NOTHING

    def feed(self, data: memoryview) -> int:
        """Decode what `data` holds; gives the bytes used, which the next call goes on after.

        Fewer than all are used where a line is not complete yet, or the body is done.

        Raises:
            WireError: not chunked coding, or a body longer than ``out``.
        """
        used = 0
        while self._state is not _Expect.NOTHING:
            step = self._step(data[used:])
            if step == 0:
                break
            used += step
        return used

    def _step(self, data: memoryview) -> int:
        match self._state:
            case _Expect.SIZE:
                return self._read_size(data)
            case _Expect.DATA:
                return self._read_data(data)
            case _Expect.DATA_END:
                if len(data) >= 2:
                    if bytes(data[:2]) != b"\r\n":
                        raise _broken("a chunk is longer than the size before it")
                    self._state = _Expect.SIZE
                    return 2
                return 0
            case _:
                return self._read_trailer(data)

    def _read_size(self, data: memoryview) -> int:
        line = _line(data)
        if not line:
            return 0
        match = _SIZE_LINE.fullmatch(line)
        if match is None:
            raise _broken(f"chunk size line {line[:40]!r}")
        self._remaining = int(match[1], 16)
        if self._remaining > len(self._out) - self.size:
            raise WireError(
                f"body has at least {self.size + self._remaining} bytes,"
                f" expected at most {len(self._out)}",
                field="Content-Length",
            )
        self._state = _Expect.DATA if self._remaining else _Expect.TRAILER
        return len(line)

    def _read_data(self, data: memoryview) -> int:
        count = min(len(data), self._remaining)
        self._out[self.size : self.size + count] = data[:count]
        self.size += count
        self._remaining -= count
        if self._remaining == 0:
            self._state = _Expect.DATA_END
        return count

    def _read_trailer(self, data: memoryview) -> int:
        line = _line(data)
        self._trailer_bytes += len(line)
        if self._trailer_bytes > _MAX_TRAILER_BYTES:
            raise _broken(f"trailer of more than {_MAX_TRAILER_BYTES} bytes")
        if line == b"\r\n":
            self._state = _Expect.NOTHING
        return len(line)


def _line(data: memoryview) -> bytes:
    """Give the first line with its end, or nothing where it is not complete."""
    start = bytes(data[:_MAX_LINE_BYTES])
    end = start.find(b"\n") + 1
    if end == 0 and len(start) == _MAX_LINE_BYTES:
        raise _broken(f"line of more than {_MAX_LINE_BYTES} bytes")
    return start[:end]


def _broken(what: str) -> WireError:
    return WireError(f"chunked body: {what}", field="Transfer-Encoding")
