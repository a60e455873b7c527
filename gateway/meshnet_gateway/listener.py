"""The OpenAI endpoint's connections: what is slow or no HTTP ends with an answer or without one."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Final, cast

from aiohttp import http_exceptions, web

from meshnet.errors import Code, MeshError
from meshnet.listen import BACKLOG
from meshnet_gateway.limits import GatewayLimits
from meshnet_gateway.openai_errors import error_response

__all__ = ["LimitedSite", "watch_requests"]

_LINGER_S: Final = 2.0
"""For which a body is read on that nobody wants any more, so that its sender sees the answer."""

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = logging.getLogger(__name__)


class LimitedSite(web.BaseSite):
    """Serves a runner's application within limits; the application has `watch_requests`.

    Args:
        runner: set up.
        listener: a socket that is bound.
        limits: of connections.
        tls: for HTTPS; None for HTTP.
    """

    def __init__(
        self,
        runner: web.AppRunner,
        listener: socket.socket,
        limits: GatewayLimits,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        super().__init__(runner, ssl_context=tls, backlog=BACKLOG)
        self._listener = listener
        self._limits = limits
        self._open: set[_Connection] = set()

    @property
    def name(self) -> str:
        """The address for logs."""
        return "{}:{}".format(*self._listener.getsockname()[:2])

    async def start(self) -> None:
        """Serve until the runner is cleaned up."""
        await super().start()
        server = cast(web.Server, self._runner.server)  # there is one once a runner is set up
        tls = self._ssl_context
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(server, loop, self._limits, self._open),
            sock=self._listener,
            backlog=self._backlog,
            ssl=tls,
            ssl_handshake_timeout=None if tls is None else self._limits.head_timeout_s,
            ssl_shutdown_timeout=None if tls is None else _LINGER_S,
        )


class _Connection(web.RequestHandler):
    """One connection, with a timer for its client's part: to send a head, or to read."""

    __slots__ = ("_head_timer", "_is_answering", "_limits", "_open", "_write_timer")

    def __init__(
        self,
        server: web.Server,
        loop: asyncio.AbstractEventLoop,
        limits: GatewayLimits,
        others: set[_Connection],
    ) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=limits.idle_timeout_s,
            max_line_size=limits.max_head_line_bytes,
            max_field_size=limits.max_head_line_bytes,
            max_headers=limits.max_head_lines,
            lingering_time=_LINGER_S,
            access_log=None,  # type: ignore[arg-type] # aiohttp's own way to have none
        )
        self._limits = limits
        self._open = others
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._is_answering = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        if len(self._open) >= self._limits.max_connections:
            _log.warning("over %d connections: one more is closed", self._limits.max_connections)
            cast(asyncio.Transport, transport).abort()
            return
        self._open.add(self)
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._open.discard(self)
        for timer in (self._head_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport is None:  # closed as one too many
            return
        super().data_received(data)
        if data and not self._is_answering and self._head_timer is None:
            self._expect_head()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self._loop.call_later(self._limits.write_timeout_s, self._end_unread)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()

    def begin_answer(self) -> None:
        """Take note that a head came whole, and that its answer is made."""
        self._is_answering = True
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def end_answer(self) -> None:
        """Take note that the next head may come."""
        self._is_answering = False

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
        code, text = Code.INTERNAL, "the gateway failed on this request; its log says where"
        if isinstance(exc, http_exceptions.LineTooLong) or "headers" in (message or "").lower():
            limits = self._limits
            code = Code.HEADERS_TOO_LARGE
            text = (
                f"the request's head is too large; expected at most {limits.max_head_lines} lines"
                f" of {limits.max_head_line_bytes} bytes"
            )
        elif status < 500:
            code, text = Code.INVALID_ARGUMENT, "the request cannot be read; expected HTTP/1.1"
        else:
            _log.error("a request failed on an unexpected error", exc_info=exc)
        response = error_response(MeshError(code, text))
        response.force_close()
        return response

    def _expect_head(self) -> None:
        self._head_timer = self._loop.call_later(self._limits.head_timeout_s, self._end_headless)

    def _end_headless(self) -> None:
        self._head_timer = None
        _log.info("a client sent no whole head in %g s", self._limits.head_timeout_s)
        self.force_close()

    def _end_unread(self) -> None:
        _log.info("a client read nothing for %g s", self._limits.write_timeout_s)
        if self.transport is not None:
            self.transport.abort()


def watch_requests(app: web.Application) -> None:
    """Tell connections when an answer is made, so that they know whose turn it is."""

    @web.middleware
    async def watch(request: web.Request, handler: _Handler) -> web.StreamResponse:
        connection = request.protocol
        if not isinstance(connection, _Connection):
            return await handler(request)
        connection.begin_answer()
        try:
            return await handler(request)
        finally:
            connection.end_answer()

    app.middlewares.insert(0, watch)
