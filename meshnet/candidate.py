"""What routes are chosen from, and what for: shards on nodes, and a session's needs (pure)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshnet.topology import LayerRange, NodeId

__all__ = ["Candidate", "Link", "RouteClass", "RouteQuery"]

RouteClass = str
"""``lan``: all hops in one region; ``relay``: some link leaves it; empty: no matter."""


@dataclass(frozen=True, slots=True)
class Link:
    """What a node measured of its link to another one.

    Attributes:
        node: the other one.
        rtt_us: round trip of a small request.
        bytes_per_s: throughput; 0 where not known.
    """

    node: NodeId
    rtt_us: int
    bytes_per_s: int = 0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One shard on one node, as the registry knows it.

    Attributes:
        node: the node's id.
        model: resource name of the model.
        digest: of the weights and tokenizer.
        layers: range served; any sub-range can be run.
        layer_count: layers of the whole model.
        embedding: whether the token embedding is served.
        lm_head: whether the final norm and LM head are served.
        ready: whether new sessions may be sent there now.
        load: sessions open and forwards waiting, as last reported.
        weight: share of traffic relative to other nodes, positive.
        free_tokens: KV-cache tokens free, None where not known.
        wire_versions: versions of the wire format spoken; empty means any.
        encodings: body encodings read, beside raw.
        region: where the node is.
        zone: where in the region.
        layer_us: time of one layer for one token, 0 where not measured.
        links: to nodes that may come next.
    """

    node: NodeId
    model: str
    digest: str
    layers: LayerRange
    layer_count: int
    embedding: bool = False
    lm_head: bool = False
    ready: bool = True
    load: int = 0
    weight: int = 100
    free_tokens: int | None = None
    wire_versions: tuple[int, ...] = ()
    encodings: tuple[str, ...] = ()
    region: str = ""
    zone: str = ""
    layer_us: int = 0
    links: tuple[Link, ...] = ()


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """What a session needs of a route.

    Attributes:
        model: resource name.
        digest: only this one; empty means any.
        exclude: nodes not to be used.
        prefer: nodes that hold the session's KV cache: fewest others wins.
        borders: layers at which the hops after the first begin where that is possible; empty
            means wherever it costs least.
        region: of the caller; empty means no matter.
        route_class: ``lan`` keeps all hops in one region, the caller's if it is given.
        wire_versions: that the caller speaks; empty means any.
        encodings: that the caller speaks beside raw; None means any.
        expected_tokens: KV-cache tokens to be expected.
        max_routes: how many to give; they share as few nodes as possible.
        assigned: sessions given to each node since it last reported its load; they
            count as load.
        turns: sessions ever given to each node; of routes that cost the same, the one
            whose nodes had fewer wins.
    """

    model: str
    digest: str = ""
    exclude: frozenset[NodeId] = frozenset()
    prefer: frozenset[NodeId] = frozenset()
    borders: frozenset[int] = frozenset()
    region: str = ""
    route_class: RouteClass = ""
    wire_versions: tuple[int, ...] = ()
    encodings: tuple[str, ...] | None = None
    expected_tokens: int = 0
    max_routes: int = 1
    assigned: Mapping[NodeId, int] = field(default_factory=dict)
    turns: Mapping[NodeId, int] = field(default_factory=dict)
