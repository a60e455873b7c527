"""Bytes received and not read yet, and how a connection ended (sans-IO).

What reads messages is written once, as generators over an inbox; blocking and asyncio
connections drive them. A generator yields None to have the inbox grow, or memory to have
it filled wholly, straight from the socket.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, Final, TypeVar

import numpy as np

from meshnet.errors import Code, WireError
from meshnet.plane.http1 import find_head_end
from meshnet.plane.memo import LastHead

__all__ = [
    "LANDING_BYTES",
    "ClosedByPeerError",
    "ConnectionEndedError",
    "Inbox",
    "Reading",
    "allocate",
    "read_head",
]

_BUFFER_BYTES: Final = 64 * 1024
LANDING_BYTES: Final = 40 * 1024
"""The longest body that may be received apart from the buffer together with its head: both fit
in the buffer if it turns out to be something else."""

_TLS_RECORDS: Final = b"\x15\x16"
"""What TLS begins with, an alert or a handshake; a head would be waited for in vain."""

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
        last: the head that was read last, where its like may follow.
    """

    __slots__ = (
        "_buffer",
        "_end",
        "_landed",
        "_landing",
        "_start",
        "_view",
        "failure",
        "last",
        "received",
    )

    def __init__(self) -> None:
        self.last: LastHead[Any] | None = None
        self.received = 0
        self.failure: OSError | None = None
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._start = 0
        self._end = 0
        self._landing: memoryview | None = None
        self._landed = 0

    @property
    def buffered(self) -> int:
        """Bytes received and not read yet."""
        return self._end - self._start + self._landed

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
        self._take_back()
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

    def place(self, num_bytes: int) -> memoryview:
        """View where the next bytes go while nothing is buffered."""
        return self._view[:num_bytes]

    def land(self, head_bytes: int, landing: memoryview, count: int) -> None:
        """Count bytes received while nothing was buffered: into `place`, then into `landing`.

        The landed ones may stay there as a body. What is not taken for exactly such a body
        is moved to the buffer.
        """
        if count <= head_bytes:
            self.add(count)
        else:
            self.received += count
            self._end = head_bytes
            self._landing = landing
            self._landed = count - head_bytes

    def claim(self, num_bytes: int) -> tuple[memoryview, int]:
        """Give memory for a body that begins here, and how many of its bytes are there already."""
        landing = self._landing
        if landing is not None and len(landing) == num_bytes and self._start == self._end:
            filled, self._landed, self._landing = self._landed, 0, None
            return landing, filled
        body = allocate(num_bytes)
        return body, self.take_into(body)

    def unread(self) -> memoryview:
        """View what was received and not read yet; valid until more is received."""
        self._take_back()
        return self._view[self._start : self._end]

    def consume(self, count: int) -> None:
        """Count the first `count` bytes of `unread` as read."""
        self._start += count
        if self._start == self._end:
            self._start = self._end = 0

    def take_into(self, target: memoryview) -> int:
        """Move what is unread into `target` as far as both reach; gives the bytes moved."""
        self._take_back()
        count = min(self._end - self._start, len(target))
        if count:
            target[:count] = self._view[self._start : self._start + count]
            self.consume(count)
        return count

    def take_again(
        self, last: LastHead[_T], grammar: Callable[[bytes], bool], max_bytes: int
    ) -> tuple[bytes, memoryview] | None:
        """Take a message whose head is like `last` and whose body landed, all of it.

        Gives the value of the field that varies, and the body, and notes the head's length.
        None, and nothing is taken, where it is another message, or where the value is over
        `max_bytes` or `grammar`, which must refuse CR and LF, finds it wanting.
        """
        body, end, buffer = self._landing, self._end, self._buffer
        if (
            body is None
            or self._start
            or not self._landed == len(body) == last.num_bytes
            or not buffer.startswith(last.before)
            or not buffer.endswith(last.after, 0, end)
        ):
            return None
        value = bytes(buffer[last.value_start : end - last.after_bytes])
        if len(value) > max_bytes or not grammar(value):
            return None
        last.length = end
        self._end = self._landed = 0
        self._landing = None
        return value, body

    def take_head(self, max_bytes: int) -> bytes | None:
        """Take up to and with the empty line that ends a head; None where that is not here yet.

        Raises:
            WireError: 431, the head is longer than `max_bytes`.
        """
        if self._start == self._end:
            self._take_back()
            if self._start == self._end:
                return None
        while self._start < self._end and self._buffer[self._start] in b"\r\n":
            self._start += 1
        limit = min(self._end, self._start + max_bytes)
        found = find_head_end(self._buffer, self._start, limit)
        if found < 0 and self._landing is not None:
            self._take_back()
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

    def _take_back(self) -> None:
        """Move landed bytes to the buffer, which has room for them: see `LANDING_BYTES`."""
        if self._landing is not None:
            end = self._end + self._landed
            self._view[self._end : end] = self._landing[: self._landed]
            self._end, self._landed, self._landing = end, 0, None


def allocate(num_bytes: int) -> memoryview:
    """Give memory of exactly `num_bytes` bytes, with whatever they hold.

    Short ones are bytearrays: clearing 32 KiB takes less than the cold pages that making an
    array touches after a rest.

    Never kept for the next body. Measured, round trips of 0.5 to 4 MiB take no page fault
    and no longer than with buffers kept: malloc gives back what the body before left. Only
    past its mapping threshold, at 32 MiB, do kept buffers save some 15 % of the time.
    """
    if num_bytes <= LANDING_BYTES:
        return memoryview(bytearray(num_bytes))
    return np.empty(num_bytes, np.uint8).data


def read_head(inbox: Inbox, max_bytes: int) -> Reading[bytes | None]:
    """Read a head; None where the connection ended and none had begun.

    Raises:
        WireError: 431, the head is longer than `max_bytes`; or the other end speaks TLS.
    """
    while (head := inbox.take_head(max_bytes)) is None:
        if inbox.failure is not None and not inbox.buffered:
            return None
        if inbox.buffered and inbox.unread()[0] in _TLS_RECORDS:
            raise WireError("the other end speaks TLS, which this one was not told to")
        yield None
    return head
