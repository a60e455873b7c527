"""Who may ask a gateway, and how much at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from ipaddress import ip_address
from typing import Final

from aiohttp import web

from meshnet.errors import Code, MeshError
from meshnet_gateway.key_ring import KeyRing, KeyUse
from meshnet_gateway.limits import GatewayLimits

__all__ = ["METRICS_PATH", "add_admission"]

METRICS_PATH: Final = "/metrics"

_PREFIX: Final = "/v1/"
_FORWARDED: Final = ("Forwarded", "Via", "X-Forwarded-For")
_USE: Final = web.RequestKey("meshnet.key_use", KeyUse)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def add_admission(
    app: web.Application, keys: KeyRing | None, limits: GatewayLimits, *, behind_proxy: bool = False
) -> None:
    """Check the requests of an application before they are served.

    Without `keys` anybody may ask. With them, what is under ``/v1/`` needs one, and
    `METRICS_PATH` needs one from elsewhere than this machine; all else stays open.

    Args:
        app: with middlewares that answer `MeshError`.
        keys: of the clients.
        limits: of requests.
        behind_proxy: clients come through one, so that nobody counts as of this machine.
    """
    admission = _Admission(keys, limits.max_requests, behind_proxy=behind_proxy)
    app.middlewares.append(admission.admit)
    app.on_response_prepare.append(_tell_limits)


class _Admission:
    def __init__(self, keys: KeyRing | None, max_requests: int, *, behind_proxy: bool) -> None:
        self._behind_proxy = behind_proxy
        self._keys = keys
        self._max_requests = max_requests
        self._num_requests = 0

    @web.middleware
    async def admit(self, request: web.Request, handler: _Handler) -> web.StreamResponse:
        use = None
        if self._keys is not None and self._needs_key(request):
            use = await self._keys.check(request.headers.get("Authorization"))
            request[_USE] = use
        if request.method != "POST" or not request.path.startswith(_PREFIX):
            return await handler(request)
        if self._num_requests >= self._max_requests:
            raise MeshError(
                Code.UNAVAILABLE,
                f"the gateway is busy with {self._num_requests} completions; expected at most"
                f" {self._max_requests} (max_requests)",
                reason="OVERLOADED",
                retry_after_s=1.0,
            )
        task = asyncio.current_task()
        if use is not None and task is not None:
            use.begin(task, time.monotonic())
        self._num_requests += 1
        try:
            return await handler(request)
        finally:
            self._num_requests -= 1
            if use is not None and task is not None:
                use.end(task)

    def _needs_key(self, request: web.Request) -> bool:
        if request.path == METRICS_PATH:
            return self._behind_proxy or not _is_from_here(request)
        return request.path.startswith(_PREFIX)


def _is_from_here(request: web.Request) -> bool:
    """Tell whether a request comes from this machine, and through no proxy that says so."""
    peer = request.transport.get_extra_info("peername") if request.transport else None
    if not isinstance(peer, tuple) or any(name in request.headers for name in _FORWARDED):
        return False
    return ip_address(peer[0].partition("%")[0]).is_loopback


async def _tell_limits(request: web.Request, response: web.StreamResponse) -> None:
    use = request.get(_USE)
    if use is not None and request.method == "POST":
        response.headers.update(use.headers(time.monotonic()))
