"""Measures the links to nodes that may come next on a route; their numbers choose routes."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from meshnet.control.client import ControlClient
from meshnet.control.validate import endpoint_address, endpoint_is_tls
from meshnet.credentials import Credentials
from meshnet.errors import MeshError
from meshnet.plane.client import PlaneClient
from meshnet.plane.links import LinkSettings
from meshnet.topology import NodeId
from meshnet.v1 import node_service_pb2 as nodes_pb2
from meshnet.v1 import types_pb2
from meshnet_node.backend import ShardSpec

__all__ = ["Bandwidths", "Neighbour", "Neighbours", "choose_neighbours"]

MAX_NEIGHBOURS: Final = 8
_PROBE_EVERY_S: Final = 15.0
_LIST_EVERY_S: Final = 300.0
_NUM_TRIES: Final = 4
_NUM_ROUNDS: Final = 8
_FIRST_ROUNDS_S: Final = 2.0
_TIMEOUT_S: Final = 2.0

_log = logging.getLogger(__name__)

Bandwidths = Callable[[], Mapping[str, float]]
"""Gives bytes a second by ``host:port``, as the chunks that were sent have shown."""


@dataclass(frozen=True, slots=True)
class Neighbour:
    """A node that may be the next hop, and ``host:port`` of its activation plane."""

    node: NodeId
    address: str


class Neighbours:
    """Probes a few nodes now and then, by ``GET /healthz`` over kept connections.

    A node that computes answers late, one that two processes wait for the core of later still:
    such delays only ever lengthen a round trip. So a link counts as its shortest one of the
    last eight rounds. One that has become slower is known as such two minutes later; the first
    rounds follow each other sooner.

    Args:
        control: asked at a low rate which nodes there are.
        node: this node's id.
        spec: this node's shard.
        bandwidths: of links that chunks have used.
        clock: seconds, monotonic.
        tls: credentials, where nodes are reached with TLS.
    """

    def __init__(
        self,
        control: ControlClient,
        node: NodeId,
        spec: ShardSpec,
        bandwidths: Bandwidths = dict,
        clock: Callable[[], float] = time.perf_counter,
        tls: Credentials | None = None,
    ) -> None:
        self._control = control
        self._node = node
        self._spec = spec
        self._bandwidths = bandwidths
        self._clock = clock
        self._is_tls = tls is not None
        self._client = PlaneClient(LinkSettings(connect_timeout_s=_TIMEOUT_S, tls=tls))
        self._found: list[Neighbour] = []
        self._listed_at: float | None = None
        self._rtts_s: dict[Neighbour, deque[float]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to probe."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop to probe."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        await self._client.close()

    def links(self) -> list[types_pb2.LinkStats]:
        """Give the shortest round trips of late, in order of the nodes' ids."""
        speeds = self._bandwidths()
        return [
            types_pb2.LinkStats(
                node=f"nodes/{neighbour.node}",
                round_trip_microseconds=max(1, round(min(rtts_s) * 1e6)),
                bytes_per_second=int(speeds.get(neighbour.address, 0)),
            )
            for neighbour, rtts_s in sorted(self._rtts_s.items(), key=lambda item: item[0].node)
        ]

    async def measure(self) -> None:
        """Probe all neighbours once; one that does not answer has no link until it does.

        Raises:
            MeshError: the control plane could not be asked for the nodes.
        """
        if self._spec.holds_head:
            return  # nothing comes after the last layer
        now = self._clock()
        is_all_well = bool(self._found) and len(self._rtts_s) == len(self._found)
        if self._listed_at is None or not is_all_well or now - self._listed_at >= _LIST_EVERY_S:
            nodes = await self._control.list_nodes(model=f"models/{self._spec.model}")
            self._found = choose_neighbours(nodes, self._node, self._spec, tls=self._is_tls)
            self._listed_at = now
        measured = await asyncio.gather(*map(self._probe, self._found))
        before, self._rtts_s = self._rtts_s, {}
        for neighbour, rtt_s in zip(self._found, measured, strict=True):
            if rtt_s is not None:
                rtts_s = before.get(neighbour) or deque(maxlen=_NUM_ROUNDS)
                rtts_s.append(rtt_s)
                self._rtts_s[neighbour] = rtts_s

    async def _run(self) -> None:
        while True:
            try:
                await self.measure()
            except MeshError as error:
                _log.info("node %s: links were not measured: %s", self._node, error)
            is_settled = all(len(rtts) == _NUM_ROUNDS for rtts in self._rtts_s.values())
            pause_s = _PROBE_EVERY_S if is_settled else _FIRST_ROUNDS_S
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))  # noqa: S311 - jitter

    async def _probe(self, neighbour: Neighbour) -> float | None:
        """Give the shortest of a few round trips; the first may connect, or wake a shard."""
        shortest: float | None = None
        for _ in range(_NUM_TRIES):
            started = self._clock()
            try:
                await self._client.get(
                    neighbour.address, "/healthz", timeout_s=_TIMEOUT_S, node=neighbour.node
                )
            except MeshError as error:
                _log.info("node %s: no link to %s: %s", self._node, neighbour.node, error)
                return None
            rtt_s = self._clock() - started
            shortest = rtt_s if shortest is None else min(shortest, rtt_s)
        return shortest


def choose_neighbours(
    nodes: Iterable[nodes_pb2.Node],
    own: NodeId,
    spec: ShardSpec,
    limit: int = MAX_NEIGHBOURS,
    *,
    tls: bool = False,
) -> list[Neighbour]:
    """Choose whom to measure: nodes of the same weights that hold the layer after ours.

    Nodes that are reached with TLS where this one has none (`tls`), or the other way round,
    can be no next hops.

    Where there are more than `limit`, a hash of both ids decides, so that the links
    measured spread over all pairs and each node keeps to its own.
    """
    following: list[tuple[bytes, Neighbour]] = []
    for node in nodes:
        name = NodeId(node.name.removeprefix("nodes/"))
        goes_on = any(
            shard.model == f"models/{spec.model}"
            and shard.model_digest == spec.digest
            and shard.layers.start <= spec.layers.end < shard.layers.end
            for shard in node.shards
        )
        if name == own or not goes_on or not node.endpoints:
            continue
        if node.state in (nodes_pb2.NODE_STATE_LOST, nodes_pb2.NODE_STATE_DRAINED):
            continue
        uri = node.endpoints[0].uri
        if endpoint_is_tls(uri) != tls:
            _log.info("node %s: no link to %s: one has TLS, the other not", own, name)
            continue
        address = endpoint_address(uri, "endpoints[0].uri")
        order = hashlib.sha256(f"{own} {name}".encode()).digest()
        following.append((order, Neighbour(name, address)))
    return [neighbour for _, neighbour in sorted(following, key=lambda item: item[0])[:limit]]
