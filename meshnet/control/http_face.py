"""The HTTP listener of the JSON face: whatever comes, the answer is JSON.

aiohttp's low-level server: its router, middlewares and error pages are not used.
"""

from __future__ import annotations

import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from aiohttp import HttpVersion11, http_exceptions, web

from meshnet.control.httpmeta import mesh_error_answer
from meshnet.errors import Code, MeshError
from meshnet.listen import BACKLOG

__all__ = ["MAX_BODY_BYTES", "Handler", "HttpFace"]

MAX_BODY_BYTES: Final = 1024 * 1024

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_log = logging.getLogger(__name__)


class HttpFace:
    """Answers requests until closed.

    Args:
        handle: answers all but `own`.
        own: GET handlers of exact paths.
        close_grace_s: what running requests get when the face closes.
        tls: a server's context; None for no TLS.
    """

    def __init__(
        self,
        handle: Handler,
        own: Mapping[str, Handler],
        close_grace_s: float,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._handle = handle
        self._own = own
        self._close_grace_s = close_grace_s
        self._tls = tls
        self._runner: web.ServerRunner | None = None

    async def start(self, listener: socket.socket) -> None:
        """Serve on a socket that is bound."""
        server = _Server(
            self._answer,
            request_factory=_make_request,
            handler_cancellation=True,  # a client that goes away cancels its call
            access_log=None,
            auto_decompress=False,
        )
        self._runner = web.ServerRunner(server, shutdown_timeout=self._close_grace_s)
        await self._runner.setup()
        site = web.SockSite(self._runner, listener, ssl_context=self._tls, backlog=BACKLOG)
        await site.start()

    async def close(self) -> None:
        """Stop to listen, give running requests a moment, close every connection."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.StreamResponse:
        own = self._own.get(request.path)
        try:
            await _meet_expectation(request)
            if own is None:
                return await self._handle(request)
            if request.method in ("GET", "HEAD"):
                return await own(request)
            raise MeshError(
                Code.METHOD_NOT_ALLOWED,
                f"{request.method} is not served at {request.path!r}: expected GET",
            )
        except MeshError as error:
            return _response(error)
        except Exception:  # noqa: BLE001 - the edge: no traceback is an answer
            _log.exception("%s %s failed", request.method, request.path)
            return _response(MeshError(Code.INTERNAL, "the control plane failed; see its log"))


async def _meet_expectation(request: web.BaseRequest) -> None:
    """Let a client send its body that waits to be told so (RFC 9110, 10.1.1)."""
    expected = request.headers.get("Expect")
    if expected is None or request.version < HttpVersion11:
        return
    if expected.lower() != "100-continue":
        raise MeshError(
            Code.INVALID_ARGUMENT,
            f"Expect {expected[:100]!r}: expected 100-continue",
            field="Expect",
        )
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # no answer has begun


class _Server(web.Server):
    """Makes protocols whose own errors are JSON too."""

    def __call__(self) -> web.RequestHandler:
        return _Protocol(self, loop=self._loop, **self._kwargs)


class _Protocol(web.RequestHandler):
    """Answers what is no HTTP in Status JSON."""

    __slots__ = ()

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
            code, text = Code.HEADERS_TOO_LARGE, "a line of the head is over 8190 bytes"
        elif status < 500:
            first = next(iter((message or "").splitlines()), "").strip(" :")
            code, text = Code.INVALID_ARGUMENT, f"not a request of HTTP/1.1: {first[:200]}"
        _log.info("a request of %s: %s", request.remote, text)
        response = _response(MeshError(code, text))
        response.force_close()
        return response


def _make_request(
    message: Any, payload: Any, protocol: Any, writer: Any, task: Any
) -> web.BaseRequest:
    loop = task.get_loop()
    return web.BaseRequest(
        message, payload, protocol, writer, task, loop, client_max_size=MAX_BODY_BYTES
    )


def _response(error: MeshError) -> web.Response:
    number, headers, body = mesh_error_answer(error)
    return web.Response(status=number, headers=headers, body=body)
