"""Connections of the JSON face: one that is slow, or no HTTP, ends with an answer or without."""

from __future__ import annotations

import asyncio
import logging
from typing import Any, Final, cast

from aiohttp import http_exceptions, web

from meshnet.control.httpmeta import mesh_error_answer
from meshnet.control.limits import ControlLimits
from meshnet.errors import Code, MeshError

__all__ = ["BoundedServer", "error_response"]

_LINGER_S: Final = 2.0
"""For which a body is read on that nobody wants any more, so that its sender sees the answer."""

_log = logging.getLogger(__name__)


class BoundedServer(web.Server):
    """Makes connections that keep to limits.

    Args:
        handler: answers requests.
        limits: of connections and requests.
    """

    def __init__(self, handler: Any, limits: ControlLimits) -> None:
        super().__init__(
            handler,
            request_factory=self._make_bounded,
            handler_cancellation=True,  # a client that goes away cancels its call
            access_log=None,
            auto_decompress=False,
            keepalive_timeout=limits.idle_timeout_s,
            max_line_size=limits.max_head_line_bytes,
            max_field_size=limits.max_head_line_bytes,
            max_headers=limits.max_head_lines,
            lingering_time=_LINGER_S,
        )
        self.limits = limits
        self.num_open = 0

    def __call__(self) -> web.RequestHandler:
        """Make the protocol of a connection that was accepted."""
        return _Connection(self, loop=self._loop, **self._kwargs)

    def _make_bounded(
        self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any
    ) -> web.BaseRequest:
        if isinstance(protocol, _Connection):
            protocol.end_of_head()
        size = self.limits.max_body_bytes
        return web.BaseRequest(
            message, payload, protocol, writer, task, task.get_loop(), client_max_size=size
        )


class _Connection(web.RequestHandler):
    """One connection, with a timer for its client's part: to send a first head, or to read.

    aiohttp's own keep-alive timer bounds the wait for later heads.
    """

    __slots__ = ("_bounds", "_counted", "_head_timer", "_write_timer")

    def __init__(self, server: BoundedServer, **kwargs: Any) -> None:
        super().__init__(server, **kwargs)
        self._bounds = server
        self._counted = False
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        limits = self._bounds.limits
        if self._bounds.num_open >= limits.max_connections:
            _log.warning("over %d connections: one more is closed", limits.max_connections)
            cast(asyncio.Transport, transport).abort()
            return
        self._counted = True
        self._bounds.num_open += 1
        super().connection_made(transport)
        self._head_timer = self._loop.call_later(limits.head_timeout_s, self._end_headless)

    def connection_lost(self, exc: BaseException | None) -> None:
        if self._counted:
            self._counted = False
            self._bounds.num_open -= 1
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport is not None:  # else closed as one too many
            super().data_received(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self._loop.call_later(
            self._bounds.limits.write_timeout_s, self._end_unread
        )

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def end_of_head(self) -> None:
        """Take note that the first head came whole."""
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Give the answer to a request that could not be read; the connection ends with it."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun already")
        code, text = Code.INTERNAL, "the control plane failed to answer"
        if isinstance(exc, http_exceptions.LineTooLong):
            size = self._bounds.limits.max_head_line_bytes
            code, text = Code.HEADERS_TOO_LARGE, f"a line of the head is over {size} bytes"
        elif status < 500:
            first = next(iter((message or "").splitlines()), "").strip(" :")
            code, text = Code.INVALID_ARGUMENT, f"not a request of HTTP/1.1: {first[:200]}"
        _log.info("a request of %s: %s", request.remote, text)
        response = error_response(MeshError(code, text))
        response.force_close()
        return response

    def _end_headless(self) -> None:
        self._head_timer = None
        _log.info("a client sent no whole head in %g s", self._bounds.limits.head_timeout_s)
        if self.transport is not None:
            self.transport.abort()

    def _end_unread(self) -> None:
        _log.info("a client read nothing for %g s", self._bounds.limits.write_timeout_s)
        if self.transport is not None:
            self.transport.abort()


def error_response(error: MeshError) -> web.Response:
    """Give an error as the JSON face answers it."""
    number, headers, body = mesh_error_answer(error)
    return web.Response(status=number, headers=headers, body=body)
