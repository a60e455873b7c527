"""Routes: which nodes run which layers of a model (pure).

A route is a chain of nodes whose layer ranges, cut to fit, cover every layer once. The
first hop holds the token embedding, the last one the LM head. The choice is
deterministic: the same snapshot and query always give the same routes.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from meshnet.errors import Code, RouteError
from meshnet.topology import LayerRange, NodeId

__all__ = [
    "Candidate",
    "RouteQuery",
    "Selected",
    "Stage",
    "select_routes",
    "uncovered_layers",
]

RETRY_AFTER_S = 1.0


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
        region: where the node is.
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
    region: str = ""


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """What a session needs of a route.

    Attributes:
        model: resource name.
        digest: only this one; empty means any.
        exclude: nodes not to be used.
        prefer: nodes that hold the session's KV cache: fewest others wins.
        region: of the caller; empty means no matter.
        wire_versions: that the caller speaks; empty means any.
        expected_tokens: KV-cache tokens to be expected.
        max_routes: how many to give; they share as few nodes as possible.
        assigned: sessions given to each node since it last reported its load; they
            count as load.
        turns: sessions ever given to each node; breaks ties of load, so that nodes
            which report no load still take turns.
    """

    model: str
    digest: str = ""
    exclude: frozenset[NodeId] = frozenset()
    prefer: frozenset[NodeId] = frozenset()
    region: str = ""
    wire_versions: tuple[int, ...] = ()
    expected_tokens: int = 0
    max_routes: int = 1
    assigned: Mapping[NodeId, int] = field(default_factory=dict)
    turns: Mapping[NodeId, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stage:
    """One hop of a selected route: a node and the layers to run there."""

    node: NodeId
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class Selected:
    """One route.

    Attributes:
        route_id: equal for equal model, digest and stages.
        model: resource name.
        digest: that all stages agree on.
        wire_version: that all stages and the caller speak; 0 if nobody named one.
        stages: in order of layers.
    """

    route_id: str
    model: str
    digest: str
    wire_version: int
    stages: tuple[Stage, ...]


# reused, not preferred, hops, elsewhere, load, turns, then the nodes: compared in this order
_Cost = tuple[int, int, int, int, int, int]
_FREE: _Cost = (0, 0, 0, 0, 0, 0)
_LOAD_SCALE = 10_000  # load / weight in integers: float sums would depend on their order


def select_routes(candidates: Iterable[Candidate], query: RouteQuery) -> list[Selected]:
    """Select the best route, and further ones up to ``query.max_routes``.

    Fewest hops win, then (in this order) fewest nodes outside the caller's region,
    least load, fewest turns, and the nodes' ids.

    Raises:
        RouteError: NOT_FOUND (MODEL_UNKNOWN), no candidate has this model or digest;
            UNAVAILABLE (LAYERS_UNCOVERED), layers have no eligible node now.
    """
    known = [c for c in candidates if c.model == query.model]
    if not known:
        raise _unknown(f"no node serves {query.model!r}", "model")
    known = [c for c in known if query.digest in ("", c.digest)]
    if not known:
        raise _unknown(f"no node serves {query.model!r} in digest {query.digest!r}", "model_digest")
    routes: list[Selected] = []
    used: set[NodeId] = set()
    while len(routes) < max(1, query.max_routes):
        best = _best(known, query, used)
        if best is None:
            raise _uncovered(known, query)
        if best in routes:
            break
        routes.append(best)
        used.update(stage.node for stage in best.stages)
    return routes


def uncovered_layers(candidates: Sequence[Candidate], layer_count: int) -> list[LayerRange]:
    """Name the layers that no route over ready `candidates` of one digest can cover."""
    covered = [False] * layer_count
    for candidate in (c for c in candidates if c.ready):
        for layer in range(candidate.layers.start, min(candidate.layers.end, layer_count)):
            at_ends = (layer > 0 or candidate.embedding) and (
                layer < layer_count - 1 or candidate.lm_head
            )
            covered[layer] = covered[layer] or at_ends
    gaps = []
    for is_covered, run in itertools.groupby(range(layer_count), key=lambda layer: covered[layer]):
        layers = list(run)
        if not is_covered:
            gaps.append(LayerRange(layers[0], layers[-1] + 1))
    return gaps


def _best(known: Sequence[Candidate], query: RouteQuery, used: set[NodeId]) -> Selected | None:
    best: tuple[_Cost, int, str, int, tuple[Candidate, ...]] | None = None
    for (digest, layer_count), version, group in _groups(known, query):
        found = _chain(group, layer_count, query, used)
        if found is not None:
            cost, chain = found
            best_of = (cost, -version, digest, layer_count, chain)
            if best is None or best_of[:4] < best[:4]:
                best = best_of
    if best is None:
        return None
    _, negative_version, digest, layer_count, chain = best
    stages = _cut(chain, layer_count)
    text = f"{query.model}\n{digest}\n" + "\n".join(f"{s.node} {s.layers}" for s in stages)
    route_id = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Selected(route_id, query.model, digest, -negative_version, stages)


def _groups(
    known: Sequence[Candidate], query: RouteQuery
) -> Iterator[tuple[tuple[str, int], int, list[Candidate]]]:
    """Split into sets whose nodes can work together: one digest, layer count, wire version."""
    eligible = [c for c in known if _is_eligible(c, query)]
    versions = set(query.wire_versions) or {v for c in eligible for v in c.wire_versions} or {0}
    for model in sorted({(c.digest, c.layer_count) for c in eligible}):
        for version in sorted(versions):
            yield (
                model,
                version,
                [
                    c
                    for c in eligible
                    if (c.digest, c.layer_count) == model
                    and (not c.wire_versions or version in c.wire_versions)
                ],
            )


def _is_eligible(candidate: Candidate, query: RouteQuery) -> bool:
    return (
        candidate.ready
        and candidate.node not in query.exclude
        and (candidate.free_tokens is None or candidate.free_tokens >= query.expected_tokens)
    )


def _chain(
    group: Sequence[Candidate], layer_count: int, query: RouteQuery, used: set[NodeId]
) -> tuple[_Cost, tuple[Candidate, ...]] | None:
    """Find the cheapest chain by Dijkstra over layer positions.

    Each hop runs as far as its node reaches: from a later layer every chain is at most
    as dear, since the hops that are not needed any more can be left out. Only the LM
    head limits that, so a node without it stops short of the last layer.
    """
    costs = {c.node: _cost(c, query, used) for c in group}
    pushed = itertools.count()  # keeps the heap from ever comparing chains
    queue: list[tuple[_Cost, tuple[NodeId, ...], int, int, tuple[Candidate, ...]]]
    queue = [(_FREE, (), 0, next(pushed), ())]
    done: set[int] = set()
    while queue:
        cost, nodes, position, _, chain = heapq.heappop(queue)
        if position == layer_count:
            return cost, chain
        if position in done:
            continue
        done.add(position)
        for c in group:
            reach = min(c.layers.end, layer_count if c.lm_head else layer_count - 1)
            if c.layers.start <= position < reach and (position > 0 or c.embedding):
                total = _add(cost, costs[c.node])
                path = (total, (*nodes, c.node), reach, next(pushed), (*chain, c))
                heapq.heappush(queue, path)
    return None


def _cost(candidate: Candidate, query: RouteQuery, used: set[NodeId]) -> _Cost:
    sessions = candidate.load + query.assigned.get(candidate.node, 0)
    return (
        int(candidate.node in used),
        int(bool(query.prefer) and candidate.node not in query.prefer),
        1,
        int(bool(query.region) and candidate.region != query.region),
        sessions * _LOAD_SCALE // candidate.weight,
        query.turns.get(candidate.node, 0),
    )


def _add(left: _Cost, right: _Cost) -> _Cost:
    return (
        left[0] + right[0],
        left[1] + right[1],
        left[2] + right[2],
        left[3] + right[3],
        left[4] + right[4],
        left[5] + right[5],
    )


def _cut(chain: Sequence[Candidate], layer_count: int) -> tuple[Stage, ...]:
    """Cut overlapping ranges so that the largest share is as small as possible.

    The slowest stage sets the pace of a pipeline; among equal cuts the earlier hop
    takes more.
    """
    low = [0]
    for following in chain[1:]:
        low.append(max(following.layers.start, low[-1] + 1))
    low.append(layer_count)
    high = [layer_count]
    for hop in reversed(chain[:-1]):
        high.append(min(hop.layers.end, high[-1] - 1))
    high = [0, *reversed(high)]
    for share in range(-(-layer_count // len(chain)), layer_count + 1):
        cuts = [0]
        for index in range(1, len(chain) + 1):
            cuts.append(min(high[index], cuts[-1] + share))
        if all(at >= lowest for at, lowest in zip(cuts, low, strict=True)):
            break
    return tuple(
        Stage(hop.node, LayerRange(start, end))
        for hop, (start, end) in zip(chain, itertools.pairwise(cuts), strict=True)
    )


def _unknown(message: str, at: str) -> RouteError:
    return RouteError(Code.NOT_FOUND, message, field=at, reason="MODEL_UNKNOWN")


def _uncovered(known: Sequence[Candidate], query: RouteQuery) -> RouteError:
    """Name the gaps of the digest that comes closest to being covered."""
    found = []
    for digest, layer_count in sorted({(c.digest, c.layer_count) for c in known}):
        served = [c for c in known if (c.digest, c.layer_count) == (digest, layer_count)]
        able = [c for c in served if _is_eligible(c, query) and _speaks(c, query)]
        gaps = uncovered_layers(able, layer_count)
        found.append((sum(len(gap) for gap in gaps), gaps, digest))
    _, gaps, digest = min(found)
    name = repr(query.model) + (f" in digest {digest!r}" if len(found) > 1 else "")
    if gaps:
        layers = ", ".join(str(gap) for gap in gaps)
        message = f"layers {layers} of {name} have no eligible node now"
    else:
        message = (
            f"each layer of {name} has an eligible node, but no chain of them has "
            "the embedding first, the LM head last and one wire version"
        )
    return RouteError(
        Code.UNAVAILABLE,
        message,
        field="model",
        reason="LAYERS_UNCOVERED",
        retry_after_s=RETRY_AFTER_S,
    )


def _speaks(candidate: Candidate, query: RouteQuery) -> bool:
    spoken = set(candidate.wire_versions)
    return not spoken or not query.wire_versions or bool(spoken & set(query.wire_versions))
