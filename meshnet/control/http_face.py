"""The HTTP listener of the JSON face: whatever comes, the answer is JSON.

aiohttp's low-level server: its router, middlewares and error pages are not used.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Mapping

from aiohttp import HttpVersion11, web

from meshnet.control.http_connection import BoundedServer, error_response
from meshnet.control.limits import DEFAULT_LIMITS, ControlLimits
from meshnet.errors import Code, MeshError
from meshnet.listen import BACKLOG

__all__ = ["Handler", "HttpFace"]

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_log = logging.getLogger(__name__)


class HttpFace:
    """Answers requests until closed.

    Args:
        handle: answers all but `own`.
        own: GET handlers of exact paths.
        close_grace_s: what running requests get when the face closes.
        tls: a server's context; None for no TLS.
        limits: of connections and requests.
    """

    def __init__(
        self,
        handle: Handler,
        own: Mapping[str, Handler],
        close_grace_s: float,
        tls: ssl.SSLContext | None = None,
        limits: ControlLimits = DEFAULT_LIMITS,
    ) -> None:
        self._handle = handle
        self._own = own
        self._close_grace_s = close_grace_s
        self._tls = tls
        self._limits = limits
        self._serving: asyncio.Server | None = None
        self._runner: web.ServerRunner | None = None

    async def start(self, listener: socket.socket) -> None:
        """Serve on a socket that is bound."""
        server = BoundedServer(self._answer, self._limits)
        self._runner = web.ServerRunner(server, shutdown_timeout=self._close_grace_s)
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        tls_timeout_s = None if self._tls is None else self._limits.head_timeout_s
        self._serving = await loop.create_server(
            server,
            sock=listener,
            backlog=BACKLOG,
            ssl=self._tls,
            ssl_handshake_timeout=tls_timeout_s,
            ssl_shutdown_timeout=tls_timeout_s,
        )

    async def close(self) -> None:
        """Stop to listen, give running requests a moment, close every connection."""
        if self._serving is not None:
            self._serving.close()
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
            return error_response(error)
        except Exception:  # noqa: BLE001 - the edge: no traceback is an answer
            _log.exception("%s %s failed", request.method, request.path)
            return error_response(MeshError(Code.INTERNAL, "the control plane failed; see its log"))


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
