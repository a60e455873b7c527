"""One TCP connection of a thread: blocking calls, bodies in place, one deadline.

The kernel waits, not Python: a receive of a body is one call (MSG_WAITALL), and timeouts
are the socket's own (SO_RCVTIMEO, SO_SNDTIMEO), since ``settimeout`` would put a poll
before each call and end MSG_WAITALL. They are set anew only where they would reach past
the deadline, so that requests that follow one another set none.
"""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
import struct
import time
from typing import Final, TypeVar

from meshnet.dtypes import Body
from meshnet.plane.dial import set_up
from meshnet.plane.inbox import LANDING_BYTES, ConnectionEndedError, Inbox, Reading, allocate

__all__ = ["Stream", "rest_of"]

_FIRST_BYTES: Final = 4096
"""Enough for a head; more of a body that came with it would be copied from here to its place."""
_SOON_S: Final = 0.05

_T = TypeVar("_T")


class Stream:
    """A connected blocking socket. One thread reads and sends; any may call `abort`.

    Attributes:
        inbox: what was received and not read yet.
    """

    def __init__(self, sock: socket.socket) -> None:
        set_up(sock)
        self.inbox = Inbox()
        self._sock = sock
        self._deadline: float | None = None
        self._expected: tuple[int, int] | None = None
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)
        self._waits_s = {socket.SO_RCVTIMEO: 0.0, socket.SO_SNDTIMEO: 0.0}

    def fileno(self) -> int:
        """Give the socket's descriptor."""
        return self._sock.fileno()

    def begin(self) -> None:
        """Do what must come before the first message: nothing here, TLS's handshake there.

        Raises:
            OSError: the other end's certificate, or ours, is not accepted; or it broke.
            TimeoutError: the deadline passed.
        """

    def set_deadline(self, seconds: float | None) -> None:
        """Let whatever waits from now on fail after `seconds`; None ends that."""
        self._deadline = None if seconds is None else time.monotonic() + seconds

    def run(self, reading: Reading[_T]) -> _T:
        """Read one thing of a message.

        Raises:
            ConnectionEndedError: the connection ended first.
            TimeoutError: the deadline passed.
        """
        try:
            while True:
                target = next(reading)
                if target is None:
                    self.receive()
                else:
                    self._fill(target)
        except StopIteration as end:
            result: _T = end.value
            return result

    def receive(self) -> None:
        """Wait until the inbox has grown, or the connection has ended.

        Raises:
            ConnectionEndedError: it had ended before.
            TimeoutError: the deadline passed.
        """
        inbox = self.inbox
        if inbox.failure is not None:
            raise ConnectionEndedError(str(inbox.failure)) from inbox.failure
        try:
            if self._expected is None or inbox.buffered:
                space = inbox.space()
                inbox.add(self._receive_into(space if inbox.buffered else space[:_FIRST_BYTES]))
            else:
                self._receive_apart(*self._expected)
        except TimeoutError:
            raise
        except OSError as error:
            inbox.failure = error

    def expect(self, head_bytes: int, body_bytes: int | None) -> None:
        """Say how long the next message's head and body may be, as a session's next step's are.

        A short body then lands in its place by the call that receives its head.
        """
        short = body_bytes is not None and 0 < body_bytes <= LANDING_BYTES
        self._expected = (head_bytes, body_bytes) if short and body_bytes else None

    def _receive_apart(self, head_bytes: int, body_bytes: int) -> None:
        landing = allocate(body_bytes)
        parts = [self.inbox.space()[:head_bytes], landing]
        while True:
            self._bound(socket.SO_RCVTIMEO)
            try:
                count = self._sock.recvmsg_into(parts)[0]
                break
            except BlockingIOError:
                continue
        self.inbox.add(min(count, head_bytes))
        if count > head_bytes:
            self.inbox.land(landing, count - head_bytes)

    def send(self, head: bytes, body: Body = b"") -> None:
        """Send a head and its body, never joined.

        Raises:
            OSError: the connection broke.
            TimeoutError: the deadline passed.
        """
        pieces: list[Body] = [head, body]
        while pieces:
            pieces = self._send_some(pieces)

    def send_unless_answered(self, head: bytes, body: Body) -> bool:
        """Send as `send` does, until the other end sends something; False where it did.

        Raises:
            OSError: the connection broke.
            TimeoutError: the deadline passed.
        """
        pieces: list[Body] = [head, body]
        while pieces:
            try:
                pieces = self._send_now(pieces)
            except (BlockingIOError, ssl.SSLWantWriteError):
                if self.wait_for(select.POLLIN | select.POLLOUT) & ~select.POLLOUT:
                    return False
        return True

    def is_reusable(self) -> bool:
        """Tell, by one look at the socket, whether an idle connection still serves."""
        if self.inbox.failure is not None or self.inbox.buffered:
            return False
        # Not a receive: its BlockingIOError would cost more than all else here.
        return not self._poller.poll(0)

    def linger(self, seconds: float) -> None:
        """Close so that the other end can still read what was sent.

        Closing while bytes wait unread makes the kernel reset the connection, and the
        other end loses the answer; so they are read and dropped until it closes, for at
        most `seconds`. Source: RFC 9112, section 9.6.
        """
        self.set_deadline(seconds)
        with contextlib.suppress(OSError):
            self._shut(socket.SHUT_WR)
            while True:
                self.inbox.consume(self.inbox.buffered)
                self.receive()

    def stop_reading(self) -> None:
        """Let a thread that waits for more to read find the end of the stream."""
        with contextlib.suppress(OSError):
            self._shut(socket.SHUT_RD)

    def abort(self) -> None:
        """Let whatever thread waits on this connection fail now."""
        with contextlib.suppress(OSError):
            self._shut(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close; not while another thread waits on it (see `abort`)."""
        self._sock.close()

    def _shut(self, how: int) -> None:
        self._sock.shutdown(how)

    def _fill(self, target: memoryview) -> None:
        """Receive until `target` is full, without a copy."""
        while target:
            count = self._receive_into(target, socket.MSG_WAITALL)
            if count == 0:
                self.inbox.add(0)
                raise ConnectionEndedError(str(self.inbox.failure))
            self.inbox.received += count
            target = target[count:]

    def _receive_into(self, target: memoryview, flags: int = 0) -> int:
        while True:
            self._bound(socket.SO_RCVTIMEO)
            try:
                return self._sock.recv_into(target, 0, flags)
            except BlockingIOError:
                continue

    def _send_some(self, pieces: list[Body]) -> list[Body]:
        """Send what goes; gives what is left."""
        self._bound(socket.SO_SNDTIMEO)
        try:
            sent = self._sock.sendmsg(pieces)
        except BlockingIOError:
            return pieces
        return [] if sent == sum(map(len, pieces)) else rest_of(pieces, sent)

    def _send_now(self, pieces: list[Body]) -> list[Body]:
        """Send what goes without waiting; gives what is left.

        Raises:
            BlockingIOError: nothing does.
        """
        return rest_of(pieces, self._sock.sendmsg(pieces, (), socket.MSG_DONTWAIT))

    def _remaining(self) -> float | None:
        """Give the seconds to the deadline.

        Raises:
            TimeoutError: it has passed.
        """
        if self._deadline is None:
            return None
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        return remaining

    def _bound(self, option: int) -> None:
        """Let the kernel's wait end by the deadline; it may end before, and is then repeated."""
        wait_s = self._waits_s[option]
        if self._deadline is None:
            if wait_s:
                self._set_wait(option, 0.0)  # for ever
            return
        remaining = self._deadline - time.monotonic()
        if remaining <= 0:
            raise TimeoutError
        if not remaining / 8 <= wait_s <= remaining:
            self._set_wait(option, remaining if remaining < _SOON_S else remaining / 2)

    def _set_wait(self, option: int, seconds: float) -> None:
        self._waits_s[option] = seconds
        microseconds = max(1, int(seconds * 1e6)) if seconds else 0
        value = struct.pack("ll", *divmod(microseconds, 1_000_000))
        self._sock.setsockopt(socket.SOL_SOCKET, option, value)

    def wait_for(self, events: int) -> int:
        """Wait for events of the socket; gives those that came.

        Raises:
            TimeoutError: the deadline passed.
        """
        poller = select.poll()
        poller.register(self._sock, events)
        while True:
            remaining = self._remaining()
            found = poller.poll(None if remaining is None else remaining * 1e3)
            if found:
                return found[0][1]


def rest_of(pieces: list[Body], sent: int) -> list[Body]:
    """Give what is left of `pieces` after `sent` bytes of them."""
    for index, piece in enumerate(pieces):
        if sent < len(piece):
            return [memoryview(piece)[sent:], *pieces[index + 1 :]]
        sent -= len(piece)
    return []
