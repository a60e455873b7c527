"""Routes: which nodes run which layers of a model (pure).

A route is a chain of nodes whose layer ranges, cut to fit, cover every layer once. The
first hop holds the token embedding, the last one the LM head. The cheapest one wins, by
`hopcost`. The choice is deterministic: the same snapshot and query give the same routes.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from meshnet.candidate import Candidate, RouteClass, RouteQuery
from meshnet.chains import Chain, Span, cheapest_chain
from meshnet.coverage import uncovered_error
from meshnet.errors import Code, RouteError
from meshnet.hopcost import HopCost, PricedShards, ShardSet
from meshnet.linkcost import Ints
from meshnet.topology import LayerRange, NodeId

__all__ = ["RouteTable", "Selected", "Stage"]


@dataclass(frozen=True, slots=True)
class Stage:
    """One hop of a selected route.

    Attributes:
        node: its id.
        layers: to run there.
        encodings: of bodies, beside raw, that it and the hop before (or the caller) speak.
        cost: what it adds to the route's.
    """

    node: NodeId
    layers: LayerRange
    encodings: tuple[str, ...]
    cost: HopCost


@dataclass(frozen=True, slots=True)
class Selected:
    """One route.

    Attributes:
        route_id: equal for equal model, digest, nodes and layers.
        model: resource name.
        digest: that all stages agree on.
        wire_version: that all stages and the caller speak; 0 if nobody named one.
        route_class: ``lan`` if all nodes are in one region, else ``relay``.
        cost_us: time for one token, as estimated, with penalties.
        stages: in order of layers.
    """

    route_id: str
    model: str
    digest: str
    wire_version: int
    route_class: RouteClass
    cost_us: int
    stages: tuple[Stage, ...]


class RouteTable:
    """A snapshot of the registry, prepared for many selections.

    Args:
        candidates: in any order; a node has at most one shard of a model.
        before: a table of an earlier snapshot; what did not change is taken from it.
    """

    def __init__(self, candidates: Iterable[Candidate], before: RouteTable | None = None) -> None:
        found: dict[str, dict[tuple[str, int], list[Candidate]]] = {}
        for c in candidates:
            found.setdefault(c.model, {}).setdefault((c.digest, c.layer_count), []).append(c)
        earlier = before._by_model if before is not None else {}
        self._by_model: dict[str, dict[tuple[str, int], ShardSet]] = {
            model: {
                key: ShardSet(members, earlier.get(model, {}).get(key))
                for key, members in sorted(sets.items())
            }
            for model, sets in found.items()
        }

    def candidates(self, query: RouteQuery) -> list[Candidate]:
        """Give the candidates of the query's model and digest.

        Raises:
            RouteError: NOT_FOUND (MODEL_UNKNOWN), there is none.
        """
        if query.model not in self._by_model:
            raise _unknown(f"no node serves {query.model!r}", "model")
        known = [candidate for _, shards in self._sets(query) for candidate in shards.members]
        if not known:
            message = f"no node serves {query.model!r} in digest {query.digest!r}"
            raise _unknown(message, "model_digest")
        return known

    def select(self, query: RouteQuery) -> list[Selected]:
        """Select the cheapest route, and further ones up to ``query.max_routes``.

        Raises:
            RouteError: NOT_FOUND (MODEL_UNKNOWN), no candidate has this model or digest;
                UNAVAILABLE (LAYERS_UNCOVERED), layers have no eligible node now;
                RESOURCE_EXHAUSTED (CACHE_FULL), they would have if their nodes had room.
        """
        known = self.candidates(query)
        groups = [
            (version, shards, kept)
            for _, shards in self._sets(query)
            for version, kept in _groups(shards, query)
        ]
        routes: list[Selected] = []
        used: frozenset[NodeId] = frozenset()
        while len(routes) < max(1, query.max_routes):
            best = _best(groups, query, used)
            if best is None and query.borders:
                best = _best(groups, replace(query, borders=frozenset()), used)
            if best is None:
                raise uncovered_error(known, query)
            if best.route_id in {route.route_id for route in routes}:
                break
            routes.append(best)
            used |= {stage.node for stage in best.stages}
        return routes

    def _sets(self, query: RouteQuery) -> Iterator[tuple[str, ShardSet]]:
        for (digest, _), shards in self._by_model[query.model].items():
            if query.digest in ("", digest):
                yield digest, shards


_Groups = Sequence[tuple[int, ShardSet, Ints]]


def _groups(shards: ShardSet, query: RouteQuery) -> Iterator[tuple[int, Ints]]:
    """Give sets of members that can work together, as rising indices, by wire version.

    A set that a higher version has given already is left out.
    """
    versions = set(query.wire_versions) or shards.versions or {0}
    seen: set[bytes] = set()
    for version in sorted(versions, reverse=True):
        able = shards.eligible(query, version)
        for members in _in_class(able, shards, query):
            if len(members) and members.tobytes() not in seen:
                seen.add(members.tobytes())
                yield version, members


def _in_class(able: Ints, shards: ShardSet, query: RouteQuery) -> Iterator[Ints]:
    if query.route_class != "lan":
        yield able
        return
    for region, members in itertools.groupby(able, lambda i: shards.members[i].region):
        if query.region in ("", region):
            yield np.fromiter(members, np.int64)


def _best(groups: _Groups, query: RouteQuery, used: frozenset[NodeId]) -> Selected | None:
    best: tuple[Chain, PricedShards, int] | None = None
    for version, shards, kept in groups:
        priced = shards.price(kept, query, used)
        chain = cheapest_chain(priced.problem, partial(_rank, priced.members, query.turns))
        if chain is not None and (best is None or chain.cost < best[0].cost):
            best = chain, priced, version
    return None if best is None else _selected(*best, query)


def _rank(members: Sequence[Candidate], turns: Mapping[NodeId, int], index: int) -> tuple[int, str]:
    node = members[index].node
    return turns.get(node, 0), node


def _selected(chain: Chain, priced: PricedShards, version: int, query: RouteQuery) -> Selected:
    spans = chain.spans if priced.problem.borders else _balanced(chain.spans, priced)
    stages = []
    before: Span | None = None
    spoken = query.encodings
    for span in spans:
        node = priced.members[span.node]
        encodings = node.encodings
        if spoken is not None:
            encodings = tuple(name for name in encodings if name in spoken)
        cost = priced.hop_cost(before, span)
        stages.append(Stage(node.node, LayerRange(span.start, span.end), encodings, cost))
        before, spoken = span, node.encodings
    digest = priced.members[0].digest
    text = f"{query.model}\n{digest}\n" + "\n".join(f"{s.node} {s.layers}" for s in stages)
    regions = {priced.members[span.node].region for span in spans}
    return Selected(
        route_id=hashlib.sha256(text.encode()).hexdigest()[:16],
        model=query.model,
        digest=digest,
        wire_version=version,
        route_class="lan" if len(regions) == 1 else "relay",
        cost_us=chain.cost,
        stages=tuple(stages),
    )


def _balanced(spans: Sequence[Span], priced: PricedShards) -> list[Span]:
    """Move borders between hops whose layers cost the same, so that the largest share is least.

    The route costs the same, and the slowest stage sets the pace of a pipeline. Among equal
    cuts the earlier hop takes more.
    """
    balanced: list[Span] = []
    costs = priced.problem.layer_cost
    for _, run in itertools.groupby(spans, lambda span: int(costs[span.node])):
        balanced += _cut(list(run), priced)
    return balanced


def _cut(spans: Sequence[Span], priced: PricedShards) -> list[Span]:
    if len(spans) == 1:
        return list(spans)
    first, last = spans[0].start, spans[-1].end
    starts, ends = priced.problem.links.start, priced.problem.links.end
    low = [first]
    for span in spans[1:]:
        low.append(max(int(starts[span.node]), low[-1] + 1))
    low.append(last)
    high = [last]
    for span in reversed(spans[:-1]):
        high.append(min(int(ends[span.node]), high[-1] - 1))
    high = [first, *reversed(high)]
    cuts: list[int] = []
    for share in range(-(-(last - first) // len(spans)), last - first + 1):
        cuts = [first]
        for index in range(1, len(spans) + 1):
            cuts.append(min(high[index], cuts[-1] + share))
        if all(at >= lowest for at, lowest in zip(cuts, low, strict=True)):
            break
    return [
        Span(span.node, start, end)
        for span, (start, end) in zip(spans, itertools.pairwise(cuts), strict=True)
    ]


def _unknown(message: str, at: str) -> RouteError:
    return RouteError(Code.NOT_FOUND, message, field=at, reason="MODEL_UNKNOWN")
