"""Connections of the JSON face: one that is slow, or no HTTP, ends with an answer or without."""

from __future__ import annotations

import logging
from typing import Any

from aiohttp import http_exceptions, web

from meshnet.connections import BoundedConnection, handler_options
from meshnet.control.httpmeta import mesh_error_answer
from meshnet.control.limits import ControlLimits
from meshnet.errors import Code, MeshError

__all__ = ["BoundedServer", "error_response"]

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
            auto_decompress=False,
            **handler_options(limits),
        )
        self.limits = limits
        self._open: set[BoundedConnection] = set()

    @property
    def num_open(self) -> int:
        """How many connections are open."""
        return len(self._open)

    def __call__(self) -> web.RequestHandler:
        """Make the protocol of a connection that was accepted."""
        return _Connection(self, self.limits, self._open, loop=self._loop, **self._kwargs)

    def _make_bounded(
        self, message: Any, payload: Any, protocol: Any, writer: Any, task: Any
    ) -> web.BaseRequest:
        if isinstance(protocol, _Connection):
            protocol.end_of_head()
        size = self.limits.max_body_bytes
        return web.BaseRequest(
            message, payload, protocol, writer, task, task.get_loop(), client_max_size=size
        )


class _Connection(BoundedConnection):
    """One connection; aiohttp's own keep-alive timer bounds the wait for later heads."""

    __slots__ = ()

    def answer_unreadable(
        self, request: web.BaseRequest, status: int, error: BaseException | None, message: str
    ) -> web.StreamResponse:
        code, text = Code.INTERNAL, "the control plane failed to answer"
        if isinstance(error, http_exceptions.LineTooLong):
            size = self._limits.max_head_line_bytes
            code, text = Code.HEADERS_TOO_LARGE, f"a line of the head is over {size} bytes"
        elif status < 500:
            first = next(iter(message.splitlines()), "").strip(" :")
            code, text = Code.INVALID_ARGUMENT, f"not a request of HTTP/1.1: {first[:200]}"
        _log.info("a request of %s: %s", request.remote, text)
        return error_response(MeshError(code, text))


def error_response(error: MeshError) -> web.Response:
    """Give an error as the JSON face answers it."""
    number, headers, body = mesh_error_answer(error)
    return web.Response(status=number, headers=headers, body=body)
