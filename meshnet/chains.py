"""The cheapest chain of nodes over a model's layers (pure).

A chain gives each layer to one node; each node runs one contiguous range of layers, a part
of those it holds. Its cost is the sum of what each layer costs where it runs, of what each
hop costs, and of the links between one hop and the next.

Exact: a programme over (layer, node) finds the cheapest chain in which a node may come
back; the rare chains in which one does are split into cases until none is left.
Costs are integers, so that a sum does not depend on its order.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from meshnet.linkcost import NEVER, Ints, LinkCosts, by_layer

__all__ = ["Chain", "ChainProblem", "Span", "cheapest_chain"]

_MAX_CASES: Final = 64


@dataclass(frozen=True, slots=True)
class Span:
    """One hop: the node's index and the layers it runs, ``[start, end)``."""

    node: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain and what it costs."""

    cost: int
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class ChainProblem:
    """What there is to choose from; the arrays are int64.

    Attributes:
        links: among the nodes; also says which layers each of them can run.
        layer_cost: ``[node]``, of one layer, positive.
        hop_cost: ``[node]``, of being a hop at all, not negative.
        entry_cost: ``[node]``, of being the first hop.
        borders: layers at which hops begin, beside 0; empty: wherever it costs least.
    """

    links: LinkCosts
    layer_cost: Ints
    hop_cost: Ints
    entry_cost: Ints
    borders: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class _Case:
    """A part of all chains: the layers that each node may run in them.

    Attributes:
        start: ``[node]``, first layer.
        end: ``[node]``, one past the last.
        only: the one node that may run a layer, by layer.
        whole: whether a node has to run as far as it reaches.
    """

    start: Ints
    end: Ints
    only: Mapping[int, int]
    whole: bool = False

    def active(self, num_layers: int) -> list[Ints]:
        """Give for each layer the nodes that may run it."""
        active = by_layer(self.start, self.end - 1, num_layers)
        for layer, node in self.only.items():
            active[layer] = active[layer][active[layer] == node]
        return active

    def ending(self, layer: int, costs: Ints) -> Ints:
        """Give the costs up to `layer` of the nodes that may end there."""
        return np.where(self.end == layer, costs, NEVER) if self.whole else costs


def cheapest_chain(problem: ChainProblem, rank: Callable[[int], Any]) -> Chain | None:
    """Find the cheapest chain; None if the layers cannot be covered.

    Args:
        problem: see there.
        rank: of nodes; where chains cost the same, the node of the lowest rank is taken,
            from the last hop to the first.
    """
    links = problem.links
    everything = _Case(links.start, links.end, {})
    order = itertools.count()  # keeps the heap from comparing cases
    cases: list[tuple[int, int, Chain, _Case]] = []

    def add(case: _Case) -> None:
        found = _solve(problem, case, rank)
        if found is not None:
            heapq.heappush(cases, (found.cost, next(order), found, case))

    add(everything)
    for _ in range(_MAX_CASES):
        if not cases:
            return None
        _, _, chain, case = heapq.heappop(cases)
        again = _comes_back(chain.spans)
        if again is None:
            return chain
        node, layer = again
        start, end = int(case.start[node]), int(case.end[node])
        add(replace(case, end=_put(case.end, node, min(end, layer))))
        if layer in problem.borders:  # whoever runs the layers of both sides comes back
            add(replace(case, start=_put(case.start, node, max(start, layer))))
            continue
        add(replace(case, start=_put(case.start, node, max(start, layer + 1))))
        add(replace(case, only={**case.only, layer: node}))
    if problem.borders:
        return None
    # a node that runs as far as it reaches cannot be of use again
    return _solve(problem, replace(everything, whole=True), rank)


def _put(values: Ints, index: int, value: int) -> Ints:
    changed = values.copy()
    changed[index] = value
    return changed


def _comes_back(spans: Sequence[Span]) -> tuple[int, int] | None:
    """Give a node that has two hops, and a layer between them; None if there is none."""
    seen: dict[int, Span] = {}
    for span in spans:
        if span.node in seen:
            return span.node, seen[span.node].end
        seen[span.node] = span
    return None


def _solve(problem: ChainProblem, case: _Case, rank: Callable[[int], Any]) -> Chain | None:
    """Find the cheapest chain of a case in which nodes may come back."""
    num_layers = problem.links.num_layers
    costs = np.full((num_layers + 1, len(case.start)), NEVER, np.int64)
    for layer, here in enumerate(case.active(num_layers)):
        if len(here) == 0:
            return None
        before = costs[layer]
        if layer == 0:
            enter = problem.entry_cost
        else:
            enter = problem.links.enter(layer, case.ending(layer, before))
        reached = enter[here] + problem.hop_cost[here]
        if layer and layer not in problem.borders:
            stayed = before[here]
            reached = stayed if problem.borders else np.minimum(stayed, reached)
        costs[layer + 1, here] = np.minimum(reached + problem.layer_cost[here], NEVER)
    best = int(costs[num_layers].min())
    return None if best >= NEVER else Chain(best, _trace(problem, case, costs, rank))


def _trace(
    problem: ChainProblem, case: _Case, costs: Ints, rank: Callable[[int], Any]
) -> tuple[Span, ...]:
    """Read the chain out of the costs up to each layer, from the last hop to the first."""
    spans: list[Span] = []
    end = len(costs) - 1
    node = _first(costs[end] == costs[end].min(), rank)
    while True:
        start = end - 1
        cost, each = int(costs[end, node]), int(problem.layer_cost[node])
        while start not in (0, *problem.borders) and costs[start, node] + each == cost:
            cost -= each
            start -= 1
        spans.append(Span(node, start, end))
        if start == 0:
            return tuple(reversed(spans))
        wanted = cost - each - int(problem.hop_cost[node])
        before = case.ending(start, costs[start])
        node = _first(before + problem.links.into(node) == wanted, rank)
        end = start


def _first(among: npt.NDArray[np.bool_], rank: Callable[[int], Any]) -> int:
    return min(np.flatnonzero(among).tolist(), key=rank)
