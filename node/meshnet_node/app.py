"""Composition root of a node: the plane's server, the stage behind it, its place in the mesh."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from meshnet.cache_wire import CacheHeader, MoveHeader
from meshnet.chunk import Answer, Chunk
from meshnet.compression import CompressionPolicies
from meshnet.errors import Code, MeshError
from meshnet.listen import host_port, refuse_exposed
from meshnet.operations import OwnerId, Rebuild, Release, Reservation
from meshnet.plane.caller import Caller
from meshnet.plane.client import PlaneClient
from meshnet.plane.hop_client import HopClient
from meshnet.plane.late import LateAnswers, ask_health
from meshnet.plane.links import LinkSettings
from meshnet.plane.server import PlaneServer
from meshnet_node.backend import LoadedWeights, ShardBackend, ShardSpec
from meshnet_node.granted import GrantGate
from meshnet_node.health import Health
from meshnet_node.journals import Journals
from meshnet_node.metrics import render_metrics
from meshnet_node.moving import ArrivingCache
from meshnet_node.owners import Owners
from meshnet_node.prober import PROBE_INTERVAL_S, Prober
from meshnet_node.scheduler import Scheduler
from meshnet_node.session_table import SessionTable
from meshnet_node.settings import NodeSettings
from meshnet_node.stage import Stage

__all__ = ["Node"]

_log = logging.getLogger(__name__)

_HOUSEKEEPING_S = 5.0
_SWITCH_S = 25e-6
"""How long a thread that computes in Python may keep one waiting that has received a chunk.

The interpreter's default, 5 ms, would be added to a hop at every receive and send.
"""
_TIMER_SLACK_NS = 1000
_REMEDY = "join a mesh with --join TOKEN, of an operator's: meshnet token create --role node"


class Node:
    """Serves one shard: `listen`, then `load`, until `close`.

    Listening comes first, so that a taken port is known before anything is loaded or
    registered; until the backend is loaded, chunks are answered 503.

    Args:
        settings: see there.
        open_backend: loads the shard; called once.
        policies: when bodies are compressed.

    Attributes:
        grants: which sessions are taken, and over which routes.
        on_news: called, on any thread, when the control plane is to hear of this node at once.

    Raises:
        ConfigError: a file of TLS cannot be used.
    """

    def __init__(
        self,
        settings: NodeSettings,
        open_backend: Callable[[], ShardBackend],
        policies: CompressionPolicies,
    ) -> None:
        self.settings = settings
        self.stage: Stage | None = None
        self.grants = GrantGate(settings.node)
        self.prober: Prober | None = None
        self.on_news: Callable[[], None] = lambda: None
        self._found_wrong = ""
        self._beat_s = PROBE_INTERVAL_S
        self._open_backend = open_backend
        self._aside = ThreadPoolExecutor(max_workers=1, thread_name_prefix="load")
        # On a connection that was kept, a question could be lost where its chunk was.
        links = LinkSettings(policies, tls=settings.tls)
        self._asker = PlaneClient(replace(links, max_idle_connections=0))
        self._late = LateAnswers(self._ask)
        self._client = HopClient(links, self._late)
        self._journals = Journals(settings.journals)
        self._server = PlaneServer(self, policies=policies, tls=settings.tls, limits=settings.plane)
        self._scheduler: Scheduler | None = None
        self._health: Health | None = None
        self._owners: Owners | None = None
        self._housekeeping: asyncio.Task[None] | None = None

    async def listen(self) -> str:
        """Take the port; gives the bound address as ``host:port``.

        Raises:
            ConfigError: the address cannot be listened on, or other machines reach it although
                callers are not known, naming it.
        """
        settings, tls = self.settings, self.settings.tls
        knows_callers = tls is not None and tls.files.ca is not None
        if not knows_callers and not settings.insecure:
            await refuse_exposed(settings.host, settings.port, "--listen", _REMEDY)
        _let_hops_pass()
        return host_port(*await self._server.start(self.settings.host, self.settings.port))

    async def load(self) -> ShardSpec:
        """Load the shard and probe it; gives what it holds.

        Raises:
            MeshError: the shard cannot be loaded, or its forward fails.
        """
        loop = asyncio.get_running_loop()
        backend = await loop.run_in_executor(self._aside, self._open_backend)
        scheduler = self._scheduler = Scheduler(one_thread=backend.keeps_threads)
        self.grants.layers = backend.spec.layers
        stage = Stage(
            self.settings.node,
            backend,
            SessionTable(
                backend.open_cache,
                self.settings.sessions,
                time.monotonic,
                self._journals,
                self.grants,
            ),
            self._client,
            scheduler,
            hop_timeout_s=self.settings.hop_timeout_s,
            grants=self.grants,
        )
        health = Health(stage, scheduler, self._aside, busy_s=self.settings.hop_timeout_s)
        await loop.run_in_executor(self._aside, health.run)
        if backend.weights is not None:
            await self._begin_probes(stage, backend.weights, scheduler)
        self.stage, self._health = stage, health
        self._refuse()
        self._owners = Owners(stage.sessions)
        self._late.start()
        self._housekeeping = asyncio.create_task(self._keep_house(stage))
        return backend.spec

    async def close(self) -> None:
        """Stop accepting, let requests in flight end within the grace, free everything."""
        if self._owners is not None:
            self._owners.close()
        await self._server.close(self.settings.grace_s)
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            await asyncio.wait({self._housekeeping})
        if self.prober is not None:
            await asyncio.to_thread(self.prober.close)
        await self._late.close()
        await self._asker.close()
        self._client.close()
        self._journals.close()
        self._aside.shutdown(wait=False, cancel_futures=True)
        if self._scheduler is not None:
            self._scheduler.close()

    def healthy(self) -> bool:
        """Tell whether the shard computes, as `Health.check`; blocks for half a second at most."""
        return self._health is not None and self._health.check()

    def distrust(self, keys: Mapping[str, int], now: float) -> None:
        """Refuse members that were removed, also on connections that are open; see `Removals`."""
        tls = self.settings.tls
        if tls is not None and tls.removals.learn(keys, now):
            _log.info("members were removed from the mesh: %d keys are refused", len(keys))
            self._server.end_removed()

    def pace_probes(self, interval_s: float) -> None:
        """Probe with each heartbeat, unless the settings say otherwise."""
        self._beat_s = interval_s
        if self.prober is not None and self.settings.probe_interval_s is None:
            self.prober.interval_s = interval_s

    def judge_numbers(self, found_wrong: str) -> None:
        """Hear why the control plane holds this node's numbers wrong; empty if it does not."""
        self._found_wrong = found_wrong
        self._refuse()

    def bandwidths(self) -> dict[str, float]:
        """Give the bytes a second of the links that chunks were sent over, by ``host:port``."""
        reports = self._client.choosers.report()
        return {item.link: item.bits_per_s / 8 for item in reports if item.num_samples}

    def forward(self, chunk: Chunk, caller: Caller) -> Answer:
        """Run one chunk: `PlaneHandler`."""
        return self._loaded().forward(chunk, caller)

    def reserve(self, asked: Reservation, caller: Caller) -> None:
        """Open a session along its route: `PlaneHandler`."""
        self._loaded().reservations.reserve(asked, caller)

    def move(self, asked: MoveHeader, caller: Caller) -> None:
        """Send a session's cache to other nodes: `PlaneHandler`."""
        self._loaded().moves.send(asked, caller)

    def take_cache(self, header: CacheHeader, caller: Caller) -> ArrivingCache:
        """Make room for a session's cache: `PlaneHandler`."""
        return self._loaded().moves.take(header, caller)

    def rebuild(self, asked: Rebuild, caller: Caller) -> None:
        """Feed a session's journal to the hops that replace those after: `PlaneHandler`."""
        self._loaded().rebuild(asked, caller)

    def release(self, asked: Release, caller: Caller) -> None:
        """Free a session: `PlaneHandler`."""
        if self.stage is not None:
            self.stage.release(asked, caller)

    def attend(self, owner: OwnerId, caller: Caller) -> None:
        """Hear that an owner of sessions lives, and when it no longer does: `PlaneHandler`."""
        if self._owners is None:
            raise self._loading()
        self._owners.attend(owner, caller)

    def get(self, path: str) -> tuple[int, str, bytes] | None:
        """Serve /healthz and /metrics: `PlaneHandler`."""
        if path == "/healthz":
            healthy = self.healthy()
            body = json.dumps(self._describe(healthy)).encode()
            return (200 if healthy else 503), "application/json", body
        if path == "/metrics" and self.stage is not None:
            body = render_metrics(self.stage, self._client.choosers)
            return 200, "text/plain; version=0.0.4; charset=utf-8", body
        return None

    async def _begin_probes(
        self, stage: Stage, weights: LoadedWeights, scheduler: Scheduler
    ) -> None:
        def passed() -> None:
            stage.last_forward = time.perf_counter()

        def changed() -> None:
            self._refuse()
            self.on_news()

        interval_s = self.settings.probe_interval_s
        prober = self.prober = Prober(
            stage.backend,
            weights,
            scheduler,
            interval_s=self._beat_s if interval_s is None else interval_s,
            on_forward=passed,
            on_news=changed,
            num_chunks=lambda: stage.num_chunks,
        )
        await asyncio.get_running_loop().run_in_executor(self._aside, prober.run)
        stage.on_failure = prober.wish
        prober.start()

    def _refuse(self) -> None:
        """Take no new sessions while what is computed here is not to be used."""
        own = "" if self.prober is None else self.prober.failure
        if self.stage is not None:
            self.stage.sessions.refusal = own or self._found_wrong

    async def _ask(self, address: str, timeout_s: float) -> None:
        await ask_health(self._asker, address, timeout_s)

    def _loaded(self) -> Stage:
        if self.stage is None:
            raise self._loading()
        return self.stage

    def _loading(self) -> MeshError:
        return MeshError(
            Code.UNAVAILABLE,
            f"node {self.settings.node} is loading its shard",
            reason="LOADING",
            retry_after_s=2.0,
        )

    def _describe(self, healthy: bool) -> dict[str, object]:
        stage = self.stage
        if stage is None:
            return {"status": "loading", "node": self.settings.node}
        spec = stage.backend.spec
        draining = stage.sessions.draining
        return {
            "status": "failing" if not healthy else "draining" if draining else "ready",
            "node": self.settings.node,
            "model": spec.model,
            "layers": str(spec.layers),
            "hidden_size": spec.hidden_size,
            "sessions": len(stage.sessions),
            "queue_depth": stage.queue_depth,
        }

    async def _keep_house(self, stage: Stage) -> None:
        while True:
            await asyncio.sleep(_HOUSEKEEPING_S)
            await asyncio.to_thread(stage.release_idle)
            self._client.prune()


def _let_hops_pass() -> None:
    """Let threads that wait for the interpreter have it soon, in this process."""
    sys.setswitchinterval(_SWITCH_S)
    # Linux lets such short waits end late by 50 microseconds unless told otherwise; threads
    # started from now on inherit this.
    with suppress(OSError):
        Path("/proc/self/timerslack_ns").write_text(str(_TIMER_SLACK_NS))
