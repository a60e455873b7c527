"""What is lost of a session when its route changes, and who can compute it again (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from meshnet.topology import Hop, LayerRange, NodeId, Route
from meshnet_gateway.selection import SelectedRoute

__all__ = ["Repair", "keep_layers", "plan_repairs", "widen"]


@dataclass(frozen=True, slots=True)
class Repair:
    """Adjacent hops whose caches are to be computed again.

    Attributes:
        before: the hop that sent them its output and keeps its cache; None for the gateway.
        hops: in order.
    """

    before: Hop | None
    hops: Route


def plan_repairs(old: SelectedRoute, new: SelectedRoute) -> tuple[Repair, ...] | None:
    """Say which hops of a new route hold no cache of a session that ran over an old one.

    A hop holds it where the same start of the same node ran the same layers before. None
    means that no hop does, so that the session begins anew.
    """
    kept = {hop for hop in old.hops if _is_same(hop.node, old, new)}
    if not kept.intersection(new.hops):
        return None
    found: list[Repair] = []
    before: Hop | None = None
    lost: list[Hop] = []
    for hop in new.hops:
        if hop not in kept:
            lost.append(hop)
            continue
        if lost:
            found.append(Repair(before, tuple(lost)))
            lost = []
        before = hop
    if lost:
        found.append(Repair(before, tuple(lost)))
    return tuple(found)


def widen(repair: Repair, route: Route) -> Repair | None:
    """Take in the hop before, whose journal is gone, so that the one before that feeds both.

    None where that is all of the route, or where the gateway feeds them already.
    """
    if repair.before is None:
        return None
    index = route.index(repair.before)
    hops = (repair.before, *repair.hops)
    return None if len(hops) == len(route) else Repair(route[index - 1] if index else None, hops)


def keep_layers(old: SelectedRoute, new: SelectedRoute) -> SelectedRoute:
    """Cut a new route so that nodes which it shares with the old one run the same layers.

    Nodes may hold more layers than they run, and a route is cut where it is balanced best;
    for a session under way it is better to keep caches. Where the other nodes of the new
    route do not reach that far, it stays as it is.
    """
    shared = {hop.node: hop for hop in old.hops if _is_same(hop.node, old, new)}
    cut: list[Hop] = []
    between: list[Hop] = []
    for hop in new.hops:
        if hop.node not in shared:
            between.append(hop)
            continue
        as_before = shared[hop.node]
        filled = _fill(between, cut[-1].layers.end if cut else 0, as_before.layers.start)
        if filled is None:
            return new
        cut += [*filled, as_before]
        between = []
    filled = _fill(between, cut[-1].layers.end if cut else 0, new.hops[-1].layers.end)
    if filled is None:
        return new
    cut += filled
    incarnations = {hop.node: new.incarnations[hop.node] for hop in cut}
    return SelectedRoute(tuple(cut), incarnations, new.grant)


def _is_same(node: NodeId, old: SelectedRoute, new: SelectedRoute) -> bool:
    return node in old.incarnations and new.incarnations.get(node) == old.incarnations[node]


def _fill(hops: list[Hop], start: int, end: int) -> list[Hop] | None:
    """Cut hops to the layers from `start` to `end`; None where they do not cover these."""
    filled: list[Hop] = []
    for hop in hops:
        first, last = max(start, hop.layers.start), min(end, hop.layers.end)
        if first < last:
            if first != start:
                return None
            filled.append(Hop(hop.node, hop.address, LayerRange(first, last)))
            start = last
    return filled if start == end else None
