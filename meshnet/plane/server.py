"""The activation plane's server: a listening socket and its connections."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket

from meshnet.compression import CompressionPolicies
from meshnet.errors import Code, MeshError
from meshnet.grammar import Phase
from meshnet.listen import listen
from meshnet.plane.connection import Connection
from meshnet.plane.exchange import Exchange, Service
from meshnet.plane.handler import PlaneHandler, PlaneLimits
from meshnet.plane.http1 import build_answer
from meshnet.problem import pack_problem

__all__ = ["PlaneHandler", "PlaneLimits", "PlaneServer"]

logger = logging.getLogger(__name__)

_ACCEPT_PAUSE_S = 0.1
_OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class PlaneServer:
    """Serves ``POST /forward``, ``DELETE /sessions/{id}`` and the handler's cold GETs.

    Args:
        handler: computes chunks.
        policies: decide which answers are compressed, where the caller accepts it.
        route_condition: the policies' name for the links that callers come over.
        limits: granted to callers.

    Raises:
        ValueError: the policies know no such `route_condition`.
    """

    def __init__(
        self,
        handler: PlaneHandler,
        *,
        policies: CompressionPolicies,
        route_condition: str = "lan",
        limits: PlaneLimits | None = None,
    ) -> None:
        for phase in Phase:
            policies.for_condition(route_condition, phase.value)
        self._service = Service(handler, policies, route_condition, limits or PlaneLimits())
        self._listener: socket.socket | None = None
        self._accepting: asyncio.Task[None] | None = None
        self._exchanges: dict[asyncio.Task[None], Exchange] = {}

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen, and give the bound host and port (`port` 0 takes a free one).

        Raises:
            ConfigError: the address is taken or not this machine's.
        """
        listener = await listen(host, port, "--listen")
        listener.setblocking(False)
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener))
        bound = listener.getsockname()
        return str(bound[0]), int(bound[1])

    async def close(self, grace_s: float) -> None:
        """Stop accepting; let requests in flight finish within `grace_s`, then cancel them.

        Idle connections are closed at once; answers sent meanwhile say that theirs closes.
        """
        self._service.closing = True
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])
        if self._listener is not None:
            self._listener.close()
        for task, exchange in self._exchanges.items():
            if exchange.idle:
                task.cancel()
        tasks = list(self._exchanges)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace_s)
            for task in late:
                task.cancel()
            if late:
                logger.warning("%d requests were cancelled after %g s", len(late), grace_s)
                await asyncio.wait(late)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(listener)
            except OSError as error:
                # A caller that left before it was accepted is no trouble of ours; being
                # out of descriptors passes when connections close.
                if error.errno in _OUT_OF_RESOURCES:
                    logger.warning("cannot accept connections: %s", error)
                    await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            if len(self._exchanges) >= self._service.limits.max_connections:
                self._turn_away(sock)
                continue
            try:
                connection = Connection(sock)
            except OSError:
                sock.close()
                continue
            exchange = Exchange(connection, self._service)
            task = asyncio.create_task(exchange.run())
            self._exchanges[task] = exchange
            task.add_done_callback(self._forget)

    def _turn_away(self, sock: socket.socket) -> None:
        """Answer 503 without reading: best effort, so that a flood costs one send each."""
        limit = self._service.limits.max_connections
        error = MeshError(
            Code.UNAVAILABLE, f"all {limit} connections are in use", retry_after_s=1.0
        )
        status, fields, body = pack_problem(error)
        with sock:
            sock.setblocking(False)
            try:
                sock.send(build_answer(status, fields, len(body), close=True) + body)
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass

    def _forget(self, task: asyncio.Task[None]) -> None:
        # Also of a task that was cancelled before its first step.
        self._exchanges.pop(task).connection.close()
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a connection failed", exc_info=error)
