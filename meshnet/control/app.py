"""A control plane in one process: registry, both faces, health and metrics."""

from __future__ import annotations

import secrets
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import grpc
from aiohttp import web

import meshnet
from meshnet.control.documents import Documents
from meshnet.control.enrollment_service import EnrollmentService, Enrolment
from meshnet.control.grant_issuer import GrantIssuer
from meshnet.control.guard import Guard
from meshnet.control.http_face import Handler, HttpFace
from meshnet.control.metrics import CONTENT_TYPE, ControlMetrics
from meshnet.control.node_service import LeaseTimes, NodeService
from meshnet.control.openapi import openapi
from meshnet.control.operator_service import OperatorService
from meshnet.control.operators import Operators
from meshnet.control.reference_service import ReferenceService
from meshnet.control.references import References
from meshnet.control.removed_keys import RemovedKeys
from meshnet.control.replicas import Reached, Replicas
from meshnet.control.route_service import RouteService
from meshnet.control.rpc import RpcServer
from meshnet.control.settings import ControlSettings
from meshnet.control.state import ControlState
from meshnet.control.store_url import make_documents, make_store
from meshnet.control.stubs import (
    SERVICES,
    add_enrollment,
    add_nodes,
    add_operators,
    add_references,
    add_routes,
)
from meshnet.control.transcode import Transcoder
from meshnet.control.verification import Verifier
from meshnet.errors import MeshError
from meshnet.listen import ANY_HOSTS, host_port, listen, refuse_exposed

__all__ = ["AGE_KEY", "API_TITLE", "Addresses", "ControlServer"]

AGE_KEY: Final = "meshnet-store-age-ms"
"""Trailing metadata of unary calls while the store is away: how old what is read may be."""

API_TITLE: Final = "meshnet control plane"

_REMEDY: Final = "let it know its callers with --state DIR, which makes credentials"


class Addresses(NamedTuple):
    """``host:port`` of each face, as bound."""

    http: str
    grpc: str


class ControlServer:
    """Serves until closed; may be started once.

    Attributes:
        state: the state directory; None on a control plane that is open.
        socket_folder: holds the unix socket between the faces; None before the start.

    Args:
        settings: see there.
        clock: monotonic seconds, for leases.

    Raises:
        ConfigError: the store's address cannot be read, or the state directory not be used.
    """

    def __init__(
        self,
        settings: ControlSettings,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self.state = _open_state(settings)
        self._documents = _documents(settings, self.state)
        enrolment = operators = self._guard = self._removed = self._replicas = None
        if self.state is not None:
            self._removed = RemovedKeys(self._documents)
            self._replicas = Replicas(self._documents)
            enrolment = Enrolment(
                self.state.authority,
                self._documents,
                self._replicas.reached,
                self._removed,
                self.state.follow,
            )
            operators = Operators(self._documents)
            self._guard = Guard(operators, self._removed)
        self._metrics = ControlMetrics()
        self._store = make_store(settings.store, clock, settings.forget_after_s)
        wants_grants = settings.require_grants or self.state is not None
        self._grants = (
            GrantIssuer(self._documents, settings.grants, removed=self._removed)
            if wants_grants
            else None
        )
        times = LeaseTimes(ttl_s=settings.lease_ttl_s, drain_grace_s=settings.drain_grace_s)
        self._references = References(self._documents, clock)
        require = settings.require_probe
        verifier = Verifier(
            self._references, clock, require=self.state is not None if require is None else require
        )
        nodes = NodeService(
            self._store,
            times,
            verifier,
            bookmark_interval_s=settings.bookmark_interval_s,
            grants=self._grants,
        )
        routes = RouteService(
            self._store,
            settings.replica_id or secrets.token_hex(4),
            bookmark_interval_s=settings.bookmark_interval_s,
            grants=self._grants,
        )
        self._rpc = RpcServer(
            (
                partial(add_nodes, nodes),
                partial(add_routes, routes),
                partial(add_enrollment, EnrollmentService(enrolment)),
                partial(add_operators, OperatorService(operators)),
                partial(add_references, ReferenceService(self._references)),
            ),
            [service.full_name for service in SERVICES],
            self._metrics.observe,
            self._age,
            self._guard,
            settings.limits,
        )
        self._grpc_port = 0
        self.socket_folder: Path | None = None
        self._channel: grpc.aio.Channel | None = None
        self._face: HttpFace | None = None

    async def start(self) -> Addresses:
        """Take both addresses, then serve.

        Raises:
            ConfigError: an address is taken or not this machine's, others reach it although
                callers are not known, or the store cannot be opened; nothing was started.
            MeshError: UNAVAILABLE, the store is away.
        """
        settings = self._settings
        if self.state is None and not settings.insecure:
            await refuse_exposed(settings.http_host, settings.http_port, "http_host", _REMEDY)
            await refuse_exposed(settings.grpc_host, settings.grpc_port, "grpc_host", _REMEDY)
        listener = await listen(settings.http_host, settings.http_port, "http_port")
        try:
            if settings.grpc_port != 0:  # gRPC's own message does not say why
                probe = await listen(settings.grpc_host, settings.grpc_port, "grpc_port")
                probe.close()
            self._grpc_port = self._rpc.bind(
                settings.grpc_host,
                settings.grpc_port,
                None if self.state is None else self.state.credentials,
            )
            self.socket_folder = Path(tempfile.mkdtemp(prefix="meshnet-"))
            target = self._rpc.bind_unix(str(self.socket_folder / "grpc.sock"))
            await self._store.open()
            await self._documents.open()
            if self._removed is not None:
                await self._removed.start()
            if self._replicas is not None:
                await self._replicas.start(self._reached(listener.getsockname()[1]))
            if self._grants is not None:
                await self._grants.start()
            await self._references.read()
            await self._references.introduce(settings.references)
        except MeshError:
            listener.close()
            await self.close()
            raise
        await self._rpc.start()
        self._channel = grpc.aio.insecure_channel(target)
        own: dict[str, Handler] = {
            "/healthz": self._healthz,
            "/metrics": self._render_metrics,
            "/openapi.json": self._describe,
        }
        admit = tls = None
        if self._guard is not None and self.state is not None:
            self.state.start()
            own = {path: self._guard.guarding(path, handler) for path, handler in own.items()}
            admit, tls = self._guard.admit_http, self.state.credentials.listening(optional=True)
        transcoder = Transcoder(self._channel, SERVICES, admit, settings.limits)
        self._face = HttpFace(transcoder.handle, own, settings.close_grace_s, tls, settings.limits)
        await self._face.start(listener)
        return Addresses(
            host_port(settings.http_host, listener.getsockname()[1]),
            host_port(settings.grpc_host, self._grpc_port),
        )

    async def close(self) -> None:
        """End watches, give running calls a moment, stop serving."""
        self._store.stop()
        if self._face is not None:
            await self._face.close()
        if self._channel is not None:
            await self._channel.close()
        await self._rpc.close(self._settings.close_grace_s)
        await self._store.close()
        if self._grants is not None:
            await self._grants.close()
        if self._removed is not None:
            await self._removed.close()
        if self._replicas is not None:
            await self._replicas.close()
        await self._documents.close()
        if self.state is not None:
            await self.state.close()
        if self.socket_folder is not None:
            shutil.rmtree(self.socket_folder, ignore_errors=True)

    def urls(self, addresses: Addresses) -> Addresses:
        """Write addresses as clients of this control plane take them."""
        s = "" if self.state is None else "s"
        return Addresses(f"http{s}://{addresses.http}", f"grpc{s}://{addresses.grpc}")

    def _reached(self, http_port: int) -> Reached:
        """Give where others reach this one."""
        settings = self._settings
        return Reached(
            host_port(settings.advertise or settings.http_host, http_port),
            host_port(settings.advertise or settings.grpc_host, self._grpc_port),
        )

    def _age(self) -> tuple[tuple[str, str], ...]:
        """Give the metadata that states how old answers may be, while the store is away."""
        health = self._store.health()
        if health.is_connected:
            return ()
        return ((AGE_KEY, str(int(health.age_s * 1000))),)

    async def _healthz(self, _request: web.BaseRequest) -> web.Response:
        snapshot = await self._store.snapshot()
        return web.json_response(
            {
                "status": "ok" if snapshot.health.is_connected else "the store is away",
                "grpc_port": self._grpc_port,
                "revision": str(snapshot.revision),
                "store_age_s": round(snapshot.health.age_s, 3),
            }
        )

    async def _describe(self, _request: web.BaseRequest) -> web.Response:
        return web.json_response(openapi(SERVICES, title=API_TITLE, version=meshnet.__version__))

    async def _render_metrics(self, _request: web.BaseRequest) -> web.Response:
        body = self._metrics.render(await self._store.snapshot())
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE})


def _open_state(settings: ControlSettings) -> ControlState | None:
    if settings.state is None:
        return None
    hosts = [settings.advertise, settings.http_host, "localhost", "127.0.0.1", "::1"]
    named = [host for host in hosts if host and host not in ANY_HOSTS]
    return ControlState(settings.state, life_s=settings.certificate_life_s, hosts=named)


def _documents(settings: ControlSettings, state: ControlState | None) -> Documents:
    """Make the documents: beside the registry, or in the state directory if that is in memory."""
    is_lasting = settings.store != "memory"
    return make_documents(settings.store if state is None or is_lasting else state.documents_url)
