"""What a hop adds to a route's cost: time for one token, in microseconds (pure).

Every cost is an integer. Measured times are rounded to steps of about a tenth, so that
noise neither moves a session to another node nor a layer to another hop.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

from meshnet.candidate import Candidate, Link, RouteQuery
from meshnet.chains import ChainProblem, Span
from meshnet.linkcost import Ints, LinkCosts
from meshnet.topology import NodeId

__all__ = ["HopCost", "PricedShards", "ShardSet"]

HERE_US: Final = 2_000
REGION_US: Final = 5_000
ELSEWHERE_US: Final = 80_000
"""Links that nobody measured: in one zone, in one region, elsewhere. Measured ones cost
less as a rule, so that routes take links that are known."""

HOP_US: Final = 200
"""Of a hop whatever its link: framing, copies, a wake-up at each end."""

CACHE_US: Final = 20_000
"""Of a session that takes all KV cache that is free; less in proportion."""

NOT_PREFERRED_US: Final = 10**9
"""Of a hop that does not hold the session's KV cache, which would be computed again."""

REUSED_US: Final = 10**12
"""Of a hop that an earlier route of the same answer uses."""

LAYER_US: Final = 1_000
"""Of a layer, where no node of the model has measured one."""

TOKEN_BYTES: Final = 16 * 1024
"""Hidden states of a token that cross a link: 8192 of bfloat16."""

_MAX_US: Final = 10**9
_MAX_LAYER_US: Final = 10**7
_MAX_LOAD: Final = 10**6
_MAX_TOKENS: Final = 1 << 40
_CACHE_STEP_US: Final = 1_000


@dataclass(frozen=True, slots=True)
class HopCost:
    """What one hop adds to a route's cost, in microseconds for one token.

    Attributes:
        compute_us: its layers, on the node alone.
        queue_us: what the sessions that the node has already add to that.
        cache_us: for scarce KV cache.
        link_us: from the hop before, or from the caller.
        overhead_us: of any hop.
        penalty_us: for not holding the session's cache, or being used by a route before.
        link_measured: whether the link was measured, not guessed from the places.
    """

    compute_us: int
    queue_us: int
    cache_us: int
    link_us: int
    overhead_us: int
    penalty_us: int
    link_measured: bool


class ShardSet:
    """The candidates of one model, digest and layer count, as arrays, in order of location.

    Args:
        candidates: at least one.
        before: the same of an earlier snapshot; if only loads changed, its links are taken.
    """

    def __init__(self, candidates: Sequence[Candidate], before: ShardSet | None = None) -> None:
        self.members = sorted(candidates, key=lambda c: (c.region, c.zone, c.node))
        if before is not None and _are_linked_alike(self.members, before.members):
            self._links = before._links
        self.layer_count = self.members[0].layer_count
        self.versions = {version for c in self.members for version in c.wire_versions}

    def eligible(self, query: RouteQuery, version: int) -> Ints:
        """Give the members that a session can use with a wire version, as rising indices."""
        _, _, _, _, _, free = self.facts
        roomy = (free < 0) | (free >= query.expected_tokens)
        roomy[self._indices(query.prefer)] = True  # these hold the session already
        able = self._ready & roomy
        able[self._indices(query.exclude)] = False
        if self.versions:
            able &= self._speaks(version)
        return np.flatnonzero(able)

    def price(self, kept: Ints, query: RouteQuery, used: frozenset[NodeId]) -> PricedShards:
        """Say what hops over the members `kept` (rising indices) cost for a query.

        Args:
            kept: which members may be used; at least one.
            query: see there.
            used: nodes of earlier routes of the same answer.
        """
        _, _, alone, load, weight, free = self.facts
        load = load.copy()  # the facts stay
        for node, count in query.assigned.items():
            if node in self.index:
                load[self.index[node]] += count
        waiting = np.minimum(alone * load * 100 // weight, _MAX_US)
        cache = CACHE_US * np.minimum(query.expected_tokens, free) // np.maximum(free, 1)
        cache = np.maximum(cache, 0) // _CACHE_STEP_US * _CACHE_STEP_US
        penalty = np.full(len(alone), NOT_PREFERRED_US if query.prefer else 0, np.int64)
        penalty[self._indices(query.prefer)] = 0
        penalty[self._indices(used)] += REUSED_US
        problem = ChainProblem(
            links=self._links if len(kept) == len(alone) else self._links_among(kept),
            layer_cost=(alone + waiting)[kept],
            hop_cost=(HOP_US + cache + penalty)[kept],
            entry_cost=self._entry(query.region)[kept],
            borders=query.borders,
        )
        members = [self.members[i] for i in kept.tolist()]
        return PricedShards(members, problem, alone[kept], cache[kept], penalty[kept])

    @cached_property
    def index(self) -> Mapping[NodeId, int]:
        """Where each node is among the members."""
        return {candidate.node: i for i, candidate in enumerate(self.members)}

    @cached_property
    def facts(self) -> Ints:
        """``[6, node]``: range that can be run, layer time, load, weight, free tokens or -1.

        Layer 0 needs the embedding, the last one the LM head. A node that has not measured
        its layers counts as the median of those that have.
        """
        last = self.layer_count - 1
        known = [c.layer_us for c in self.members if c.layer_us > 0]
        typical = statistics.median_low(known) if known else LAYER_US
        rows = [
            (
                max(c.layers.start, 0 if c.embedding else 1),
                min(c.layers.end, last + 1 if c.lm_head else last),
                min(_rounded(c.layer_us or typical), _MAX_LAYER_US),
                min(c.load, _MAX_LOAD),
                c.weight,
                -1 if c.free_tokens is None else min(c.free_tokens, _MAX_TOKENS),
            )
            for c in self.members
        ]
        return np.array(rows, np.int64).T.copy()

    def _indices(self, nodes: Iterable[NodeId]) -> list[int]:
        return [self.index[node] for node in nodes if node in self.index]

    def _speaks(self, version: int) -> npt.NDArray[np.bool_]:
        spoken = (c.wire_versions for c in self.members)
        return np.fromiter((not v or version in v for v in spoken), bool, len(self.members))

    @cached_property
    def _ready(self) -> npt.NDArray[np.bool_]:
        return np.array([candidate.ready for candidate in self.members])

    def _entry(self, region: str) -> Ints:
        """Give what the way from the caller to each node costs, as a first hop."""
        if not region:
            return np.zeros(len(self.members), np.int64)
        same = [candidate.region == region for candidate in self.members]
        return np.where(same, REGION_US, ELSEWHERE_US)

    @cached_property
    def _links(self) -> LinkCosts:
        index = self.index
        measured = {
            (i, index[link.node]): _link_us(link)
            for i, candidate in enumerate(self.members)
            for link in candidate.links
            if link.node in index and link.node != candidate.node
        }
        rows = [(source, target, cost) for (source, target), cost in measured.items()]
        locations: dict[tuple[str, str], int] = {}
        of_node = [locations.setdefault((c.region, c.zone), len(locations)) for c in self.members]
        regions: dict[str, int] = {}
        of_location = [regions.setdefault(region, len(regions)) for region, _ in locations]
        return LinkCosts(
            start=self.facts[0],
            end=self.facts[1],
            num_layers=self.layer_count,
            location=np.array(of_node, np.int64),
            region=np.array(of_location, np.int64),
            near=(HERE_US, REGION_US, ELSEWHERE_US),
            measured=np.array(rows, np.int64).reshape(-1, 3),
        )

    def _links_among(self, kept: Ints) -> LinkCosts:
        """Give the links among some members, numbered anew."""
        links = self._links
        places, location = np.unique(links.location[kept], return_inverse=True)
        renumbered = np.full(len(self.members), -1, np.int64)
        renumbered[kept] = np.arange(len(kept))
        measured = links.measured.copy()
        measured[:, :2] = renumbered[measured[:, :2]]
        return replace(
            links,
            start=links.start[kept],
            end=links.end[kept],
            location=location,
            region=np.unique(links.region[places], return_inverse=True)[1],
            measured=measured[(measured[:, :2] >= 0).all(axis=1)],
        )


@dataclass(frozen=True, slots=True)
class PricedShards:
    """Shards that can work together, with what they cost for one query.

    Attributes:
        members: in the order of the problem's nodes.
        problem: to be solved.
        alone_us: ``[node]``, time of a layer on the node alone.
        cache_us: ``[node]``, for scarce KV cache.
        penalty_us: ``[node]``, for not holding the session's cache or being used before.
    """

    members: Sequence[Candidate]
    problem: ChainProblem
    alone_us: Ints
    cache_us: Ints
    penalty_us: Ints

    def hop_cost(self, before: Span | None, span: Span) -> HopCost:
        """Give what `span` adds to a route after `before` (None: it is the first)."""
        problem, node, layers = self.problem, span.node, span.end - span.start
        compute = int(self.alone_us[node]) * layers
        if before is None:
            link, is_measured = int(problem.entry_cost[node]), False
        else:
            link = int(problem.links.into(node)[before.node])
            is_measured = problem.links.is_measured(before.node, node)
        return HopCost(
            compute_us=compute,
            queue_us=int(problem.layer_cost[node]) * layers - compute,
            cache_us=int(self.cache_us[node]),
            link_us=link,
            overhead_us=HOP_US,
            penalty_us=int(self.penalty_us[node]),
            link_measured=is_measured,
        )


def _link_us(link: Link) -> int:
    """Give what a measured link costs: a round trip, and the bytes of one token."""
    transfer = TOKEN_BYTES * 1_000_000 // link.bytes_per_s if link.bytes_per_s > 0 else 0
    return min(max(1, _rounded(link.rtt_us + transfer)), _MAX_US)


def _are_linked_alike(members: Sequence[Candidate], others: Sequence[Candidate]) -> bool:
    return len(members) == len(others) and all(
        one is other or _linked(one) == _linked(other)
        for one, other in zip(members, others, strict=True)
    )


def _linked(candidate: Candidate) -> tuple[object, ...]:
    """Give all that a candidate's links depend on, as they are rounded."""
    c = candidate
    links = [(link.node, _link_us(link)) for link in c.links]
    return c.node, c.region, c.zone, c.layers, c.embedding, c.lm_head, links


def _rounded(value: int) -> int:
    """Round to the four leading bits: steps of 6 to 12 per cent."""
    shift = max(0, value.bit_length() - 4)
    return (value + (1 << shift >> 1)) >> shift << shift
