"""Blocking connections to other nodes, kept for the next request of any thread."""

from __future__ import annotations

import socket
import threading
import time
from typing import Final

from meshnet.plane.dial import no_host_name, split_host_port
from meshnet.plane.links import LinkSettings
from meshnet.plane.stream import Stream
from meshnet.plane.tls import WrongNodeError, check_node
from meshnet.plane.tls_stream import TlsStream
from meshnet.topology import NodeId

__all__ = ["HopPool"]

_IDLE_S: Final = 60.0
"""Less than the time after which nodes close what rests."""
_FIRST_REST_S: Final = 0.25
_LONGEST_REST_S: Final = 8.0


class _Lane:
    """The connections to one address, and how it fares.

    Attributes:
        open: connections in use.
        waiting: threads that wait for one.
        idle: kept, with the time each came back at; the last is taken first.
        rest_s: how long the address is left alone after its last failure to answer at all.
        rest_until: when that ends.
    """

    __slots__ = ("idle", "open", "rest_s", "rest_until", "waiting")

    def __init__(self) -> None:
        self.open = 0
        self.waiting = 0
        self.idle: list[tuple[Stream, float]] = []
        self.rest_s = 0.0
        self.rest_until = 0.0


class HopPool:
    """Keep-alive connections per address.

    An address where nothing answers, not even by refusing, is left alone for a while that
    doubles: each attempt to connect would cost a chunk the whole timeout.

    Args:
        settings: of the client that uses it.
    """

    def __init__(self, settings: LinkSettings) -> None:
        self._connect_timeout_s = settings.connect_timeout_s
        self._max_open = settings.max_connections
        self._max_idle = settings.max_idle_connections
        self._tls = settings.tls
        self._lanes: dict[str, _Lane] = {}
        self._lock = threading.Lock()
        self._released = threading.Condition(self._lock)
        self._closed = False

    def acquire(
        self, address: str, node: NodeId | None, deadline: float, *, fresh: bool = False
    ) -> tuple[Stream, bool]:
        """Give a connection to `address` and whether it served before; `fresh` forbids that.

        In a mesh whose certificates have names it leads to `node`, or, for None, to any node.

        Each must come back by `release`. Whatever is waited for, here and on the
        connection, fails at `deadline`, of ``time.monotonic``.

        Raises:
            OSError: no connection could be made.
            TimeoutError: none was made, or none was free, in time.
        """
        with self._lock:
            lane = self._lanes.get(address)
            if lane is None:
                lane = self._lanes[address] = _Lane()
            if lane.open >= self._max_open:
                self._await_turn(lane, deadline)
            lane.open += 1
            stream = lane.idle.pop()[0] if lane.idle and not fresh else None
        try:
            while stream is not None and not self._may_serve(stream, node):
                stream.close()
                with self._lock:
                    stream = lane.idle.pop()[0] if lane.idle else None
            reused = stream is not None
            if stream is None:
                stream = self._open(address, node, lane, deadline)
        except BaseException:
            with self._lock:
                self._leave(address, lane)
            raise
        stream.deadline = deadline
        return stream, reused

    def release(self, address: str, stream: Stream, *, reusable: bool) -> None:
        """Take a connection back, and keep it where it may serve again."""
        with self._lock:
            lane = self._lanes[address]
            keep = reusable and not self._closed and len(lane.idle) < self._max_idle
            keep = keep and not self._is_old(stream)
            if keep:
                lane.idle.append((stream, time.monotonic()))
            self._leave(address, lane)
        if not keep:
            stream.close()

    def _may_serve(self, stream: Stream, node: NodeId | None) -> bool:
        try:
            check_node(self._tls, stream, node)
        except WrongNodeError:
            return False
        return not self._is_old(stream) and stream.is_reusable()

    def _is_old(self, stream: Stream) -> bool:
        """Tell whether credentials were renewed since it was opened."""
        return self._tls is not None and stream.generation != self._tls.generation

    def prune(self) -> None:
        """Close what rested for long or was closed by its node; forget addresses unused."""
        oldest = time.monotonic() - _IDLE_S
        with self._lock:
            for address, lane in list(self._lanes.items()):
                for item in list(lane.idle):
                    if item[1] < oldest or self._is_old(item[0]) or not item[0].is_reusable():
                        lane.idle.remove(item)
                        item[0].close()
                self._forget_unused(address, lane)

    def close(self) -> None:
        """Close what is idle now, and what is in use as it comes back."""
        with self._lock:
            self._closed = True
            for address, lane in list(self._lanes.items()):
                while lane.idle:
                    lane.idle.pop()[0].close()
                self._forget_unused(address, lane)

    def _await_turn(self, lane: _Lane, deadline: float) -> None:
        lane.waiting += 1
        try:
            while lane.open >= self._max_open:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or not self._released.wait(remaining):
                    raise TimeoutError
        finally:
            lane.waiting -= 1

    def _open(self, address: str, node: NodeId | None, lane: _Lane, deadline: float) -> Stream:
        now = time.monotonic()
        if now < lane.rest_until:
            raise TimeoutError(
                f"no connection within {self._connect_timeout_s:.3g} s a moment ago; tried"
                f" again in {lane.rest_until - now:.2g} s"
            )
        timeout_s = min(self._connect_timeout_s, deadline - now)
        try:
            stream = self._connect(address, node, now + timeout_s)
        except TimeoutError:
            lane.rest_s = min(max(_FIRST_REST_S, lane.rest_s * 2), _LONGEST_REST_S)
            lane.rest_until = time.monotonic() + lane.rest_s
            raise TimeoutError(f"no connection within {timeout_s:.3g} s") from None
        lane.rest_s = lane.rest_until = 0.0
        return stream

    def _connect(self, address: str, node: NodeId | None, deadline: float) -> Stream:
        """Connect to ``host:port``, trying each address that the name has."""
        host, port = split_host_port(address)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except UnicodeError:
            raise no_host_name(address, host) from None
        failure = OSError(f"{host} has no address")
        for family, kind, protocol, _, target in found:
            sock = socket.socket(family, kind, protocol)
            try:
                sock.settimeout(max(1e-3, deadline - time.monotonic()))
                sock.connect(target)
                sock.settimeout(None)
                return self._begin(sock, host, node, deadline)
            except OSError as error:
                sock.close()
                failure = error
        raise failure

    def _begin(
        self, sock: socket.socket, host: str, node: NodeId | None, deadline: float
    ) -> Stream:
        if self._tls is None:
            return Stream(sock)
        generation = self._tls.generation
        stream = TlsStream(
            self._tls.client.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
        )
        stream.generation = generation
        stream.set_deadline(deadline - time.monotonic())
        try:
            stream.begin()
            check_node(self._tls, stream, node)
        except OSError:
            stream.close()
            raise
        return stream

    def _leave(self, address: str, lane: _Lane) -> None:
        lane.open -= 1
        if lane.waiting:
            self._released.notify_all()
        if not lane.idle:
            self._forget_unused(address, lane)

    def _forget_unused(self, address: str, lane: _Lane) -> None:
        """Forget an address that nothing uses: callers name any number of them in routes."""
        if lane.open == 0 and not lane.idle and lane.rest_until <= time.monotonic():
            self._lanes.pop(address, None)
