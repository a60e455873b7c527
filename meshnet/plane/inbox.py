"""Bytes received and not read yet, and how a connection ended (sans-IO).

What reads messages is written once, as generators over an inbox; blocking and asyncio
connections drive them. A generator yields None to have the inbox grow, or memory to have
it filled wholly, straight from the socket.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, TypeVar

from meshnet.errors import Code, WireError
from meshnet.plane.http1 import find_head_end

__all__ = ["ClosedByPeerError", "ConnectionEndedError", "Inbox", "Reading", "read_head"]

_BUFFER_BYTES: Final = 64 * 1024

_T = TypeVar("_T")

Reading = Generator[memoryview | None, None, _T]
"""Reads one thing of a message; see the module."""


class ConnectionEndedError(ConnectionError):
    """The other end closed or reset the connection before a message was complete."""


class ClosedByPeerError(ConnectionEndedError):
    """End of the stream, not a reset."""


class Inbox:
    """A buffer between a socket and what reads its messages.

    Attributes:
        received: bytes received so far, in place or not; tells whether an answer had begun.
        failure: why nothing more is to come; None while the connection is open.
    """

    __slots__ = ("_buffer", "_end", "_start", "_view", "failure", "received")

    def __init__(self) -> None:
        self.received = 0
        self.failure: OSError | None = None
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0

    @property
    def buffered(self) -> int:
        """Bytes received and not read yet."""
        return self._end - self._start

    @property
    def full(self) -> bool:
        """Tell whether there is no space for more until something is read."""
        return self._end == _BUFFER_BYTES

    @property
    def closed_by_peer(self) -> bool:
        """Tell whether the other end closed in order, so that no more is to come."""
        return isinstance(self.failure, ClosedByPeerError)

    def space(self) -> memoryview:
        """View where the next bytes go; unread ones are moved to the front where it is short."""
        if self._end > _BUFFER_BYTES // 2 and self._start:
            count = self.buffered
            self._buffer[:count] = bytes(self.unread())
            self._start, self._end = 0, count
        return self._view[self._end :]

    def add(self, count: int) -> None:
        """Count bytes put into `space`; none are the end of the stream."""
        if count == 0:
            self.failure = ClosedByPeerError("the other end closed the connection")
        self.received += count
        self._end += count

    def unread(self) -> memoryview:
        """View what was received and not read yet; valid until more is received."""
        return self._view[self._start : self._end]

    def consume(self, count: int) -> None:
        """Count the first `count` bytes of `unread` as read."""
        self._start += count
        if self._start == self._end:
            self._start = self._end = 0

    def take_into(self, target: memoryview) -> int:
        """Move what is unread into `target` as far as both reach; gives the bytes moved."""
        count = min(self._end - self._start, len(target))
        if count:
            target[:count] = self._view[self._start : self._start + count]
            self.consume(count)
        return count

    def take_head(self, max_bytes: int) -> bytes | None:
        """Take up to and with the empty line that ends a head; None where that is not here yet.

        Raises:
            WireError: 431, the head is longer than `max_bytes`.
        """
        while self._start < self._end and self._buffer[self._start] in b"\r\n":
            self._start += 1
        limit = min(self._end, self._start + max_bytes)
        found = find_head_end(self._buffer, self._start, limit)
        if found >= 0:
            head = bytes(self._view[self._start : found])
            self.consume(len(head))
            return head
        if self.buffered >= max_bytes:
            raise WireError(
                f"the head has more than {max_bytes} bytes", code=Code.HEADERS_TOO_LARGE
            )
        if not self.buffered:
            self.consume(0)
        return None


def read_head(inbox: Inbox, max_bytes: int) -> Reading[bytes | None]:
    """Read a head; None where the connection ended and none had begun.

    Raises:
        WireError: 431, the head is longer than `max_bytes`.
    """
    while (head := inbox.take_head(max_bytes)) is None:
        if inbox.failure is not None and not inbox.buffered:
            return None
        yield None
    return head
