"""Connections of HTTP servers that serve others: so many at once, and none that is slow.

Source: aiohttp's `web.RequestHandler`, which knows no such bounds.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, Protocol, cast

from aiohttp import web

__all__ = ["LINGER_S", "BoundedConnection", "ConnectionLimits", "handler_options"]

LINGER_S: Final = 2.0
"""For which a body is read on that nobody wants any more, so that its sender sees the answer."""

_log = logging.getLogger(__name__)


class ConnectionLimits(Protocol):
    """Bounds of a listener's connections; times are in seconds."""

    @property
    def max_connections(self) -> int:
        """Open at once; one more is closed."""

    @property
    def max_head_line_bytes(self) -> int:
        """Of each line of a head."""

    @property
    def max_head_lines(self) -> int:
        """Of a head."""

    @property
    def head_timeout_s(self) -> float:
        """In which a head is to come whole."""

    @property
    def idle_timeout_s(self) -> float:
        """Between an answer and the next request."""

    @property
    def write_timeout_s(self) -> float:
        """For which a client may read nothing while an answer waits for it."""


def handler_options(limits: ConnectionLimits) -> dict[str, Any]:
    """Give the bounds that `web.RequestHandler` keeps by itself, as its keywords."""
    return {
        "keepalive_timeout": limits.idle_timeout_s,
        "max_line_size": limits.max_head_line_bytes,
        "max_field_size": limits.max_head_line_bytes,
        "max_headers": limits.max_head_lines,
        "lingering_time": LINGER_S,
        "access_log": None,
    }


class BoundedConnection(web.RequestHandler):
    """One connection, with a timer for its client's part: to send a head, or to read.

    Args:
        server: as of `web.RequestHandler`.
        limits: of the listener.
        others: the connections of the listener that are open.
        options: of `web.RequestHandler`.
    """

    __slots__ = ("_head_timer", "_limits", "_open", "_write_timer")

    def __init__(
        self,
        server: web.Server,
        limits: ConnectionLimits,
        others: set[BoundedConnection],
        **options: Any,
    ) -> None:
        super().__init__(server, **options)
        self._limits = limits
        self._open = others
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to wait for a head; one connection too many is closed."""
        if len(self._open) >= self._limits.max_connections:
            _log.warning("over %d connections: one more is closed", self._limits.max_connections)
            cast(asyncio.Transport, transport).abort()
            return
        self._open.add(self)
        super().connection_made(transport)
        self.expect_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Make room, and wait for nothing more."""
        self._open.discard(self)
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take what came, unless the connection was closed as one too many."""
        if self.transport is not None:
            super().data_received(data)

    def pause_writing(self) -> None:
        """Begin to wait for a client that does not read."""
        super().pause_writing()
        self._write_timer = self._loop.call_later(self._limits.write_timeout_s, self._end_unread)

    def resume_writing(self) -> None:
        """Wait for it no more."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Give the answer to a request that could not be read; the connection ends with it.

        Raises:
            ConnectionError: another answer has begun already.
        """
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        response = self.answer_unreadable(request, status, exc, message or "")
        response.force_close()
        return response

    def answer_unreadable(
        self, request: web.BaseRequest, status: int, error: BaseException | None, message: str
    ) -> web.StreamResponse:
        """Say what is wrong with a request, in the form of this server's errors.

        Args:
            request: as far as it is known.
            status: that aiohttp would answer; 500 where the server failed.
            error: that reading it, or answering it, raised.
            message: aiohttp's.
        """
        raise NotImplementedError

    def expect_head(self) -> None:
        """Begin to wait for a whole head."""
        self._head_timer = self._loop.call_later(self._limits.head_timeout_s, self._end_headless)

    def end_of_head(self) -> None:
        """Take note that the head came whole."""
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def end_slow(self) -> None:
        """End a connection whose client has sent no whole head in time."""
        if self.transport is not None:
            self.transport.abort()

    def _end_headless(self) -> None:
        self._head_timer = None
        _log.info("a client sent no whole head in %g s", self._limits.head_timeout_s)
        self.end_slow()

    def _end_unread(self) -> None:
        _log.info("a client read nothing for %g s", self._limits.write_timeout_s)
        if self.transport is not None:
            self.transport.abort()
