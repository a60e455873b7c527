"""Calls to whichever replica of a control plane answers: deadlines, retries, failover."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import grpc

from meshnet.control.connection import CREDENTIALS_HINT, Connection, Replicas
from meshnet.control.status import from_status, status_of
from meshnet.credentials import Credentials
from meshnet.errors import Code, MeshError

__all__ = ["Calls", "ClientSettings"]

_REFUSALS: Final = ("Socket closed", "handshake", "Connection reset")
"""In gRPC's words for a connection that ends before any call."""


@dataclass(frozen=True, slots=True)
class ClientSettings:
    """Patience of a client.

    Attributes:
        timeout_s: for a call with all its retries.
        attempt_timeout_s: for one attempt.
        failover_timeout_s: for one attempt, if there are several replicas; longer than a
            replica needs to find a member of etcd that answers.
        backoff_s: before the first retry; doubles, with jitter.
        max_backoff_s: at most.
    """

    timeout_s: float = 10.0
    attempt_timeout_s: float = 5.0
    failover_timeout_s: float = 3.5
    backoff_s: float = 0.05
    max_backoff_s: float = 1.0


class Calls:
    """Calls of one client.

    Args:
        urls: addresses of the replicas, with commas between.
        settings: see there.
        credentials: this process's; None for a mesh that is open.

    Raises:
        ConfigError: an address cannot be read, or needs credentials.
    """

    def __init__(
        self, urls: str, settings: ClientSettings, credentials: Credentials | None = None
    ) -> None:
        self._settings = settings
        self._replicas = Replicas(urls, credentials)

    async def close(self) -> None:
        """Close all connections; running calls are cancelled."""
        await self._replicas.close()

    async def call(
        self,
        method: Callable[[grpc.aio.Channel], Callable[..., Awaitable[Any]]],
        request: object,
        timeout_s: float | None,
    ) -> Any:
        """Call until there is an answer or the time is up; gives the answer.

        Args:
            method: gives the method of a channel.
            request: its request.
            timeout_s: for the call with all its retries; None for the settings'.

        Raises:
            MeshError: the answer, or that there was none.
        """
        settings = self._settings
        deadline_s = time.monotonic() + (timeout_s or settings.timeout_s)
        backoff_s = settings.backoff_s
        left_to_ask = len(self._replicas)
        while True:
            connection = self._replicas.current
            left_s = deadline_s - time.monotonic()
            attempt_s = max(0.001, min(left_s, self._attempt_timeout_s))
            try:
                async with connection.channel(attempt_s) as channel:
                    return await method(channel)(request, timeout=attempt_s)
            except grpc.aio.AioRpcError as rpc_error:
                error = _mesh_error(rpc_error, connection)
            except MeshError as mesh_error:
                error = mesh_error
            except grpc.aio.UsageError:  # closed under the call
                raise MeshError(Code.CANCELLED, "the client was closed") from None
            if not self._may_ask_again(error):
                raise error
            self._replicas.leave(connection)
            left_to_ask -= 1
            if left_to_ask > 0 and time.monotonic() < deadline_s:
                continue  # at another replica, at once
            pause_s = backoff_s * random.uniform(0.5, 1.0)  # noqa: S311 - jitter, no secret
            if time.monotonic() + pause_s >= deadline_s:
                raise error
            await asyncio.sleep(pause_s)
            backoff_s = min(2 * backoff_s, settings.max_backoff_s)
            left_to_ask = len(self._replicas)

    async def stream(
        self, method: Callable[[grpc.aio.Channel], Callable[..., Any]], request: object
    ) -> AsyncGenerator[Any, None]:
        """Give what a stream gives; no deadline, and no retry once begun.

        Raises:
            MeshError: how it ended.
        """
        connection = self._replicas.current
        async with connection.channel(self._settings.attempt_timeout_s) as channel:
            call = method(channel)(request)
            try:
                async for response in call:
                    yield response
            except grpc.aio.AioRpcError as rpc_error:
                error = _mesh_error(rpc_error, connection)
                if self._may_ask_again(error):
                    self._replicas.leave(connection)  # the next stream goes elsewhere
                raise error from None
            finally:
                call.cancel()

    @property
    def _attempt_timeout_s(self) -> float:
        """Seconds for one attempt: shorter while another replica can be asked."""
        has_others = len(self._replicas) > 1
        settings = self._settings
        return settings.failover_timeout_s if has_others else settings.attempt_timeout_s

    def _may_ask_again(self, error: MeshError) -> bool:
        """Whether the call got no answer that another attempt could not better."""
        if error.code is Code.UNAVAILABLE and error.reason is None:
            return True
        has_others = len(self._replicas) > 1
        return has_others and (
            error.reason in ("STORE_UNAVAILABLE", "STOPPING")
            or (error.code is Code.DEADLINE_EXCEEDED and error.reason is None)
        )


def _mesh_error(error: grpc.aio.AioRpcError, connection: Connection) -> MeshError:
    status = status_of(error.code().value[0], error.details() or "", error.trailing_metadata())
    found = from_status(status)
    if found.code is Code.UNAVAILABLE and any(sign in found.message for sign in _REFUSALS):
        hint = (
            "perhaps the credentials are of another mesh, or have expired"
            if connection.is_secure
            else f"if it demands certificates, {CREDENTIALS_HINT}"
        )
        return MeshError(found.code, f"{found.message}; {hint}", reason=found.reason)
    return found
