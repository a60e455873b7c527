"""One connection of a thread through TLS."""

from __future__ import annotations

import contextlib
import select
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from meshnet.credentials import peer_identity, peer_key_sha256
from meshnet.dtypes import Body
from meshnet.plane.inbox import ConnectionEndedError
from meshnet.plane.stream import Stream, rest_of

__all__ = ["TlsStream"]

_HANDSHAKE: Final = b"\x16"
"""First byte of TLS: the type of the record that a client begins with (RFC 8446, 5.1)."""
_LINGER_S: Final = 2.0
_JOIN_BYTES: Final = 4096
"""A head and a body that are no longer share a record: each costs a system call to send, two
to receive and a wait."""
_DROP_BYTES: Final = 16 * 1024

_T = TypeVar("_T")


class TlsStream(Stream):
    """A `Stream` through TLS.

    A TLS socket knows neither MSG_WAITALL nor the kernel's timeouts, so that it is
    non-blocking and waits by poll. Bodies are still decrypted into their place.

    Args:
        sock: its handshake not made yet.
        plain_answer: what a server sends, unencrypted, to a caller that does not begin with TLS.
    """

    _sock: ssl.SSLSocket

    def __init__(self, sock: ssl.SSLSocket, *, plain_answer: bytes = b"") -> None:
        super().__init__(sock)
        self._plain_answer = plain_answer
        sock.setblocking(False)

    def begin(self) -> None:
        """Make the handshake."""
        if not self._sock.server_side:
            self._repeat(self._sock.do_handshake)
            self._meet()
            return
        self.wait_for(select.POLLIN)
        first = socket.socket.recv(self._sock, 1, socket.MSG_PEEK)
        if first not in (_HANDSHAKE, b""):
            with contextlib.suppress(OSError):
                socket.socket.send(self._sock, self._plain_answer)
                self._drop_rest()
            raise ConnectionEndedError("a caller without TLS")
        try:
            self._repeat(self._sock.do_handshake)
        except ssl.SSLError:
            with contextlib.suppress(OSError):
                self._drop_rest()
            raise
        self._meet()
        certificate = self._sock.getpeercert()
        if certificate:
            self.expires = ssl.cert_time_to_seconds(str(certificate["notAfter"]))

    def _meet(self) -> None:
        self.peer = peer_identity(self._sock)
        self.key_sha256 = peer_key_sha256(self._sock)

    def is_reusable(self) -> bool:
        """Tell whether an idle connection still serves: nothing may be there to read."""
        if self.inbox.failure is not None or self.inbox.buffered or self._sock.pending():
            return False
        return super().is_reusable() or not self._has_heard()

    def send_unless_answered(self, head: bytes, *bodies: Body) -> bool:
        """Send until the other end sends something of a message; False where it did.

        What TLS says for itself, such as the tickets after the handshake, is no answer.
        """
        pieces: Sequence[Body] = (head, *bodies)
        while pieces:
            try:
                pieces = self._send_now(pieces)
            except ssl.SSLWantWriteError:
                events = self.wait_for(select.POLLIN | select.POLLOUT)
                if events & ~select.POLLOUT and self._has_heard():
                    return False
        return True

    def _has_heard(self) -> bool:
        """Receive what is there; False where none of it is for the inbox."""
        try:
            self.inbox.add(self._sock.recv_into(self.inbox.space()))
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return False
        except OSError as error:
            self.inbox.failure = error
        return True

    def _shut(self, how: int) -> None:
        # SSLSocket's own forgets TLS: another thread would go on sending unencrypted.
        socket.socket.shutdown(self._sock, how)

    def _drop_rest(self) -> None:
        """Let the other end read what was sent to it; see `linger`."""
        self._shut(socket.SHUT_WR)
        self.set_deadline(_LINGER_S)
        while True:
            self.wait_for(select.POLLIN)
            if not socket.socket.recv(self._sock, _DROP_BYTES):
                return

    def _receive_into(self, target: memoryview, flags: int = 0) -> int:
        if not self._sock.pending():
            # Asking TLS for what is not there yet would cost more than this.
            self.wait_for(select.POLLIN)
        return self._repeat(lambda: self._sock.recv_into(target))

    def _receive_two(self, place: memoryview, landing: memoryview) -> int:
        """Receive into one and then the other, which a head as before says will be filled."""
        count = self._receive_into(place)
        last, head = self.inbox.last, bytes(place)
        if count < len(head) or last is None or last.num_bytes != len(landing):
            return count
        if not last.is_like(head):
            return count
        while count < len(head) + len(landing):
            more = self._receive_into(landing[count - len(head) :])
            if not more:
                break
            count += more
        return count

    def send(self, head: bytes, body: Body = b"") -> None:
        """Send a head and its body, each encrypted from its place unless they are short."""
        pieces: Sequence[Body] = (head, body)
        if len(head) + len(body) <= _JOIN_BYTES:
            pieces = (b"".join(pieces),)
        while pieces:
            pieces = self._send_now_or_wait(pieces)

    def _send_now_or_wait(self, pieces: Sequence[Body]) -> Sequence[Body]:
        return self._repeat(lambda: self._send_now(pieces))

    def _send_now(self, pieces: Sequence[Body]) -> Sequence[Body]:
        return rest_of(pieces, self._sock.send(pieces[0]))

    def _repeat(self, work: Callable[[], _T]) -> _T:
        """Do `work` as often as TLS has to wait for the socket."""
        while True:
            try:
                return work()
            except ssl.SSLWantReadError:
                self.wait_for(select.POLLIN)
            except ssl.SSLWantWriteError:
                self.wait_for(select.POLLOUT)
