"""What the links between nodes cost, and the cheapest way to come to each node (pure).

A link costs what was measured, else by place: the least where both nodes are in one
location, more in one region, most elsewhere. Costs are int64 arrays, without unit.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["NEVER", "Ints", "LinkCosts", "by_layer"]

Ints = npt.NDArray[np.int64]

NEVER: Final = 1 << 60
"""More than any chain costs."""


@dataclass(frozen=True)
class LinkCosts:
    """The links among some nodes.

    Attributes:
        start: ``[node]``, first layer that the node can run.
        end: ``[node]``, one past the last; not above `num_layers`.
        num_layers: of the model.
        location: ``[node]``, index of a location, in rising order, from 0 without gaps.
        region: ``[location]``, index of a region, in rising order, from 0 without gaps.
        near: the costs of an unmeasured link in one location, in one region, elsewhere:
            rising and positive.
        measured: ``[link, 3]``: from, to, cost; no pair twice.
    """

    start: Ints
    end: Ints
    num_layers: int
    location: Ints
    region: Ints
    near: tuple[int, int, int]
    measured: Ints

    def into(self, node: int) -> Ints:
        """Give what the link from each node to `node` costs."""
        costs = self._by_place(self.location, self.location[node])
        links = self._into[self._first_into[node] : self._first_into[node + 1]]
        costs[self.measured[links, 0]] = self.measured[links, 2]
        return costs

    def is_measured(self, before: int, node: int) -> bool:
        """Tell whether the link from `before` to `node` was measured."""
        links = self._into[self._first_into[node] : self._first_into[node + 1]]
        return before in self.measured[links, 0]

    def enter(self, layer: int, before: Ints) -> Ints:
        """Give the cost of coming to each node at `layer` from the cheapest node before it.

        Unmeasured links need the cheapest node of each place alone. Measured links that
        cost less are tried one by one where both ends can meet. Where the cheapest node of
        a place has a measured link that costs more, the node it leads to is looked at alone.

        Args:
            layer: at which the nodes before end, 0 < `layer` < `num_layers`.
            before: ``[node]``, cost up to `layer` with that node last; `NEVER` if it cannot be.
        """
        here, region, elsewhere = self.near
        of_location = np.minimum.reduceat(before, self._first_of_location)
        nearest = of_location + here
        if len(of_location) > 1:
            of_region = np.minimum.reduceat(of_location, self._first_of_region)
            nearest = np.minimum(nearest, of_region[self.region] + region)
            if len(of_region) > 1:
                nearest = np.minimum(nearest, of_region.min() + elsewhere)
        best = nearest[self.location]
        slow = self._slow[layer]
        doubtful = self._doubtful(before, of_location, best, slow) if len(slow) else ()
        quick = self._quick[layer]
        if len(quick):
            source, target, cost = self._columns
            np.minimum.at(best, target[quick], before[source[quick]] + cost[quick])
        for node in doubtful:
            best[node] = (before + self.into(node)).min()
        return best

    def _doubtful(self, before: Ints, of_location: Ints, best: Ints, slow: Ints) -> list[int]:
        """Name the nodes whose best cost may be that of a slow link, taken for an unmeasured one.

        It is not where another node of the location, with no slow link there, costs as much.
        """
        source, target, _ = self._columns
        source, target = source[slow], target[slow]
        wrong = before[source] + self._place_cost[slow] == best[target]
        if not wrong.any():
            return []
        source, target = source[wrong], target[wrong]
        is_cheapest = before == of_location[self.location]
        ties = np.add.reduceat(is_cheapest.astype(np.int64), self._first_of_location)
        nodes, counts = np.unique(target, return_counts=True)
        place = self.location[nodes]
        is_near = of_location[place] + self.near[0] == best[nodes]
        nodes = nodes[~(is_near & (ties[place] > counts))]
        reached: list[int] = nodes[best[nodes] < NEVER].tolist()
        return reached

    def _by_place(self, location: Ints, other: Ints) -> Ints:
        here, region, elsewhere = self.near
        same_region = self.region[location] == self.region[other]
        return np.where(location == other, here, np.where(same_region, region, elsewhere))

    @cached_property
    def _columns(self) -> tuple[Ints, Ints, Ints]:
        source, target, cost = self.measured.T.copy()
        return source, target, cost

    @cached_property
    def _place_cost(self) -> Ints:
        source, target, _ = self._columns
        return self._by_place(self.location[source], self.location[target])

    @cached_property
    def _into(self) -> Ints:
        return np.argsort(self.measured[:, 1], kind="stable")

    @cached_property
    def _first_into(self) -> Ints:
        targets = self.measured[self._into, 1]
        return np.searchsorted(targets, np.arange(len(self.start) + 1))

    @cached_property
    def _first_of_location(self) -> Ints:
        return np.searchsorted(self.location, np.arange(len(self.region)))

    @cached_property
    def _first_of_region(self) -> Ints:
        return np.searchsorted(self.region, np.arange(int(self.region[-1]) + 1))

    @cached_property
    def _quick(self) -> list[Ints]:
        return self._meeting(self._columns[2] < self._place_cost)

    @cached_property
    def _slow(self) -> list[Ints]:
        return self._meeting(self._columns[2] > self._place_cost)

    def _meeting(self, wanted: npt.NDArray[np.bool_]) -> list[Ints]:
        """Give for each layer the wanted links whose ends can meet there, as indices."""
        source, target, _ = self._columns
        first = np.maximum(self.start[source] + 1, self.start[target])
        last = np.minimum(self.end[source], self.end[target] - 1)
        links = np.flatnonzero(wanted)
        return [links[found] for found in by_layer(first[links], last[links], self.num_layers)]


def by_layer(first: Ints, last: Ints, num_layers: int) -> list[Ints]:
    """Give for each layer the indices of the intervals ``[first, last]`` that hold it, rising."""
    lengths = np.maximum(last - first + 1, 0)
    index = np.repeat(np.arange(len(first)), lengths)
    offset = np.arange(len(index)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    layer = first[index] + offset
    order = np.argsort(layer, kind="stable")
    bounds = np.searchsorted(layer[order], np.arange(num_layers + 1))
    index = index[order]
    return [index[low:high] for low, high in itertools.pairwise(bounds.tolist())]
