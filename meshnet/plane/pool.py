"""Connections to other nodes that are kept for the next request."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from functools import partial

from meshnet.credentials import Credentials
from meshnet.plane.connection import Connection
from meshnet.plane.dial import no_host_name, split_host_port
from meshnet.plane.links import LinkSettings
from meshnet.plane.tls import WrongNodeError, check_node
from meshnet.topology import NodeId

__all__ = ["ConnectionPool"]


class _Lane:
    """The connections to one address."""

    __slots__ = ("idle", "turn", "users")

    def __init__(self, max_open: int) -> None:
        self.idle: list[Connection] = []
        self.turn = asyncio.Semaphore(max_open)
        self.users = 0


class ConnectionPool:
    """Keep-alive connections per address; the one used last is taken first.

    Args:
        settings: of the client that uses it.
    """

    def __init__(self, settings: LinkSettings) -> None:
        self._tls = settings.tls
        self._connect_timeout_s = settings.connect_timeout_s
        self._max_open = settings.max_connections
        self._max_idle = settings.max_idle_connections
        self._lanes: dict[str, _Lane] = {}
        self._closed = False

    async def acquire(
        self, address: str, node: NodeId | None, deadline: float, *, fresh: bool = False
    ) -> tuple[Connection, bool]:
        """Give a connection to `address` and whether it served before; `fresh` forbids that.

        In a mesh whose certificates have names it leads to `node`, or, for None, to any node.

        Each must come back by `release`. Whatever is waited for, here and on the
        connection, fails at `deadline` on the event loop's clock.

        Raises:
            OSError: no connection could be made.
            TimeoutError: none was made, or none was free, in time.
        """
        lane = self._lanes.get(address)
        if lane is None:
            lane = self._lanes[address] = _Lane(self._max_open)
        lane.users += 1
        try:
            if lane.turn.locked():
                async with asyncio.timeout_at(deadline):
                    await lane.turn.acquire()
            else:
                await lane.turn.acquire()
        except BaseException:
            self._leave(address, lane)
            raise
        try:
            connection = None if fresh else self._take_idle(lane, node)
            reused = connection is not None
            if connection is None:
                connection = await self._open(address, node, deadline)
        except BaseException:
            lane.turn.release()
            self._leave(address, lane)
            raise
        connection.set_deadline(deadline - asyncio.get_running_loop().time())
        return connection, reused

    def release(self, address: str, connection: Connection, *, reusable: bool) -> None:
        """Take a connection back, and keep it where it may serve again."""
        lane = self._lanes[address]
        full = len(lane.idle) >= self._max_idle
        if self._closed or not reusable or connection.ended or full or self._is_old(connection):
            connection.close()
        else:
            connection.set_deadline(None)
            connection.on_end = partial(self._drop, address, connection)
            lane.idle.append(connection)
        lane.turn.release()
        self._leave(address, lane)

    def close(self) -> None:
        """Close what is idle now, and what is in use as it comes back."""
        self._closed = True
        for address, lane in list(self._lanes.items()):
            while lane.idle:
                lane.idle.pop().close()
            self._forget_unused(address, lane)

    async def _open(self, address: str, node: NodeId | None, deadline: float) -> Connection:
        started = asyncio.get_running_loop().time()
        timeout_s = min(self._connect_timeout_s, deadline - started)
        try:
            async with asyncio.timeout(timeout_s):
                host, port = split_host_port(address)
                sock = await _connect(address, host, port)
                if self._tls is None:
                    return Connection(sock)
                return await _encrypt(sock, self._tls, host, node)
        except TimeoutError:
            raise TimeoutError(f"no connection within {timeout_s:.3g} s") from None

    def _take_idle(self, lane: _Lane, node: NodeId | None) -> Connection | None:
        while lane.idle:
            connection = lane.idle.pop()
            connection.on_end = None
            if connection.is_reusable() and not self._is_old(connection):
                with contextlib.suppress(WrongNodeError):
                    check_node(self._tls, connection, node)
                    return connection
            connection.close()
        return None

    def _is_old(self, connection: Connection) -> bool:
        """Tell whether credentials were renewed since it was opened."""
        return self._tls is not None and connection.generation != self._tls.generation

    def _drop(self, address: str, connection: Connection) -> None:
        """Close an idle connection that its other end has closed."""
        lane = self._lanes[address]
        lane.idle.remove(connection)
        connection.close()
        self._forget_unused(address, lane)

    def _leave(self, address: str, lane: _Lane) -> None:
        lane.users -= 1
        self._forget_unused(address, lane)

    def _forget_unused(self, address: str, lane: _Lane) -> None:
        """Forget an address that nothing uses: callers name any number of them in routes."""
        if lane.users == 0 and not lane.idle:
            del self._lanes[address]


async def _encrypt(
    sock: socket.socket, tls: Credentials, host: str, node: NodeId | None
) -> Connection:
    generation = tls.generation
    encrypted = tls.client.wrap_socket(sock, server_hostname=host, do_handshake_on_connect=False)
    connection = Connection(encrypted)
    connection.generation = generation
    try:
        await connection.begin()
        check_node(tls, connection, node)
    except BaseException:
        connection.close()
        raise
    return connection


async def _connect(address: str, host: str, port: int) -> socket.socket:
    """Connect to ``host:port``, trying each address that the name has."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError:
        raise no_host_name(address, host) from None
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, target in found:
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await loop.sock_connect(sock, target)
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
        else:
            return sock
    raise failure
