"""The gRPC face: a grpc.aio listener with health, reflection and errors with details."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from meshnet.control.keepalive import SERVER_OPTIONS
from meshnet.control.status import DETAILS_KEY, to_status
from meshnet.errors import Code, ConfigError, MeshError
from meshnet.listen import host_port

__all__ = ["Observer", "RpcServer"]

MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024

Observer = Callable[[str, str, float], None]
"""Told the method (``/package.Service/Method``), the code's name and the seconds of each call."""

Trailing = tuple[tuple[str, str], ...]
"""Metadata: pairs of key and value."""

_log = logging.getLogger(__name__)

_OPTIONS: Final = (
    ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a second listener
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    *SERVER_OPTIONS,
)


class RpcServer:
    """Serves gRPC services until closed.

    Args:
        add_services: functions that register a servicer with a server, as generated.
        names: full names of those services, for health and reflection.
        observe: told of each call that ended.
        trailing: gives metadata to add to the end of each unary call.
    """

    def __init__(
        self,
        add_services: Sequence[Callable[[grpc.aio.Server], None]],
        names: Sequence[str],
        observe: Observer,
        trailing: Callable[[], Trailing] = tuple,
    ) -> None:
        interceptor = _Errors(observe, trailing)
        self._server = grpc.aio.server(interceptors=(interceptor,), options=_OPTIONS)
        for add in add_services:
            add(self._server)
        self._names = (*names, "")
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    def bind(self, host: str, port: int) -> int:
        """Take an address; gives the port (`port` itself unless 0).

        Raises:
            ConfigError: it is taken, or not this machine's.
        """
        address = host_port(host, port)
        try:
            return self._server.add_insecure_port(address)
        except RuntimeError:
            raise ConfigError(
                f"cannot listen on {address}: the port is taken or the address is not this "
                "machine's",
                field="grpc_port",
            ) from None

    def bind_unix(self, path: str) -> str:
        """Listen on a unix socket too; gives the target for a channel.

        Raises:
            ConfigError: no socket can be made there, for example since the path is too long.
        """
        try:
            self._server.add_insecure_port(f"unix:{path}")
        except RuntimeError:
            raise ConfigError(
                f"cannot make the socket {path}: expected a folder of at most 80 characters "
                "that can be written to",
                field="TMPDIR",
            ) from None
        return f"unix:{path}"

    async def start(self) -> None:
        """Start to serve, and say so in health."""
        await self._server.start()
        for name in self._names:
            await self._health.set(name, health_pb2.HealthCheckResponse.SERVING)

    async def close(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s` seconds, stop."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


class _Errors(grpc.aio.ServerInterceptor):
    """Ends calls with what MeshError says; hides every other exception behind INTERNAL."""

    def __init__(self, observe: Observer, trailing: Callable[[], Trailing]) -> None:
        self._observe = observe
        self._trailing = trailing

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Wrap the method's handler in one of the same arity."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = str(handler_call_details.method)
        coding = {
            "request_deserializer": handler.request_deserializer,
            "response_serializer": handler.response_serializer,
        }
        if handler.unary_unary is not None:
            unary = self._unary(method, handler.unary_unary)
            return grpc.unary_unary_rpc_method_handler(unary, **coding)
        if handler.unary_stream is not None:
            stream = self._stream(method, handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(stream, **coding)
        return handler

    def _unary(self, method: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            start_s = time.monotonic()
            code = "OK"
            try:
                answer = await call(request, context)
                context.set_trailing_metadata(self._trailing())
                return answer
            except asyncio.CancelledError:
                code = Code.CANCELLED.name
                raise
            except Exception as error:  # noqa: BLE001 - the edge: no traceback is an answer
                code = await _abort(method, error, context, self._trailing())
            finally:
                self._observe(method, code, time.monotonic() - start_s)

        return guarded

    def _stream(self, method: str, call: Callable[..., AsyncIterator[Any]]) -> Callable[..., Any]:
        async def guarded(
            request: Any, context: grpc.aio.ServicerContext[Any, Any]
        ) -> AsyncIterator[Any]:
            start_s = time.monotonic()
            code = "OK"
            try:
                async for response in call(request, context):
                    yield response
            except (asyncio.CancelledError, GeneratorExit):
                code = Code.CANCELLED.name
                raise
            except Exception as error:  # noqa: BLE001 - the edge: no traceback is an answer
                code = await _abort(method, error, context)
            finally:
                self._observe(method, code, time.monotonic() - start_s)

        return guarded


async def _abort(
    method: str,
    error: Exception,
    context: grpc.aio.ServicerContext[Any, Any],
    trailing: Trailing = (),
) -> str:
    """Set the call's status; the call then ends as aborted with details."""
    if not isinstance(error, MeshError):
        _log.error("%s failed", method, exc_info=error)
        error = MeshError(Code.INTERNAL, "the control plane failed to answer; see its log")
    status = to_status(error)
    context.set_trailing_metadata(((DETAILS_KEY, status.SerializeToString()), *trailing))
    context.set_code(_GRPC_CODES[status.code])
    context.set_details(status.message)
    return error.code.name


_GRPC_CODES: Final = {code.value[0]: code for code in grpc.StatusCode}
