"""Which hops of a new route lack a session's cache, and who computes it again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.topology import Hop, LayerRange, NodeId
from meshnet_gateway.repairs import Repair, keep_layers, plan_repairs, widen
from meshnet_gateway.selection import SelectedRoute


def hop(text: str) -> Hop:
    """Read ``a0-10`` as node a with layers 0-10."""
    start, _, end = text[1:].partition("-")
    return Hop(NodeId(text[0]), f"{text[0]}:1", LayerRange(int(start), int(end)))


def route(text: str, **incarnations: int) -> SelectedRoute:
    hops = tuple(map(hop, text.split()))
    return SelectedRoute(hops, {h.node: incarnations.get(h.node, 1) for h in hops})


OLD = route("a0-10 b10-20 c20-30")


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ("a0-10 b10-20 c20-30", []),
        ("a0-10 x10-20 c20-30", [("a0-10", "x10-20")]),
        ("x0-10 b10-20 c20-30", [(None, "x0-10")]),
        ("a0-10 b10-20 x20-30", [("b10-20", "x20-30")]),
        ("a0-10 x10-15 y15-20 c20-30", [("a0-10", "x10-15 y15-20")]),
        ("a0-10 x10-30", [("a0-10", "x10-30")]),
        ("x0-20 c20-30", [(None, "x0-20")]),
        ("x0-10 b10-20 y20-30", [(None, "x0-10"), ("b10-20", "y20-30")]),
        ("a0-5 x5-20 c20-30", [(None, "a0-5 x5-20")]),
        ("x0-10 y10-20 z20-30", None),
        ("x0-30", None),
        ("a0-9 b9-19 c19-30", None),
    ],
)
def test_runs_of_lost_hops(new, expected):
    found = plan_repairs(OLD, route(new))
    if expected is None:
        assert found is None
        return
    repairs = [
        Repair(before and hop(before), tuple(map(hop, lost.split()))) for before, lost in expected
    ]
    assert found == tuple(repairs)


@pytest.mark.parametrize(
    ("before", "lost", "wider"),
    [
        ("b10-20", "c20-30", ("a0-10", "b10-20 c20-30")),
        ("a0-10", "b10-20", (None, "a0-10 b10-20")),
        (None, "a0-10 b10-20", None),
        ("a0-10", "b10-20 c20-30", None),
    ],
)
def test_a_hop_without_a_journal_is_taken_in(before, lost, wider):
    found = widen(Repair(before and hop(before), tuple(map(hop, lost.split()))), OLD.hops)
    if wider is None:
        assert found is None
        return
    feeder, hops = wider
    assert found == Repair(feeder and hop(feeder), tuple(map(hop, hops.split())))


def test_a_node_that_started_again_has_lost_its_cache():
    found = plan_repairs(OLD, route("a0-10 b10-20 c20-30", b=2))
    assert found == (Repair(hop("a0-10"), (hop("b10-20"),)),)


@pytest.mark.parametrize(
    ("new", "kept"),
    [
        ("a0-10 x10-20 c20-30", "a0-10 x10-20 c20-30"),
        ("a0-7 x7-23 c23-30", "a0-10 x10-20 c20-30"),
        ("a0-7 x7-15 y15-24 c24-30", "a0-10 x10-15 y15-20 c20-30"),
        ("a0-7 x7-9 y9-24 c24-30", "a0-10 y10-20 c20-30"),
        ("a0-7 x7-30", "a0-10 x10-30"),
        ("x0-14 b14-20 c20-30", "x0-10 b10-20 c20-30"),
        ("x0-8 b8-20 c20-30", "x0-8 b8-20 c20-30"),
        ("a0-15 c15-30", "a0-15 c15-30"),
        ("x0-10 y10-20 z20-30", "x0-10 y10-20 z20-30"),
    ],
)
def test_nodes_that_stay_keep_their_layers_where_the_others_reach(new, kept):
    assert keep_layers(OLD, route(new)) == route(kept)


def cuts(layers: int):
    """Give routes over `layers`, of nodes drawn without repeating one."""
    return st.builds(
        lambda inner, nodes: " ".join(
            f"{node}{start}-{end}"
            for node, start, end in zip(
                nodes, [0, *sorted(inner)], [*sorted(inner), layers], strict=False
            )
        ),
        st.sets(st.integers(1, layers - 1), max_size=4),
        st.permutations("abcdefgh"),
    )


@given(cuts(12), cuts(12), st.dictionaries(st.sampled_from("abcdefgh"), st.just(2)))
def test_the_layers_stay_covered_once_and_in_order(old, new, restarted):
    before, given_route = route(old), route(new, **restarted)
    found = keep_layers(before, given_route)
    ends = [0]
    held = {each.node: each.layers for each in (*given_route.hops, *before.hops)}
    for each in found.hops:
        assert each.layers.start == ends[-1]
        ends.append(each.layers.end)
        same = given_route.incarnations[each.node] == before.incarnations.get(each.node)
        bound = next(h for h in given_route.hops if h.node == each.node).layers
        assert bound.contains(each.layers) or (same and held[each.node] == each.layers)
    assert ends[-1] == 12
    assert found.incarnations.keys() == {each.node for each in found.hops}
    repairs = plan_repairs(before, found)
    if repairs is not None:
        lost = [each for repair in repairs for each in repair.hops]
        assert [each for each in found.hops if each in lost] == lost
        for each in found.hops:
            if each not in lost:
                assert each in before.hops
