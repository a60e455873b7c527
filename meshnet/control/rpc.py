"""The gRPC face: a grpc.aio listener with health, reflection and errors with details."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from inspect import isawaitable
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc  # type: ignore[import-untyped]
from grpc_reflection.v1alpha import reflection  # type: ignore[import-untyped]

from meshnet.control.caller import acting
from meshnet.control.guard import Caller, Guard
from meshnet.control.keepalive import SERVER_OPTIONS
from meshnet.control.limits import DEFAULT_LIMITS, ControlLimits
from meshnet.control.status import DETAILS_KEY, to_status
from meshnet.credentials import Credentials
from meshnet.errors import Code, ConfigError, MeshError
from meshnet.listen import host_port

__all__ = ["Observer", "RpcServer"]

Observer = Callable[[str, str, float], None]
"""Told the method (``/package.Service/Method``), the code's name and the seconds of each call."""

Context = grpc.aio.ServicerContext[Any, Any]

Trailing = tuple[tuple[str, str], ...]
"""Metadata: pairs of key and value."""

_log = logging.getLogger(__name__)


def _options(limits: ControlLimits) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.so_reuseport", 0),  # a port that is taken is an error, not a second listener
        ("grpc.max_receive_message_length", limits.max_message_bytes),
        ("grpc.max_metadata_size", limits.max_metadata_bytes),
        ("grpc.absolute_max_metadata_size", limits.max_metadata_bytes),
        ("grpc.max_concurrent_streams", limits.max_streams),
        ("grpc.server_handshake_timeout_ms", int(limits.head_timeout_s * 1000)),
        ("grpc.max_connection_idle_ms", int(limits.grpc_idle_timeout_s * 1000)),
        *SERVER_OPTIONS,
    )


class RpcServer:
    """Serves gRPC services until closed.

    Args:
        add_services: functions that register a servicer with a server, as generated.
        names: full names of those services, for health and reflection.
        observe: told of each call that ended.
        trailing: gives metadata to add to the end of each unary call.
        guard: refuses what is not a caller's to call; None lets everybody call everything.
        limits: of messages and connections.
    """

    def __init__(
        self,
        add_services: Sequence[Callable[[grpc.aio.Server], None]],
        names: Sequence[str],
        observe: Observer,
        trailing: Callable[[], Trailing] = tuple,
        guard: Guard | None = None,
        limits: ControlLimits = DEFAULT_LIMITS,
    ) -> None:
        interceptor = _Edge(observe, trailing, guard)
        self._server = grpc.aio.server(interceptors=(interceptor,), options=_options(limits))
        for add in add_services:
            add(self._server)
        self._names = (*names, "")
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*names, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )

    def bind(self, host: str, port: int, credentials: Credentials | None = None) -> int:
        """Take an address; gives the port (`port` itself unless 0).

        Args:
            host: of the address.
            port: 0 for any.
            credentials: for TLS, which demands certificates; those of callers to come are
                checked against what the files have by then. None for no TLS.

        Raises:
            ConfigError: it is taken, or not this machine's.
        """
        address = host_port(host, port)
        try:
            if credentials is None:
                return self._server.add_insecure_port(address)
            return self._server.add_secure_port(address, _tls(credentials))
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


def _tls(credentials: Credentials) -> grpc.ServerCredentials:
    def current() -> grpc.ServerCertificateConfiguration:
        pem = credentials.pem()
        return grpc.ssl_server_certificate_configuration([(pem.key, pem.chain)], pem.ca)

    # gRPC asks at every handshake, in a thread of its own
    return grpc.dynamic_ssl_server_credentials(
        current(), current, require_client_authentication=True
    )


class _Edge(grpc.aio.ServerInterceptor):
    """Lets the guard refuse calls, and ends them with what MeshError says.

    Every other exception is hidden behind INTERNAL.
    """

    def __init__(
        self, observe: Observer, trailing: Callable[[], Trailing], guard: Guard | None
    ) -> None:
        self._observe = observe
        self._trailing = trailing
        self._guard = guard

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
        if handler.stream_stream is not None:  # reflection
            stream = self._stream(method, handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(stream, **coding)
        raise NotImplementedError(f"{method} streams requests for one response")

    async def _admit(self, context: Context, method: str, request: object) -> Caller | None:
        return (
            None if self._guard is None else await self._guard.admit_rpc(context, method, request)
        )

    def _unary(self, method: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        async def guarded(request: Any, context: Context) -> Any:
            start_s = time.monotonic()
            code = "OK"
            try:
                caller = await self._admit(context, method, request)
                with acting(None if caller is None else caller.identity):
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

    def _stream(self, method: str, call: Callable[..., Any]) -> Callable[..., Any]:
        async def guarded(request: Any, context: Context) -> AsyncIterator[Any]:
            start_s = time.monotonic()
            code = "OK"
            try:
                caller = await self._admit(context, method, request)
                with acting(None if caller is None else caller.identity):
                    responses = call(request, context)
                if isawaitable(responses):  # health's, which writes to the context
                    await responses
                    return
                async with aclosing(responses):
                    while True:
                        with acting(None if caller is None else caller.identity):
                            response = await anext(responses, None)
                        if response is None:
                            break
                        if self._guard is not None:  # may have been revoked meanwhile
                            await self._guard.check(caller)
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
    context: Context,
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
