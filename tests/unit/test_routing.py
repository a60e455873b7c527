from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.errors import Code, RouteError
from meshnet.routing import Candidate, RouteQuery, select_routes, uncovered_layers
from meshnet.topology import LayerRange, NodeId

MODEL = "models/m"


def shard(node, start, end, count=8, **kwargs):
    values = {"embedding": start == 0, "lm_head": end == count, "digest": "d", **kwargs}
    return Candidate(
        NodeId(node), MODEL, layers=LayerRange(start, end), layer_count=count, **values
    )


def query(**kwargs):
    return RouteQuery(MODEL, **kwargs)


def stages(candidates, **kwargs):
    (route,) = select_routes(candidates, query(**kwargs))
    return [(stage.node, str(stage.layers)) for stage in route.stages]


HALVES = [shard("a", 0, 4), shard("b", 4, 8)]


@pytest.mark.parametrize(
    ("candidates", "kwargs", "want"),
    [
        ([shard("a", 0, 8)], {}, [("a", "0-8")]),
        (HALVES, {}, [("a", "0-4"), ("b", "4-8")]),
        ([*HALVES, shard("c", 0, 8)], {}, [("c", "0-8")]),
        ([*HALVES, shard("c", 0, 8)], {"exclude": {"c"}}, [("a", "0-4"), ("b", "4-8")]),
        ([*HALVES, shard("c", 0, 8, ready=False)], {}, [("a", "0-4"), ("b", "4-8")]),
        ([*HALVES, shard("c", 0, 8)], {"prefer": {"a", "b"}}, [("a", "0-4"), ("b", "4-8")]),
        ([shard("a", 0, 6), shard("b", 2, 8)], {}, [("a", "0-4"), ("b", "4-8")]),
        ([shard("a", 0, 3), shard("b", 1, 8)], {}, [("a", "0-3"), ("b", "3-8")]),
        ([shard("a", 0, 8, lm_head=False), shard("b", 7, 8)], {}, [("a", "0-7"), ("b", "7-8")]),
        ([shard("a", 0, 1), shard("b", 0, 8, embedding=False)], {}, [("a", "0-1"), ("b", "1-8")]),
        ([shard("a", 0, 8, load=3), shard("b", 0, 8)], {}, [("b", "0-8")]),
        ([shard("a", 0, 8), shard("b", 0, 8)], {"assigned": {"a": 1}}, [("b", "0-8")]),
        ([shard("a", 0, 8), shard("b", 0, 8)], {"turns": {"a": 9}}, [("b", "0-8")]),
        ([shard("a", 0, 8, load=3, weight=400), shard("b", 0, 8, load=1)], {}, [("a", "0-8")]),
        ([shard("a", 0, 8), shard("b", 0, 8, region="eu")], {"region": "eu"}, [("b", "0-8")]),
        (
            [shard("a", 0, 8, free_tokens=9), shard("b", 0, 8)],
            {"expected_tokens": 10},
            [("b", "0-8")],
        ),
        ([shard("b", 0, 8), shard("a", 0, 8)], {}, [("a", "0-8")]),
    ],
)
def test_which_route_wins(candidates, kwargs, want):
    assert stages(candidates, **kwargs) == want


def test_hops_of_different_digests_never_meet():
    mixed = [shard("a", 0, 4, digest="x"), shard("b", 4, 8, digest="y")]
    with pytest.raises(RouteError, match="layers 0-4 of 'models/m' in digest 'y'"):
        stages(mixed)
    whole = [*mixed, shard("c", 4, 8, digest="x", load=9)]
    assert stages(whole) == [("a", "0-4"), ("c", "4-8")]
    with pytest.raises(RouteError, match="layers 0-4"):
        stages(whole, digest="y")


def test_hops_of_different_wire_versions_never_meet():
    mixed = [shard("a", 0, 4, wire_versions=(1, 2)), shard("b", 4, 8, wire_versions=(3,))]
    with pytest.raises(RouteError, match="one wire version"):
        stages(mixed)
    whole = [*mixed, shard("c", 4, 8, wire_versions=(2, 3), load=9)]
    (route,) = select_routes(whole, query(wire_versions=(2, 3)))
    assert (route.wire_version, route.stages[1].node) == (2, "c")


@pytest.mark.parametrize(
    ("candidates", "kwargs", "message"),
    [
        ([shard("a", 0, 4)], {}, "layers 4-8 of"),
        ([shard("a", 0, 3), shard("b", 5, 8)], {}, "layers 3-5 of"),
        ([shard("a", 2, 3)], {}, "layers 0-2, 3-8 of"),
        (HALVES, {"exclude": {"b"}}, "layers 4-8 of"),
        ([shard("a", 0, 8, lm_head=False)], {}, "layers 7-8 of"),
        ([shard("a", 0, 8, embedding=False)], {}, "layers 0-1 of"),
        ([shard("a", 0, 8, ready=False)], {}, "layers 0-8 of"),
    ],
)
def test_uncovered_layers_are_named(candidates, kwargs, message):
    with pytest.raises(RouteError, match=message) as caught:
        stages(candidates, **kwargs)
    assert (caught.value.code, caught.value.reason) == (Code.UNAVAILABLE, "LAYERS_UNCOVERED")
    assert caught.value.retry_after_s is not None


@pytest.mark.parametrize(("model", "digest"), [("models/other", ""), (MODEL, "other")])
def test_an_unknown_model_is_not_found(model, digest):
    with pytest.raises(RouteError) as caught:
        select_routes(HALVES, RouteQuery(model, digest=digest))
    assert (caught.value.code, caught.value.reason) == (Code.NOT_FOUND, "MODEL_UNKNOWN")


def test_further_routes_share_as_few_nodes_as_possible():
    mesh = [*HALVES, shard("c", 0, 4), shard("d", 4, 8), shard("e", 0, 8)]
    routes = select_routes(mesh, query(max_routes=8))
    used = [[stage.node for stage in route.stages] for route in routes]
    assert used == [["e"], ["a", "b"], ["c", "d"]]


def test_equal_hops_have_an_equal_route_id():
    first, second = (select_routes(mesh, query())[0] for mesh in (HALVES, HALVES[::-1]))
    assert first == second
    other = select_routes([shard("a", 0, 4), shard("c", 4, 8)], query())[0]
    assert other.route_id != first.route_id


@pytest.mark.parametrize("reports", [False, True])
def test_sessions_spread_over_equal_nodes(reports):
    mesh = [
        shard("a", 0, 4),
        shard("b", 0, 4),
        shard("c", 4, 8),
        shard("d", 4, 8),
        shard("e", 4, 8),
    ]
    given_to: Counter[NodeId] = Counter()
    for _ in range(30):
        now = [replace(c, load=given_to[c.node] if reports else 0) for c in mesh]
        (route,) = select_routes(now, query(turns=given_to))
        given_to.update(stage.node for stage in route.stages)
        for group in ("ab", "cde"):
            counts = [given_to[NodeId(node)] for node in group]
            assert max(counts) - min(counts) <= 1


@st.composite
def meshes(draw):
    count = draw(st.integers(1, 6))
    mesh = []
    for node in "abcde"[: draw(st.integers(1, 5))]:
        start = draw(st.integers(0, count - 1))
        end = draw(st.integers(start + 1, count))
        mesh.append(
            shard(
                node,
                start,
                end,
                count,
                embedding=start == 0 and draw(st.booleans()),
                lm_head=end == count and draw(st.booleans()),
                ready=draw(st.integers(0, 5)) > 0,
                load=draw(st.integers(0, 3)),
                digest=draw(st.sampled_from("xxy")),
                region=draw(st.sampled_from(["eu", "us"])),
            )
        )
    return mesh


def every_route(mesh, count):
    """Give every way to cut every order of nodes into a whole model, by brute force."""
    able = [c for c in mesh if c.ready]
    for size in range(1, len(able) + 1):
        for chain in itertools.permutations(able, size):
            if len({c.digest for c in chain}) > 1:
                continue
            if not (chain[0].embedding and chain[-1].lm_head):
                continue
            for cuts in itertools.combinations(range(1, count), size - 1):
                ranges = [LayerRange(a, b) for a, b in itertools.pairwise((0, *cuts, count))]
                if all(c.layers.contains(r) for c, r in zip(chain, ranges, strict=True)):
                    yield chain, ranges


def cost(chain, asked):
    return (
        sum(bool(asked.prefer) and c.node not in asked.prefer for c in chain),
        len(chain),
        sum(bool(asked.region) and c.region != asked.region for c in chain),
        sum(c.load for c in chain),
    )


@settings(max_examples=300, deadline=None)
@given(mesh=meshes(), prefer=st.sets(st.sampled_from("abcde")), region=st.sampled_from(["", "eu"]))
def test_no_route_is_better_than_the_one_selected(mesh, prefer, region):
    count = mesh[0].layer_count
    asked = query(prefer=frozenset(prefer), region=region)
    every = list(every_route(mesh, count))
    if not every:
        with pytest.raises(RouteError) as caught:
            select_routes(mesh, asked)
        assert caught.value.reason == "LAYERS_UNCOVERED"
        return
    (route,) = select_routes(mesh, asked)
    by_node = {c.node: c for c in mesh}
    chain = tuple(by_node[stage.node] for stage in route.stages)
    ranges = [stage.layers for stage in route.stages]
    assert (chain, ranges) in every
    assert cost(chain, asked) == min(cost(other, asked) for other, _ in every)
    largest = min(max(map(len, cut)) for other, cut in every if other == chain)
    assert max(map(len, ranges)) == largest
    assert select_routes(mesh[::-1], asked) == [route]
    for gap in uncovered_layers([c for c in mesh if c.digest == route.digest], count):
        pytest.fail(f"{gap} was called uncovered, yet there is a route")


def test_a_large_mesh_is_routed_quickly_enough_to_do_it_per_session():
    mesh = [shard(f"n{i}", i % 121, min(126, i % 121 + 6 + i % 7), 126) for i in range(400)]
    (route,) = select_routes(mesh, query())
    layers = [stage.layers for stage in route.stages]
    assert layers[0].start == 0
    assert layers[-1].end == 126
    assert all(a.end == b.start for a, b in itertools.pairwise(layers))
