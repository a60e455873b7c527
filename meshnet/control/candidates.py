"""The registry's nodes as what routes are chosen from; only what changed is read again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from meshnet.candidate import Candidate, Link
from meshnet.control.registry import Snapshot
from meshnet.routing import RouteTable
from meshnet.topology import LayerRange, NodeId
from meshnet.v1 import node_service_pb2 as pb
from meshnet.v1 import types_pb2

__all__ = ["Candidates", "candidates_of", "node_id"]

DEFAULT_WEIGHT: Final = 100


class Candidates:
    """The last snapshot seen, with the candidates of each node and the table of routes.

    Attributes:
        nodes: by id; not to be changed.
    """

    def __init__(self) -> None:
        self.nodes: Mapping[NodeId, pb.Node] = {}
        self._seen: dict[str, tuple[pb.Node, tuple[Candidate, ...]]] = {}
        self._nodes: tuple[pb.Node, ...] = ()
        self._table = RouteTable(())

    def table(self, snapshot: Snapshot) -> RouteTable:
        """Give the table of `snapshot`; the one before, if all nodes are the same messages."""
        nodes = snapshot.nodes
        if len(nodes) == len(self._nodes) and all(map(_is_same, nodes, self._nodes)):
            return self._table
        seen = {}
        for node in nodes:
            name = node.name
            known = self._seen.get(name)
            seen[name] = known if known and known[0] is node else (node, candidates_of(node))
        self._seen, self._nodes = seen, nodes
        self.nodes = {NodeId(name.removeprefix("nodes/")): each for name, (each, _) in seen.items()}
        self._table = RouteTable((c for _, found in seen.values() for c in found), self._table)
        return self._table


def node_id(node: pb.Node) -> NodeId:
    """Give the id in a node's resource name."""
    return NodeId(node.name.removeprefix("nodes/"))


def candidates_of(node: pb.Node) -> tuple[Candidate, ...]:
    """Give a node's shards as candidates."""
    load = node.load
    links = tuple(
        Link(
            NodeId(link.node.removeprefix("nodes/")),
            link.round_trip_microseconds,
            link.bytes_per_second,
        )
        for link in load.links
    )
    return tuple(
        Candidate(
            node=node_id(node),
            model=shard.model,
            digest=shard.model_digest,
            layers=LayerRange(shard.layers.start, shard.layers.end),
            layer_count=shard.layer_count,
            embedding=shard.embedding,
            lm_head=shard.lm_head,
            ready=node.state == pb.NODE_STATE_READY and not node.cordoned,
            load=load.active_sessions + load.queue_depth,
            weight=node.weight or DEFAULT_WEIGHT,
            free_tokens=_free_tokens(load),
            wire_versions=tuple(node.wire.versions),
            encodings=tuple(node.wire.encodings),
            region=node.location.region,
            zone=node.location.zone,
            layer_us=load.layer_microseconds,
            links=links,
        )
        for shard in node.shards
    )


def _is_same(one: object, other: object) -> bool:
    return one is other


def _free_tokens(load: types_pb2.LoadStats) -> int | None:
    if load.kv_cache_capacity_tokens == 0:
        return None
    return max(0, load.kv_cache_capacity_tokens - load.kv_cache_used_tokens)
