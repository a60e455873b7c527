"""A node's place in the mesh: registers, keeps its lease, hears what the control plane wants."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from meshnet import __version__
from meshnet.codec import ENCODINGS
from meshnet.control.client import ControlClient
from meshnet.credentials import Credentials
from meshnet.errors import LeaseExpiredError, MeshError
from meshnet.tasks import end_task
from meshnet.topology import NodeId
from meshnet.v1 import node_service_pb2 as nodes_pb2
from meshnet.v1 import reference_service_pb2 as references_pb2
from meshnet.v1 import types_pb2
from meshnet.wire import WIRE_VERSION
from meshnet_node.app import Node
from meshnet_node.backend import ShardSpec
from meshnet_node.neighbours import Bandwidths, Neighbours
from meshnet_node.pace import Counters, LayerPace
from meshnet_node.policy import MeshPolicy
from meshnet_node.reporter import Reporter

__all__ = ["Heartbeat", "Registration"]

_log = logging.getLogger(__name__)

_RETRY_S = 1.0
_CLAIM_SPARE_S = 0.5
_TELL_S = 3.0
_REASON = "told to end"
_DRAINS = (nodes_pb2.NODE_STATE_DRAINING, nodes_pb2.NODE_STATE_DRAINED)


@dataclass(frozen=True, slots=True)
class Registration:
    """What a node says of itself.

    Attributes:
        node: its id.
        spec: what it serves.
        address: ``host:port`` that other nodes reach its activation plane at.
        region: chosen by the operator; empty for none.
        zone: failure domain in the region; empty for none.
        tls: credentials of the activation plane; None where it is plain.
        reference: of the model, if it is known here.
    """

    node: NodeId
    spec: ShardSpec
    address: str
    region: str
    zone: str = ""
    tls: Credentials | None = None
    reference: references_pb2.Reference | None = None


class Heartbeat:
    """Keeps a node registered for as long as it runs.

    A control plane that is away, was restarted, or let the lease end does not stop the
    node: it serves on, and registers again.

    Args:
        control_url: where the control plane is.
        registration: what to register.
        node: asked for its health and load, told to drain.
        bandwidths: bytes a second of links that chunks have used, by ``host:port``.
    """

    def __init__(
        self,
        control_url: str,
        registration: Registration,
        node: Node,
        bandwidths: Bandwidths = dict,
    ) -> None:
        tls = registration.tls
        self._client = ControlClient(
            control_url, credentials=tls if tls is not None and tls.identity is not None else None
        )
        self._registration = registration
        self._node = node
        self._neighbours = Neighbours(
            self._client,
            registration.node,
            registration.spec,
            bandwidths,
            tls=registration.tls,
        )
        self._pace = LayerPace(len(registration.spec.layers))
        self._reporter = Reporter(
            registration.node, registration.spec.model, node, registration.reference
        )
        self._wants_again = False
        self._desired = nodes_pb2.NODE_STATE_READY
        self._leaving = False
        self._incarnation = time.time_ns()
        self._lease_id = ""
        self._interval_s = _RETRY_S
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._hurry = asyncio.Event()
        self._policy = MeshPolicy(self._client, node)

    async def start(self) -> None:
        """Register, and begin to beat.

        An id that is still leased is waited for once: this node was killed, perhaps, and
        started again at another address. A lease that is renewed meanwhile is another's.

        Raises:
            MeshError: the control plane refused the node, or was not reached at all.
        """
        self._loop = asyncio.get_running_loop()
        self._node.grants.incarnation = self._incarnation
        self._policy.start()
        self._node.on_news = self._beat_at_once
        try:
            await self._register()
        except MeshError as error:
            if error.reason != "NODE_ID_IN_USE" or error.retry_after_s is None:
                raise
            _log.warning("%s; waiting for that lease to end", error)
            await asyncio.sleep(error.retry_after_s + _CLAIM_SPARE_S)
            await self._register()
        self._task = asyncio.create_task(self._run())
        self._neighbours.start()

    async def beat(self) -> None:
        """Renew the lease now, with the node's health and load; registers again if it ended.

        Raises:
            MeshError: the control plane was not reached, or refused.
        """
        try:
            answer = await self._beat_once()
        except LeaseExpiredError:
            _log.warning("node %s: the lease ended; registering again", self._registration.node)
            await self._register()
            answer = await self._beat_once()
        if self._wants_again:
            answer = await self._beat_once()
        self._policy.learn(answer.grants)
        self._obey(answer.desired_state)

    async def drain(self, grace_s: float) -> None:
        """Take no new sessions, and let those held move away or end; at most `grace_s` seconds.

        Gateways hear of it from the control plane and move theirs to other nodes.
        """
        stage = self._node.stage
        if stage is None:
            return
        sessions, node = stage.sessions, self._registration.node
        until = time.monotonic() + grace_s
        # First the control plane: what it still selects this node for would be refused.
        await self._tell(self._client.drain(node, grace_s=max(grace_s, 1.0), reason=_REASON))
        self._leaving = sessions.draining = True
        if len(sessions):
            _log.warning("node %s: draining, %d sessions are to leave", node, len(sessions))
        if await asyncio.to_thread(sessions.await_none, until - time.monotonic()):
            _log.warning("node %s: drained", node)
        else:
            _log.warning("node %s: %d sessions are cut off", node, len(sessions))

    async def close(self) -> None:
        """Stop beating and leave the mesh; a control plane that is away sees the lease end."""
        self._policy.close()
        self._node.on_news = lambda: None
        await end_task(self._task)
        await self._neighbours.close()
        await self._tell(self._client.deregister(self._registration.node))
        await self._client.close()

    async def _tell(self, call: Coroutine[Any, Any, object]) -> None:
        """Tell the control plane that this node leaves; it may be away."""
        try:
            async with asyncio.timeout(_TELL_S):
                await call
        except (MeshError, TimeoutError) as error:
            why = str(error) or f"no answer within {_TELL_S:g} s"
            _log.warning(
                "node %s: the control plane was not told: %s", self._registration.node, why
            )

    async def _run(self) -> None:
        delay_s = self._interval_s
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(delay_s):
                    await self._hurry.wait()
            self._hurry.clear()
            try:
                await self.beat()
                delay_s = self._interval_s
            except MeshError as error:
                _log.warning("node %s: heartbeat failed: %s", self._registration.node, error)
                delay_s = min(self._interval_s, _RETRY_S)

    def _beat_at_once(self) -> None:
        """Tell what this node found of its own numbers; on any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._hurry.set)

    async def _beat_once(self) -> nodes_pb2.HeartbeatResponse:
        probes, told = self._reporter.pending()
        answer = await self._client.heartbeat(
            self._registration.node,
            lease_id=self._lease_id,
            incarnation=self._incarnation,
            ready=await asyncio.to_thread(self._node.healthy),
            load=self._load(),
            probes=probes,
        )
        self._wants_again = self._reporter.hear(answer, told)
        return answer

    async def _register(self) -> None:
        registration = self._registration
        await self._reporter.introduce(self._client)
        spec = registration.spec
        node = nodes_pb2.Node(incarnation=self._incarnation, software_version=__version__)
        node.location.region, node.location.zone = registration.region, registration.zone
        shard = node.shards.add(
            model=f"models/{spec.model}",
            model_digest=spec.digest,
            layer_count=spec.num_layers,
            embedding=spec.holds_embedding,
            lm_head=spec.holds_head,
        )
        shard.layers.start, shard.layers.end = spec.layers.start, spec.layers.end
        scheme = "http" if registration.tls is None else "https"
        node.endpoints.add(uri=f"{scheme}://{registration.address}/forward")
        node.wire.versions.append(WIRE_VERSION)
        node.wire.encodings.extend(ENCODINGS)
        answer = await self._client.register(registration.node, node)
        self._policy.learn(answer.grants)
        self._lease_id = answer.lease.lease_id
        self._interval_s = answer.lease.heartbeat_interval.ToTimedelta().total_seconds()
        self._node.pace_probes(self._interval_s)

    def _load(self) -> types_pb2.LoadStats:
        stage = self._node.stage
        load = types_pb2.LoadStats()
        load.observe_time.GetCurrentTime()
        if stage is not None:
            load.queue_depth = stage.queue_depth
            load.active_sessions = len(stage.sessions)
            load.kv_cache_capacity_tokens = stage.sessions.capacity_tokens
            load.kv_cache_used_tokens = stage.sessions.reserved_tokens
            self._pace.update(Counters(stage.num_chunks, stage.num_tokens, stage.compute_s))
            load.layer_microseconds = self._pace.microseconds
            load.links.extend(self._neighbours.links())
        return load

    def _obey(self, desired: nodes_pb2.NodeState) -> None:
        """Drain, or take sessions again, as the control plane says.

        A cordon asks nothing of a node: it is left out of new routes, and serves what comes.
        """
        before, self._desired = self._desired, desired
        if desired != before:
            wanted = nodes_pb2.NodeState.Name(desired).removeprefix("NODE_STATE_").lower()
            _log.info("node %s: the control plane wants it %s", self._registration.node, wanted)
        stage = self._node.stage
        if stage is None:
            return
        stage.sessions.draining = self._leaving or desired in _DRAINS
        if desired != nodes_pb2.NODE_STATE_DRAINED:
            return
        # One that began as this heartbeat was under way has until the next one to leave;
        # others have had the grace that an operator gave them.
        cut = stage.sessions.release_all() if before in _DRAINS else 0
        if cut:
            _log.warning("node %s: %d sessions are cut off", self._registration.node, cut)
        if desired != before:
            _log.warning("node %s: drained; it can be stopped", self._registration.node)
