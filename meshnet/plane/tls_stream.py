"""One connection of a thread through TLS."""

from __future__ import annotations

import select
import ssl
from collections.abc import Callable
from typing import TypeVar

from meshnet.dtypes import Body
from meshnet.plane.stream import Stream, rest_of

__all__ = ["TlsStream"]

_T = TypeVar("_T")


class TlsStream(Stream):
    """A `Stream` through TLS.

    A TLS socket knows neither MSG_WAITALL nor the kernel's timeouts, so that it is
    non-blocking and waits by poll. Bodies are still decrypted into their place.
    """

    _sock: ssl.SSLSocket

    def __init__(self, sock: ssl.SSLSocket) -> None:
        super().__init__(sock)
        sock.setblocking(False)

    def begin(self) -> None:
        """Make the handshake."""
        self._repeat(self._sock.do_handshake)

    def is_reusable(self) -> bool:
        """Tell whether an idle connection still serves: nothing may be there to read."""
        if self.inbox.failure is not None or self.inbox.buffered:
            return False
        try:
            self._sock.recv(1)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return True
        except OSError:
            return False
        return False

    def expect(self, head_bytes: int, body_bytes: int | None) -> None:
        """Expect nothing: TLS cannot receive into two places at once."""

    def _receive_into(self, target: memoryview, flags: int = 0) -> int:
        return self._repeat(lambda: self._sock.recv_into(target))

    def _send_some(self, pieces: list[Body]) -> list[Body]:
        return self._repeat(lambda: self._send_now(pieces))

    def _send_now(self, pieces: list[Body]) -> list[Body]:
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
