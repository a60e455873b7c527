"""The activation plane's server: a listening socket, and a thread for each connection.

Connections live long and carry one request at a time, and what a thread waits for it waits
for in the kernel: no event loop wakes in between. See ARCHITECTURE.md, Decisions, for what
that saves.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import selectors
import socket
import threading
import time
from typing import Final

from meshnet.adaptive import EncodingChooser
from meshnet.compression import CompressionPolicies
from meshnet.credentials import Credentials
from meshnet.errors import Code, MeshError
from meshnet.grammar import Phase
from meshnet.listen import listen
from meshnet.plane.crowding import is_crowded, slowest
from meshnet.plane.exchange import Exchange
from meshnet.plane.handler import PlaneHandler, PlaneLimits
from meshnet.plane.http1 import build_answer
from meshnet.plane.service import Service
from meshnet.plane.stream import Stream
from meshnet.plane.tls import plain_caller
from meshnet.plane.tls_stream import TlsStream
from meshnet.plane.watcher import Watcher
from meshnet.problem import pack_problem

__all__ = ["PlaneHandler", "PlaneLimits", "PlaneServer"]

logger = logging.getLogger(__name__)

_MAX_ENDING: Final = 64
"""Connections past the limit whose threads are about to end."""
_ACCEPT_PAUSE_S: Final = 0.1
_SETTLE_S: Final = 0.1
"""What threads get in any case that are about to end by themselves."""
_CANCELLED_S: Final = 2.0
"""What a cancelled request gets to end; one that computes goes on, and is left behind."""
_OUT_OF_RESOURCES: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class PlaneServer:
    """Serves ``POST /forward``, what is under ``/sessions/`` and the handler's cold GETs.

    Args:
        handler: computes chunks, on the connections' threads.
        policies: decide which answers are compressed, where the caller accepts it.
        route_condition: the policies' name for the links that callers come over.
        limits: granted to callers.
        tls: credentials, where connections are to be encrypted. If they name who this is in a
            mesh, nodes and gateways of it are served alone.

    Raises:
        ValueError: the policies know no such `route_condition`.
        ConfigError: the credentials have no certificate.
    """

    def __init__(
        self,
        handler: PlaneHandler,
        *,
        policies: CompressionPolicies,
        route_condition: str = "lan",
        limits: PlaneLimits | None = None,
        tls: Credentials | None = None,
    ) -> None:
        for phase in Phase:
            policies.for_condition(route_condition, phase.value)
        chooser = EncodingChooser(policies, route_condition, lock=threading.Lock())
        self._service = Service(handler, chooser, limits or PlaneLimits(), tls)
        self._tls = tls
        if tls is not None:
            tls.server  # noqa: B018 - says what is missing
        self._exchanges: set[Exchange] = set()
        self._changed = threading.Condition()
        self._accepting: threading.Thread | None = None
        self._listener: socket.socket | None = None
        self._watcher: Watcher | None = None
        self._stop = -1

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen, and give the bound host and port (`port` 0 takes a free one).

        Raises:
            ConfigError: the address is taken or not this machine's.
        """
        listener = await listen(host, port, "--listen")
        listener.setblocking(False)
        self._listener = listener
        self._watcher = Watcher()
        stopped, self._stop = os.pipe()
        self._accepting = threading.Thread(
            target=self._accept,
            args=(listener, stopped, self._watcher),
            name="plane-accept",
            daemon=True,
        )
        self._accepting.start()
        bound = listener.getsockname()
        return str(bound[0]), int(bound[1])

    async def close(self, grace_s: float) -> None:
        """Stop accepting; let requests in flight finish within `grace_s`, then cancel them.

        Idle connections are closed at once; answers sent meanwhile say that theirs closes.
        """
        self._service.closing = True
        if self._accepting is None or self._watcher is None or self._listener is None:
            return
        os.close(self._stop)
        await asyncio.to_thread(self._end, self._accepting, self._listener, grace_s)
        self._watcher.close()
        self._accepting = None

    def end_removed(self) -> None:
        """End what is in flight for callers that are members no more; from any thread."""
        with self._changed:
            exchanges = list(self._exchanges)
        for exchange in exchanges:
            exchange.cancel_if_removed()

    def _end(self, accepting: threading.Thread, listener: socket.socket, grace_s: float) -> None:
        accepting.join()
        listener.close()
        for exchange in list(self._exchanges):
            exchange.end_if_idle()
        if self._await_none(max(grace_s, _SETTLE_S)):
            return
        left = list(self._exchanges)
        late = sum(not exchange.idle for exchange in left)
        if late:
            logger.warning("%d requests were cancelled after %g s", late, grace_s)
        for exchange in left:
            exchange.cancel()
        self._await_none(_CANCELLED_S)

    def _await_none(self, timeout_s: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not self._exchanges, timeout_s)

    def _accept(self, listener: socket.socket, stopped: int, watcher: Watcher) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(stopped, selectors.EVENT_READ)
            while all(key.fd != stopped for key, _ in selector.select()):
                try:
                    sock, _ = listener.accept()
                except OSError as error:
                    # A caller that left before it was accepted is no trouble of ours; being
                    # out of descriptors passes when connections close.
                    if error.errno in _OUT_OF_RESOURCES:
                        logger.warning("cannot accept connections: %s", error)
                        time.sleep(_ACCEPT_PAUSE_S)
                    continue
                self._admit(sock, watcher)
        os.close(stopped)

    def _admit(self, sock: socket.socket, watcher: Watcher) -> None:
        """Give an accepted connection its thread."""
        sock.setblocking(True)
        num_open, most = len(self._exchanges), self._service.limits.max_connections
        makes_room = is_crowded(num_open, most) and self._hurry_slowest()
        if num_open >= most + _MAX_ENDING or (
            num_open >= most and not makes_room and not self._make_room()
        ):
            self._turn_away(sock)
            return
        try:
            stream = self._open(sock)
        except OSError:
            sock.close()
            return
        exchange = Exchange(stream, self._service)
        thread = threading.Thread(
            target=self._serve, args=(exchange, watcher), name="plane", daemon=True
        )
        with self._changed:
            self._exchanges.add(exchange)
        try:
            thread.start()
        except RuntimeError as error:  # the system gives no more threads
            logger.warning("cannot serve a connection: %s", error)
            self._forget(exchange)

    def _make_room(self) -> bool:
        """End the connection whose caller owes a head for longest; False where none does so long.

        So those who open connections and send nothing cannot keep others out.
        """
        limits = self._service.limits
        now = time.monotonic()
        with self._changed:
            waiting = [
                (since, id(exchange), exchange)
                for exchange in self._exchanges
                if (since := exchange.waits_since) is not None and now - since > limits.spare_idle_s
            ]
        if not waiting:
            return False
        min(waiting)[2].give_way()
        return True

    def _hurry_slowest(self) -> bool:
        """End the body that is overdue for longest, for a crowded server; False where none is."""
        limits = self._service.limits
        with self._changed:
            bodies = [
                (exchange, body)
                for exchange in self._exchanges
                if (body := exchange.stream.receiving) is not None and not exchange.is_hurried
            ]
        found = slowest(
            bodies,
            time.monotonic(),
            spare_s=limits.spare_idle_s,
            bytes_per_s=limits.crowded_bytes_per_s,
        )
        if found is None:
            return False
        found.hurry()
        return True

    def _open(self, sock: socket.socket) -> Stream:
        if self._tls is None:
            return Stream(sock)
        generation, context = self._tls.generation, self._tls.server
        encrypted = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        stream = TlsStream(encrypted, plain_answer=_last_answer(plain_caller()))
        stream.generation = generation
        return stream

    def _turn_away(self, sock: socket.socket) -> None:
        """Answer 503 without reading: best effort, so that a flood costs one send each."""
        limit = self._service.limits.max_connections
        error = MeshError(
            Code.UNAVAILABLE, f"all {limit} connections are in use", retry_after_s=1.0
        )
        with sock:
            sock.setblocking(False)
            if self._tls is not None:
                return
            try:
                sock.send(_last_answer(error))
                sock.shutdown(socket.SHUT_WR)
            except OSError:
                pass

    def _serve(self, exchange: Exchange, watcher: Watcher) -> None:
        descriptor = exchange.stream.fileno()
        watcher.watch(descriptor, exchange.caller.leave)
        try:
            exchange.run()
        except Exception:
            logger.exception("a connection failed")
        finally:
            watcher.forget(descriptor)
            self._forget(exchange)

    def _forget(self, exchange: Exchange) -> None:
        exchange.stream.close()
        with self._changed:
            self._exchanges.discard(exchange)
            self._changed.notify_all()


def _last_answer(error: MeshError) -> bytes:
    """Write an error for a caller whose request is not read."""
    status, fields, body = pack_problem(error)
    return build_answer(status, fields, len(body), close=True) + body
