"""Where the replicas of a control plane are, and the channels to their gRPC faces."""

from __future__ import annotations

import asyncio
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import grpc

from meshnet.control.keepalive import CLIENT_OPTIONS
from meshnet.errors import Code, ConfigError, MeshError
from meshnet.listen import host_port

__all__ = ["Connection", "Replicas"]

_OPTIONS: Final = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    *CLIENT_OPTIONS,
)


class Connection:
    """One channel, opened when first needed.

    Args:
        url: ``grpc://HOST:PORT``, ``HOST:PORT``, or ``http://HOST:PORT`` of the JSON face,
            which is then asked for the port of the gRPC face.

    Raises:
        ConfigError: `url` is none of these.
    """

    def __init__(self, url: str) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"grpc://{url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            parts, host, port = urlsplit(""), None, None
        is_plain = parts.path in ("", "/") and not parts.query and parts.username is None
        if parts.scheme not in ("grpc", "http") or not host or not port or not is_plain:
            raise ConfigError(
                f"control plane {url!r}: expected grpc://HOST:PORT or http://HOST:PORT",
                field="control",
            )
        self._host = host
        self._port = port
        self._is_http = parts.scheme == "http"
        self._must_ask = self._is_http
        self._rpc_port = port
        self._channel: grpc.aio.Channel | None = None
        self._lock = asyncio.Lock()

    async def open(self, timeout_s: float) -> grpc.aio.Channel:
        """Give the channel, asking the JSON face for the port first where that is due.

        Raises:
            MeshError: UNAVAILABLE, the JSON face does not answer.
            ConfigError: what answers is no control plane.
        """
        async with self._lock:
            port = self._rpc_port
            if self._must_ask:
                port = await self._ask_port(timeout_s)
                self._must_ask = False
            if self._channel is None or port != self._rpc_port:
                await self.close()
                self._rpc_port = port
                target = host_port(self._host, port)
                self._channel = grpc.aio.insecure_channel(target, options=_OPTIONS)
            return self._channel

    def doubt(self) -> None:
        """Say that a call got no answer: a restart may have moved the gRPC face."""
        self._must_ask = self._is_http

    async def close(self) -> None:
        """Close the channel; running calls are cancelled."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    async def _ask_port(self, timeout_s: float) -> int:
        where = f"http://{host_port(self._host, self._port)}/healthz"
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(where) as response,
            ):
                health = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            why = str(error) or type(error).__name__
            raise MeshError(Code.UNAVAILABLE, f"no answer from {where}: {why}"[:500]) from None
        port = health.get("grpc_port") if isinstance(health, dict) else None
        if not isinstance(port, int) or not 0 < port < 65536:
            raise ConfigError(f"{where} is not a control plane: no grpc_port", field="control")
        return port


class Replicas:
    """The replicas of a control plane, of which one is asked until it is left.

    Args:
        urls: addresses as for Connection, with commas between.

    Raises:
        ConfigError: one of them cannot be read.
    """

    def __init__(self, urls: str) -> None:
        self._connections = [Connection(url.strip()) for url in urls.split(",")]
        self._current = 0

    def __len__(self) -> int:
        """Give the number of replicas."""
        return len(self._connections)

    @property
    def current(self) -> Connection:
        """Give the one to ask."""
        return self._connections[self._current]

    def leave(self, connection: Connection) -> None:
        """Ask the next one from now on, if `connection` is the one asked, which did not answer."""
        connection.doubt()
        if connection is self.current:
            self._current = (self._current + 1) % len(self)

    async def close(self) -> None:
        """Close all channels; running calls are cancelled."""
        for connection in self._connections:
            await connection.close()
