"""The OpenAI endpoint's connections: what is slow or no HTTP ends with an answer or without one."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import cast

from aiohttp import http_exceptions, web

from meshnet.connections import LINGER_S, BoundedConnection, handler_options
from meshnet.errors import Code, MeshError
from meshnet.listen import BACKLOG
from meshnet_gateway.limits import GatewayLimits
from meshnet_gateway.openai_errors import error_response

__all__ = ["LimitedSite", "watch_requests"]

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
        self._open: set[BoundedConnection] = set()

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
            ssl_shutdown_timeout=None if tls is None else LINGER_S,
        )


class _Connection(BoundedConnection):
    """One connection, which waits for a head between answers too: from its first byte on."""

    __slots__ = ("_is_answering",)

    def __init__(
        self,
        server: web.Server,
        loop: asyncio.AbstractEventLoop,
        limits: GatewayLimits,
        others: set[BoundedConnection],
    ) -> None:
        super().__init__(server, limits, others, loop=loop, **handler_options(limits))
        self._is_answering = False

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_open = self.transport is not None
        if is_open and data and not self._is_answering and self._head_timer is None:
            self.expect_head()

    def begin_answer(self) -> None:
        """Take note that a head came whole, and that its answer is made."""
        self._is_answering = True
        self.end_of_head()

    def end_answer(self) -> None:
        """Take note that the next head may come."""
        self._is_answering = False

    def answer_unreadable(
        self, request: web.BaseRequest, status: int, error: BaseException | None, message: str
    ) -> web.StreamResponse:
        code, text = Code.INTERNAL, "the gateway failed on this request; its log says where"
        if isinstance(error, http_exceptions.LineTooLong) or "headers" in message.lower():
            limits = self._limits
            code = Code.HEADERS_TOO_LARGE
            text = (
                f"the request's head is too large; expected at most {limits.max_head_lines} lines"
                f" of {limits.max_head_line_bytes} bytes"
            )
        elif status < 500:
            code, text = Code.INVALID_ARGUMENT, "the request cannot be read; expected HTTP/1.1"
        else:
            _log.error("a request failed on an unexpected error", exc_info=error)
        return error_response(MeshError(code, text))

    def end_slow(self) -> None:
        """End it when what was answered before has been sent."""
        self.force_close()


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
