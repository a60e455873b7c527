"""One TCP connection of a thread: blocking calls, bodies in place, one deadline.

The kernel waits, not Python: a receive of a body is one call (MSG_WAITALL), and timeouts
are the socket's own (SO_RCVTIMEO, SO_SNDTIMEO), since ``settimeout`` would put a poll
before each call and end MSG_WAITALL. They are set anew only where they would reach past
the deadline, so that requests that follow one another set none.
"""

from __future__ import annotations

import contextlib
import math
import select
import socket
import ssl
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Final, TypeVar

from meshnet.dtypes import Body
from meshnet.identity import Identity
from meshnet.plane.crowding import Receiving
from meshnet.plane.dial import set_up
from meshnet.plane.inbox import LANDING_BYTES, ConnectionEndedError, Inbox, Reading, allocate

__all__ = ["Stream", "rest_of"]

_FIRST_BYTES: Final = 4096
"""Enough for a head; more of a body that came with it would be copied from here to its place."""
_SOON_S: Final = 0.05
_RECEIVE: Final = socket.SO_RCVTIMEO
_SEND: Final = socket.SO_SNDTIMEO
_MAX_PIECES: Final = 512
"""Parts that are sent by one call; Linux takes twice as many (IOV_MAX)."""

_T = TypeVar("_T")


@dataclass(slots=True)
class _Pace:
    """How fast bytes must come.

    Attributes:
        piece_bytes: of which each has its own deadline.
        seconds: for a piece.
        end: value of `Inbox.received` at which the piece is whole.
        began: of ``time.monotonic``: when the piece did.
    """

    piece_bytes: int
    seconds: float
    end: int
    began: float


class Stream:
    """A connected blocking socket. One thread reads and sends; any may call `abort`.

    Attributes:
        inbox: what was received and not read yet.
        deadline: of ``time.monotonic``: whatever waits then fails; None is never.
        generation: of the credentials that it was opened with.
        peer: who is at the other end, where its certificate says so.
        key_sha256: of the key in that certificate, in hexadecimal.
        removals: generation of those that it was last looked for in; see `plane.tls`.
        expires: Unix time at which its certificate does.
    """

    def __init__(self, sock: socket.socket) -> None:
        set_up(sock)
        self.inbox = Inbox()
        self._sock = sock
        self.deadline: float | None = None
        self.generation = 0
        self.peer: Identity | None = None
        self.key_sha256 = ""
        self.removals = -1
        self.expires = math.inf
        self._expected: tuple[memoryview, int] | None = None
        self._poller = select.poll()
        self._poller.register(sock, select.POLLIN)
        self._waits_s = {_RECEIVE: 0.0, _SEND: 0.0}
        self._pace: _Pace | None = None

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
        self.deadline = None if seconds is None else monotonic() + seconds
        self._pace = None

    def set_pace(self, piece_bytes: int, seconds: float) -> None:
        """Let what is read fail unless each `piece_bytes` more come within `seconds`.

        It replaces the deadline, and holds until the next one is set.
        """
        now = monotonic()
        self.deadline = now + seconds
        self._pace = _Pace(piece_bytes, seconds, self.inbox.received + piece_bytes, now)

    def end_pace(self) -> None:
        """Take note that nothing more is read at a pace; the deadline stays."""
        self._pace = None

    @property
    def receiving(self) -> Receiving | None:
        """What is being read at a pace; from any thread."""
        pace = self._pace
        return None if pace is None else Receiving(pace.began, pace.piece_bytes)

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
                    self._next_piece()
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
        buffered = inbox.buffered
        try:
            if self._expected is None or buffered:
                space = inbox.space()
                inbox.add(self._receive_into(space if buffered else space[:_FIRST_BYTES]))
                return
            place, body_bytes = self._expected
            landing = allocate(body_bytes)
            inbox.land(len(place), landing, self._receive_two(place, landing))
        except TimeoutError:
            raise
        except BlockingIOError:  # the deadline may have moved: see `_bound`
            self.receive()
        except OSError as error:
            inbox.failure = error

    def expect(self, head_bytes: int, body_bytes: int | None) -> None:
        """Say how long the next message's head and body may be, as a session's next step's are.

        A short body then lands in its place by the call that receives its head.
        """
        expected = self._expected
        if expected is not None and expected[1] == body_bytes and len(expected[0]) == head_bytes:
            return
        short = body_bytes is not None and 0 < body_bytes <= LANDING_BYTES
        self._expected = (
            (self.inbox.place(head_bytes), body_bytes) if short and body_bytes else None
        )

    def send(self, head: bytes, body: Body = b"") -> None:
        """Send a head and its body, never joined.

        Raises:
            OSError: the connection broke.
            TimeoutError: the deadline passed.
        """
        self._bound(_SEND)
        try:
            sent = self._sock.sendmsg((head, body))
        except BlockingIOError:
            sent = 0
        if sent != len(head) + len(body):
            self._send_rest(rest_of((head, body), sent))

    def send_unless_answered(self, head: bytes, *bodies: Body) -> bool:
        """Send a head and its body's parts until the other end sends something; False if it did.

        Raises:
            OSError: the connection broke.
            TimeoutError: the deadline passed.
        """
        pieces: Sequence[Body] = (head, *bodies)
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
        pace = self._pace
        while target:
            piece = target if pace is None else target[: max(1, pace.end - self.inbox.received)]
            count = self._receive_into(piece, socket.MSG_WAITALL)
            if count == 0:
                self.inbox.add(0)
                raise ConnectionEndedError(str(self.inbox.failure))
            self.inbox.received += count
            target = target[count:]
            self._next_piece()

    def _next_piece(self) -> None:
        """Set the deadline of the next piece where this one is whole."""
        pace = self._pace
        if pace is not None and self.inbox.received >= pace.end:
            pace.end = self.inbox.received + pace.piece_bytes
            pace.began = monotonic()
            self.deadline = pace.began + pace.seconds

    def _receive_into(self, target: memoryview, flags: int = 0) -> int:
        while True:
            self._bound(_RECEIVE)
            try:
                return self._sock.recv_into(target, 0, flags)
            except BlockingIOError:
                continue

    def _receive_two(self, place: memoryview, landing: memoryview) -> int:
        """Receive what is there into one and then the other; gives the bytes of both."""
        self._bound(_RECEIVE)
        return self._sock.recvmsg_into((place, landing))[0]

    def _send_rest(self, pieces: Sequence[Body]) -> None:
        while pieces:
            self._bound(_SEND)
            with contextlib.suppress(BlockingIOError):  # the deadline may have moved
                pieces = rest_of(pieces, self._sock.sendmsg(pieces))

    def _send_now(self, pieces: Sequence[Body]) -> Sequence[Body]:
        """Send what goes without waiting; gives what is left.

        Raises:
            BlockingIOError: nothing does.
        """
        sent = self._sock.sendmsg(pieces[:_MAX_PIECES], (), socket.MSG_DONTWAIT)
        return rest_of(pieces, sent)

    def _remaining(self) -> float | None:
        """Give the seconds to the deadline.

        Raises:
            TimeoutError: it has passed.
        """
        if self.deadline is None:
            return None
        remaining = self.deadline - monotonic()
        if remaining <= 0:
            raise TimeoutError
        return remaining

    def _bound(self, option: int) -> None:
        """Let the kernel's wait end by the deadline; it may end before, and is then repeated."""
        wait_s = self._waits_s[option]
        if self.deadline is None:
            if wait_s:
                self._set_wait(option, 0.0)  # for ever
            return
        remaining = self.deadline - monotonic()
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
        poller = self._poller
        if events != select.POLLIN:
            poller = select.poll()
            poller.register(self._sock, events)
        while True:
            remaining = self._remaining()
            found = poller.poll(None if remaining is None else remaining * 1e3)
            if found:
                return found[0][1]


def rest_of(pieces: Sequence[Body], sent: int) -> Sequence[Body]:
    """Give what is left of `pieces` after `sent` bytes of them."""
    for index, piece in enumerate(pieces):
        if sent < len(piece):
            return [memoryview(piece)[sent:], *pieces[index + 1 :]]
        sent -= len(piece)
    return ()
