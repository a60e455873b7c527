"""Where the replicas of a control plane are, and the channels to their gRPC faces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import grpc

from meshnet.control.keepalive import CLIENT_OPTIONS
from meshnet.credentials import Credentials
from meshnet.errors import Code, ConfigError, MeshError
from meshnet.identity import CONTROL_DNS_NAME
from meshnet.listen import host_port
from meshnet.tls import client_context

__all__ = ["CREDENTIALS_HINT", "Connection", "Replicas"]

CREDENTIALS_HINT: Final = "give yours with --credentials DIR or MESHNET_CREDENTIALS"
_SCHEMES: Final = ("grpc", "grpcs", "http", "https")

_OPTIONS: Final = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    *CLIENT_OPTIONS,
)
_TLS_OPTIONS: Final = (
    ("grpc.ssl_target_name_override", CONTROL_DNS_NAME),
    ("grpc.use_local_subchannel_pool", 1),  # connections of other credentials are not for us
    *_OPTIONS,
)


@dataclass(slots=True, eq=False)
class _Opened:
    """A channel, how many calls run on it, and of which reading of the credentials it is."""

    channel: grpc.aio.Channel
    port: int
    generation: int
    calls: int = 0


class Connection:
    """A channel, opened when first needed, and opened anew for credentials that were renewed.

    Calls that run go on over the channel on which they began.

    Args:
        url: ``grpc://HOST:PORT``, ``HOST:PORT``, or ``http://HOST:PORT`` of the JSON face,
            which is then asked for the port of the gRPC face; ``grpcs`` and ``https`` for
            those that demand certificates.
        credentials: with them every connection has TLS, whatever `url` says.

    Raises:
        ConfigError: `url` is none of these, or needs credentials.
    """

    def __init__(self, url: str, credentials: Credentials | None = None) -> None:
        try:
            parts = urlsplit(url if "://" in url else f"grpc://{url}")
            host, port = parts.hostname, parts.port
        except ValueError:
            parts, host, port = urlsplit(""), None, None
        is_plain = parts.path in ("", "/") and not parts.query and parts.username is None
        if parts.scheme not in _SCHEMES or not host or not port or not is_plain:
            raise ConfigError(
                f"control plane {url!r}: expected grpc://HOST:PORT or http://HOST:PORT, or "
                "grpcs or https for one that demands certificates",
                field="control",
            )
        if credentials is None and parts.scheme in ("grpcs", "https"):
            raise ConfigError(
                f"control plane {url!r}: it demands certificates; {CREDENTIALS_HINT}",
                field="control",
            )
        self._host = host
        self._port = port
        self._credentials = credentials
        self._is_http = parts.scheme in ("http", "https")
        self._must_ask = self._is_http
        self._rpc_port = port
        self._opened: _Opened | None = None
        self._left: set[_Opened] = set()
        self._lock = asyncio.Lock()

    @property
    def is_secure(self) -> bool:
        """Whether it has TLS."""
        return self._credentials is not None

    @asynccontextmanager
    async def channel(self, timeout_s: float) -> AsyncIterator[grpc.aio.Channel]:
        """Give the channel for calls in the block, asking the JSON face for the port where due.

        Raises:
            MeshError: UNAVAILABLE, the JSON face does not answer; UNAUTHENTICATED
                (CONTROL_NOT_TRUSTED), it is not of this mesh.
            ConfigError: what answers is no control plane.
        """
        opened = await self._open(timeout_s)
        opened.calls += 1
        try:
            yield opened.channel
        finally:
            opened.calls -= 1
            if opened in self._left and opened.calls == 0:
                self._left.remove(opened)
                await opened.channel.close()

    def doubt(self) -> None:
        """Say that a call got no answer: a restart may have moved the gRPC face."""
        self._must_ask = self._is_http

    async def close(self) -> None:
        """Close every channel; running calls are cancelled."""
        closing = [*self._left, *([] if self._opened is None else [self._opened])]
        self._opened = None
        self._left.clear()
        for opened in closing:
            await opened.channel.close()

    async def _open(self, timeout_s: float) -> _Opened:
        async with self._lock:
            if self._must_ask:
                self._rpc_port = await self._ask_port(timeout_s)
                self._must_ask = False
            generation = 0 if self._credentials is None else self._credentials.generation
            opened = self._opened
            if opened is None or (opened.port, opened.generation) != (self._rpc_port, generation):
                if opened is not None and opened.calls:
                    self._left.add(opened)
                elif opened is not None:
                    await opened.channel.close()
                self._opened = opened = _Opened(self._connect(), self._rpc_port, generation)
            return opened

    def _connect(self) -> grpc.aio.Channel:
        target = host_port(self._host, self._rpc_port)
        if self._credentials is None:
            return grpc.aio.insecure_channel(target, options=_OPTIONS)
        pem = self._credentials.pem()
        tls = grpc.ssl_channel_credentials(pem.ca or None, pem.key or None, pem.chain or None)
        return grpc.aio.secure_channel(target, tls, options=_TLS_OPTIONS)

    async def _ask_port(self, timeout_s: float) -> int:
        scheme, tls = "http", None
        if self._credentials is not None:
            scheme, tls = "https", client_context(self._credentials.files)
        where = f"{scheme}://{host_port(self._host, self._port)}/healthz"
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.get(
                    where,
                    ssl=True if tls is None else tls,
                    server_hostname=None if tls is None else CONTROL_DNS_NAME,
                ) as response,
            ):
                health = await response.json(content_type=None)
        except aiohttp.ClientConnectorCertificateError as error:
            raise MeshError(
                Code.UNAUTHENTICATED,
                f"{where} is no control plane of this mesh: {error.certificate_error}"[:500],
                reason="CONTROL_NOT_TRUSTED",
            ) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
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
        credentials: as for Connection.

    Raises:
        ConfigError: one of them cannot be read.
    """

    def __init__(self, urls: str, credentials: Credentials | None = None) -> None:
        self._connections = [Connection(url.strip(), credentials) for url in urls.split(",")]
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
