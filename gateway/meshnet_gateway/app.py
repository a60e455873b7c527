"""Composition root of a gateway: OpenAI routes, the pipelines behind them, the control plane."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from aiohttp import web

from meshnet.compression import CompressionPolicies
from meshnet.control.app import ControlServer
from meshnet.control.client import ControlClient
from meshnet.control.settings import ControlSettings
from meshnet.control.store_url import make_documents
from meshnet.credentials import Credentials
from meshnet.listen import host_port, listen, refuse_exposed
from meshnet.plane.client import PlaneClient
from meshnet.plane.late import LateAnswers, ask_health
from meshnet.plane.links import LinkSettings
from meshnet.tls import TlsFiles
from meshnet_gateway.admission import METRICS_PATH, add_admission
from meshnet_gateway.draining import DrainingNodes
from meshnet_gateway.health import Health
from meshnet_gateway.https import Https
from meshnet_gateway.key_ring import KeyRing
from meshnet_gateway.limits import DEFAULT_LIMITS, GatewayLimits
from meshnet_gateway.listener import LimitedSite, watch_requests
from meshnet_gateway.lost import LostNodes
from meshnet_gateway.member_watch import MemberWatch
from meshnet_gateway.metrics import render_metrics
from meshnet_gateway.model_text import ModelText
from meshnet_gateway.moving import SessionMoves
from meshnet_gateway.node_watch import NodeWatch
from meshnet_gateway.openai_routes import add_routes
from meshnet_gateway.openai_service import OpenAIService
from meshnet_gateway.pipeline import PipelineSettings
from meshnet_gateway.presence import Presence
from meshnet_gateway.recoveries import RecoverySettings
from meshnet_gateway.recovery import RecoveringPipelines
from meshnet_gateway.routed import Shared
from meshnet_gateway.selection import RouteSelector

__all__ = ["Gateway", "GatewaySettings"]

_WANT_KEYS: Final = "let it want API keys with --api-keys STORE, made by: meshnet key create"
_ENCRYPT: Final = (
    "serve HTTPS with --https-cert and --https-key, or say with --behind-tls-proxy that a proxy in"
    " front does"
)


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """How a gateway runs.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 lets the system choose.
        control_url: the control plane; None runs one inside, by `control`.
        control: settings of that one.
        pipeline: how prompts are cut and how long a chunk may take.
        recovery: what a session does when its route breaks.
        region: where the gateway is, for the choice of routes; empty for none.
        api_keys: store of the keys that clients need; None where they need none.
        limits: of what clients may ask for, and how slowly.
        https: certificate and key for clients, read anew when they change; None for plain HTTP.
        behind_tls_proxy: whether clients come through a proxy that serves HTTPS, so that plain
            HTTP from it may come from other machines, and nothing is said by this one's address.
        insecure: whether it may listen where other machines reach it without wanting keys, or
            with plain HTTP.
        tls: files for connections to nodes; None where these have no TLS.
        grace_s: seconds that answers in progress get when the gateway closes.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    control_url: str | None = None
    control: ControlSettings = field(default_factory=ControlSettings)
    pipeline: PipelineSettings = field(default_factory=PipelineSettings)
    recovery: RecoverySettings = field(default_factory=RecoverySettings)
    region: str = ""
    api_keys: str | None = None
    limits: GatewayLimits = DEFAULT_LIMITS
    https: TlsFiles | None = None
    behind_tls_proxy: bool = False
    insecure: bool = False
    tls: Credentials | None = None
    grace_s: float = 30.0


class Gateway:
    """Serves models over the OpenAI API: `start`, until `close`.

    Args:
        settings: see there.
        models: tokenizer and template of each model, by its name in the mesh.
        policies: when bodies are compressed.

    Raises:
        ConfigError: a file of TLS, or the store of keys, cannot be used.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        models: Mapping[str, ModelText],
        policies: CompressionPolicies,
    ) -> None:
        self.settings = settings
        self._https = None if settings.https is None else Https(settings.https)
        self.control_http = ""
        self.control_grpc = settings.control_url or ""
        self._models = models
        self._control_server: ControlServer | None = None
        self._tls = settings.tls
        if settings.control_url is None:
            self._control_server = ControlServer(settings.control)
            if self._control_server.state is not None:
                self._tls = self._control_server.state.gateway
        self._control: ControlClient | None = None
        # On a connection that was kept, a question could be lost where its chunk was.
        links = LinkSettings(policies, tls=self._tls)
        self._asker = PlaneClient(replace(links, max_idle_connections=0))
        self._presence = Presence(self._asker)
        self._late = LateAnswers(self._ask)
        self._plane = PlaneClient(links, self._late)
        self._keys = (
            None if settings.api_keys is None else KeyRing(make_documents(settings.api_keys))
        )
        self._service: OpenAIService | None = None
        self._health: Health | None = None
        self._watch: NodeWatch | None = None
        self._members: MemberWatch | None = None
        self._pipelines: RecoveringPipelines | None = None
        self._listener: socket.socket | None = None
        self._runner: web.AppRunner | None = None

    async def start(self) -> str:
        """Take the port, start the control plane if it is inside, serve; gives ``host:port``.

        Raises:
            ConfigError: an address cannot be listened on, naming it.
        """
        settings, tls = self.settings, self._tls
        if not settings.insecure:
            await _refuse_exposed(settings)
        self._listener = listener = await listen(settings.host, settings.port, "--listen")
        if self._control_server is not None:
            addresses = await self._control_server.start()
            self.control_http, self.control_grpc = self._control_server.urls(addresses)
        self._control = ControlClient(
            self.control_grpc,
            credentials=tls if tls is not None and tls.identity is not None else None,
        )
        self._health = Health(self._control, self._models)
        lost, draining = LostNodes(), DrainingNodes()
        self._watch = NodeWatch(self._control, lost, draining)
        self._watch.start()
        if tls is not None and tls.identity is not None:
            self._members = MemberWatch(self._control, tls.removals)
            self._members.start()
        self._late.start()
        selector = RouteSelector(self._control, settings.region, tls=tls is not None)
        shared = Shared(
            selector,
            self._plane,
            lost,
            SessionMoves(
                selector, self._plane, draining, timeout_s=settings.pipeline.step_timeout_s
            ),
            settings.pipeline,
            settings.recovery,
            self._presence,
        )
        self._pipelines = RecoveringPipelines(shared)
        if self._keys is not None:
            await self._keys.open()
        app = web.Application()
        app.router.add_get("/healthz", self._health.answer)
        app.router.add_get(METRICS_PATH, self._metrics)
        limits = self.settings.limits
        self._service = OpenAIService(self._models, self._pipelines, limits=limits)
        add_routes(app, self._service)
        add_admission(app, self._keys, limits, behind_proxy=settings.behind_tls_proxy)
        watch_requests(app)
        # Without handler_cancellation a client that went away would not end its generation.
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            shutdown_timeout=self.settings.grace_s,
        )
        await self._runner.setup()
        tls_of_site = None
        if self._https is not None:
            self._https.start()
            tls_of_site = self._https.listening
        await LimitedSite(self._runner, listener, limits, tls_of_site).start()
        return host_port(*listener.getsockname()[:2])

    async def close(self) -> None:
        """Refuse new requests, let answers in progress end within the grace, free everything."""
        if self._service is not None:
            self._service.drain()
        if self._runner is not None:
            await self._runner.cleanup()
        if self._listener is not None:
            self._listener.close()
        if self._https is not None:
            await self._https.close()
        if self._keys is not None:
            await self._keys.close()
        await self._late.close()
        await self._presence.close()
        await self._plane.close()
        await self._asker.close()
        if self._health is not None:
            await self._health.close()
        if self._watch is not None:
            await self._watch.close()
        if self._members is not None:
            await self._members.close()
        if self._control is not None:
            await self._control.close()
        if self._control_server is not None:
            await self._control_server.close()

    async def _ask(self, address: str, timeout_s: float) -> None:
        await ask_health(self._asker, address, timeout_s)

    async def _metrics(self, _: web.Request) -> web.Response:
        body = b""
        if self._pipelines is not None:
            shared = self._pipelines.shared
            body = render_metrics(shared.counts, shared.moves.counts, self._plane.choosers)
        return web.Response(
            body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )


async def _refuse_exposed(settings: GatewaySettings) -> None:
    """Refuse an address that other machines reach without keys, or with keys in the clear.

    Raises:
        ConfigError: it is one, with what would make it safe.
    """
    if settings.api_keys is None:
        await refuse_exposed(settings.host, settings.port, "--listen", _WANT_KEYS)
    if settings.https is None and not settings.behind_tls_proxy:
        danger = "keys and prompts would cross the network in the clear"
        await refuse_exposed(settings.host, settings.port, "--listen", _ENCRYPT, danger)
