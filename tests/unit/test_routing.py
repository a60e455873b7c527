from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.candidate import Candidate, Link, RouteQuery
from meshnet.coverage import left_out, uncovered_layers, why_not
from meshnet.errors import Code, RouteError
from meshnet.hopcost import (
    ELSEWHERE_US,
    HERE_US,
    HOP_US,
    NOT_PREFERRED_US,
    REGION_US,
)
from meshnet.routing import RouteTable
from meshnet.topology import LayerRange, NodeId

MODEL = "models/m"


def shard(node, start, end, count=8, **kwargs):
    values = {"embedding": start == 0, "lm_head": end == count, "digest": "d", **kwargs}
    return Candidate(
        NodeId(node), MODEL, layers=LayerRange(start, end), layer_count=count, **values
    )


def linked(node, start, end, count=8, **rtts):
    links = tuple(Link(NodeId(other), rtt) for other, rtt in rtts.items())
    return shard(node, start, end, count, links=links)


def query(**kwargs):
    return RouteQuery(MODEL, **kwargs)


def select(candidates, asked):
    return RouteTable(candidates).select(asked)


def stages(candidates, **kwargs):
    (route,) = select(candidates, query(**kwargs))
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
        # where a session's hops began before; elsewhere only where no route has it
        ([shard("a", 0, 6), shard("b", 2, 8)], {"borders": {5}}, [("a", "0-5"), ("b", "5-8")]),
        ([*HALVES, shard("c", 0, 8)], {"borders": {4}}, [("a", "0-4"), ("b", "4-8")]),
        (
            [*HALVES, shard("c", 0, 8)],
            {"borders": {4}, "exclude": {"b"}},
            [("a", "0-4"), ("c", "4-8")],
        ),
        ([shard("a", 0, 8), shard("b", 0, 8)], {"borders": {3}}, [("a", "0-3"), ("b", "3-8")]),
        ([shard("a", 0, 8)], {"borders": {3}}, [("a", "0-8")]),
        (HALVES, {"borders": {2, 4}}, [("a", "0-4"), ("b", "4-8")]),
        (
            [*HALVES, shard("c", 0, 4, load=90)],
            {"borders": {2, 4}, "prefer": {"a", "b"}},
            [("a", "0-2"), ("c", "2-4"), ("b", "4-8")],
        ),
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
        # measured: a faster node, a node that pays for one hop more, a slow link, a fast one
        ([shard("a", 0, 8, layer_us=2048), shard("b", 0, 8, layer_us=1024)], {}, [("b", "0-8")]),
        (
            [shard("a", 0, 8, layer_us=8192), shard("b", 2, 8, layer_us=1024)],
            {},
            [("a", "0-2"), ("b", "2-8")],
        ),
        ([shard("a", 0, 8, layer_us=1024), shard("b", 2, 8, layer_us=960)], {}, [("a", "0-8")]),
        (
            [linked("a", 0, 4, b=40_960), shard("b", 4, 8), shard("c", 4, 8)],
            {},
            [("a", "0-4"), ("c", "4-8")],
        ),
        (
            [linked("a", 0, 4, c=1024), shard("b", 4, 8), shard("c", 4, 8)],
            {},
            [("a", "0-4"), ("c", "4-8")],
        ),
        (
            [
                shard("a", 0, 4, links=(Link(NodeId("b"), 256, 10**6),)),
                shard("b", 4, 8),
                shard("c", 4, 8),
            ],
            {},
            [("a", "0-4"), ("c", "4-8")],
        ),
        # scarce cache, and noise of a measurement
        (
            [shard("a", 0, 8, free_tokens=1000), shard("b", 0, 8, free_tokens=9000)],
            {"expected_tokens": 900},
            [("b", "0-8")],
        ),
        ([shard("a", 0, 8, layer_us=1030), shard("b", 0, 8, layer_us=1020)], {}, [("a", "0-8")]),
        # zones and regions, and a route class that forbids to leave one
        (
            [shard("a", 0, 4, zone="z"), shard("b", 4, 8, zone="y"), shard("c", 4, 8, zone="z")],
            {},
            [("a", "0-4"), ("c", "4-8")],
        ),
        (
            [shard("a", 0, 8, region="eu", load=200), shard("b", 0, 8, region="us")],
            {"region": "eu"},
            [("b", "0-8")],
        ),
        (
            [shard("a", 0, 8, region="eu", load=200), shard("b", 0, 8, region="us")],
            {"region": "eu", "route_class": "lan"},
            [("a", "0-8")],
        ),
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
    (route,) = select(whole, query(wire_versions=(2, 3)))
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
        select(HALVES, RouteQuery(model, digest=digest))
    assert (caught.value.code, caught.value.reason) == (Code.NOT_FOUND, "MODEL_UNKNOWN")


def test_further_routes_share_as_few_nodes_as_possible():
    mesh = [*HALVES, shard("c", 0, 4), shard("d", 4, 8), shard("e", 0, 8)]
    routes = select(mesh, query(max_routes=8))
    used = [[stage.node for stage in route.stages] for route in routes]
    assert used == [["e"], ["a", "b"], ["c", "d"]]


def test_equal_hops_have_an_equal_route_id():
    first, second = (select(mesh, query())[0] for mesh in (HALVES, HALVES[::-1]))
    assert first == second
    other = select([shard("a", 0, 4), shard("c", 4, 8)], query())[0]
    assert other.route_id != first.route_id


def test_a_node_is_never_used_twice():
    """Two slow layers in the middle of a node's range would be cheaper elsewhere, but not ends."""
    mesh = [
        linked("a", 0, 8, b=256),
        linked("b", 2, 6, a=256),
        shard("c", 5, 8, layer_us=512),
    ]
    mesh[0] = replace(mesh[0], layer_us=4096)
    mesh[1] = replace(mesh[1], layer_us=256)
    (route,) = select([mesh[0], mesh[1]], query())
    assert [(s.node, str(s.layers)) for s in route.stages] == [("a", "0-8")]
    (route,) = select(mesh, query())
    assert [s.node for s in route.stages] == ["a", "b", "c"]


def test_a_hop_gets_the_encodings_that_it_and_the_one_before_speak():
    mesh = [
        shard("a", 0, 4, encodings=("zstd", "bf16p")),
        shard("b", 4, 6, encodings=("zstd",)),
        shard("c", 6, 8, encodings=("zstd", "bf16p")),
    ]
    (route,) = select(mesh, query(encodings=("bf16p",)))
    assert [stage.encodings for stage in route.stages] == [("bf16p",), ("zstd",), ("zstd",)]
    (route,) = select(mesh, query())
    assert route.stages[0].encodings == ("zstd", "bf16p")


def test_a_route_says_whether_it_leaves_a_region():
    mesh = [shard("a", 0, 4, region="eu"), shard("b", 4, 8, region="us")]
    assert select(mesh, query())[0].route_class == "relay"
    with pytest.raises(RouteError, match="inside one region"):
        select(mesh, query(route_class="lan"))
    assert select(HALVES, query(route_class="lan"))[0].route_class == "lan"


FULL = [shard("a", 0, 4), shard("b", 4, 8, free_tokens=9)]


@pytest.mark.parametrize(
    ("mesh", "asked", "code"),
    [
        (FULL, query(expected_tokens=10), Code.RESOURCE_EXHAUSTED),
        (FULL, query(expected_tokens=10, exclude=frozenset({NodeId("a")})), Code.UNAVAILABLE),
        ([*FULL[1:], shard("a", 0, 4, ready=False)], query(expected_tokens=10), Code.UNAVAILABLE),
    ],
)
def test_a_lack_of_cache_is_told_from_a_lack_of_nodes(mesh, asked, code):
    with pytest.raises(RouteError) as caught:
        select(mesh, asked)
    assert caught.value.code is code
    assert caught.value.retry_after_s is not None
    if code is Code.RESOURCE_EXHAUSTED:
        assert caught.value.reason == "CACHE_FULL"
        assert "layers 4-8" in caught.value.message
        assert "10 tokens" in caught.value.message


def test_a_node_that_holds_the_session_needs_no_more_room():
    asked = query(expected_tokens=10, prefer=frozenset({NodeId("b")}))
    assert [stage.node for stage in select(FULL, asked)[0].stages] == ["a", "b"]
    assert left_out(FULL, asked) == []


def test_each_node_left_out_has_its_reason():
    mesh = [
        shard("a", 0, 8, ready=False),
        shard("b", 0, 8),
        shard("c", 0, 8, free_tokens=1),
        shard("d", 0, 8, wire_versions=(1,)),
        shard("e", 0, 8),
    ]
    asked = query(exclude=frozenset({NodeId("b")}), expected_tokens=2, wire_versions=(2,))
    assert left_out(mesh, asked) == [
        ("a", "NOT_READY"),
        ("b", "EXCLUDED"),
        ("c", "CACHE_FULL"),
        ("d", "WIRE_VERSION"),
    ]


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
    for _ in range(100):
        now = [replace(c, load=given_to[c.node] if reports else 0) for c in mesh]
        (route,) = select(now, query(turns=given_to))
        given_to.update(stage.node for stage in route.stages)
        for group in ("ab", "cde"):
            counts = [given_to[NodeId(node)] for node in group]
            assert max(counts) - min(counts) <= 1


ROUND_US = (256, 1024, 1536, 8192)
"""Times that rounding to four leading bits leaves alone."""


@st.composite
def meshes(draw):
    count = draw(st.integers(1, 6))
    names = "abcde"[: draw(st.integers(1, 5))]
    mesh = []
    for node in names:
        start = draw(st.integers(0, count - 1))
        end = draw(st.integers(start + 1, count))
        others = draw(st.sets(st.sampled_from(names))) - {node}
        mesh.append(
            shard(
                node,
                start,
                end,
                count,
                embedding=start == 0 and draw(st.integers(0, 3)) > 0,
                lm_head=end == count and draw(st.integers(0, 3)) > 0,
                ready=draw(st.integers(0, 5)) > 0,
                load=draw(st.integers(0, 3)),
                weight=draw(st.sampled_from([50, 100])),
                digest=draw(st.sampled_from("xxxy")),
                region=draw(st.sampled_from(["eu", "us"])),
                zone=draw(st.sampled_from(["", "z"])),
                layer_us=draw(st.sampled_from(ROUND_US)),
                wire_versions=draw(st.sampled_from([(), (2,), (2, 3)])),
                links=tuple(
                    Link(NodeId(other), draw(st.sampled_from([*ROUND_US, 90_112])))
                    for other in sorted(others)
                ),
            )
        )
    return mesh


def every_route(mesh, asked):
    """Give every way to cut every order of nodes into a whole model, by brute force."""
    able = [c for c in mesh if c.ready and c.node not in asked.exclude]
    count = mesh[0].layer_count
    for size in range(1, len(able) + 1):
        for chain in itertools.permutations(able, size):
            versions = [set(c.wire_versions) for c in chain if c.wire_versions]
            if (
                len({c.digest for c in chain}) > 1
                or not (chain[0].embedding and chain[-1].lm_head)
                or (versions and not set.intersection(*versions))
                or (asked.route_class == "lan" and len({c.region for c in chain}) > 1)
                or (asked.route_class == "lan" and asked.region not in ("", chain[0].region))
            ):
                continue
            for cuts in itertools.combinations(range(1, count), size - 1):
                ranges = [LayerRange(a, b) for a, b in itertools.pairwise((0, *cuts, count))]
                if all(c.layers.contains(r) for c, r in zip(chain, ranges, strict=True)):
                    yield chain, ranges


def price(chain, ranges, asked):
    """Add up what a route costs, from the words in hopcost's docstrings alone."""
    total = 0
    if asked.region:
        total += REGION_US if chain[0].region == asked.region else ELSEWHERE_US
    for before, after in itertools.pairwise(chain):
        measured = {link.node: link.rtt_us for link in before.links}
        if after.node in measured:
            total += measured[after.node]
        elif before.region != after.region:
            total += ELSEWHERE_US
        else:
            total += HERE_US if before.zone == after.zone else REGION_US
    for c, layers in zip(chain, ranges, strict=True):
        sessions = c.load + asked.assigned.get(c.node, 0)
        total += len(layers) * (c.layer_us + c.layer_us * sessions * 100 // c.weight)
        total += HOP_US
        total += NOT_PREFERRED_US if asked.prefer and c.node not in asked.prefer else 0
    return total


QUERIES = st.builds(
    query,
    prefer=st.frozensets(st.sampled_from("abcde")),
    exclude=st.frozensets(st.sampled_from("abcde"), max_size=1),
    borders=st.just(frozenset()) | st.frozensets(st.integers(1, 5), max_size=3),
    region=st.sampled_from(["", "eu"]),
    route_class=st.sampled_from(["", "", "lan", "relay"]),
    assigned=st.dictionaries(st.sampled_from("abcde"), st.integers(1, 3), max_size=2),
)


@settings(max_examples=200, deadline=None)
@given(mesh=meshes(), asked=QUERIES)
def test_no_route_is_cheaper_than_the_one_selected(mesh, asked):
    every = list(every_route(mesh, asked))
    if asked.borders:
        kept = [r for r in every if {layers.start for layers in r[1]} == {0, *asked.borders}]
        every = kept or every
    if not every:
        with pytest.raises(RouteError) as caught:
            select(mesh, asked)
        assert caught.value.reason in ("CACHE_FULL", "LAYERS_UNCOVERED")
        return
    (route,) = select(mesh, asked)
    by_node = {c.node: c for c in mesh}
    chain = tuple(by_node[stage.node] for stage in route.stages)
    ranges = [stage.layers for stage in route.stages]
    assert (chain, ranges) in every
    assert route.cost_us == price(chain, ranges, asked)
    assert route.cost_us == min(price(*other, asked) for other in every)
    assert select(mesh[::-1], asked) == [route]
    for stage in route.stages:
        cost = stage.cost
        assert cost.link_measured == any(
            stage.node in [x.node for x in c.links]
            for c in chain
            if ranges[chain.index(c)].end == stage.layers.start
        )
    parts = [
        s.cost.compute_us
        + s.cost.queue_us
        + s.cost.cache_us
        + s.cost.link_us
        + s.cost.overhead_us
        + s.cost.penalty_us
        for s in route.stages
    ]
    assert sum(parts) == route.cost_us
    for gap in uncovered_layers([c for c in mesh if c.digest == route.digest], mesh[0].layer_count):
        pytest.fail(f"{gap} was called uncovered, yet there is a route")


@given(
    node=st.builds(
        shard,
        st.just("a"),
        st.just(0),
        st.just(8),
        ready=st.booleans(),
        free_tokens=st.sampled_from([None, 0, 5, 9]),
        wire_versions=st.sampled_from([(), (1,), (1, 2)]),
        region=st.sampled_from(["", "eu"]),
    ),
    asked=st.builds(
        query,
        exclude=st.frozensets(st.sampled_from("ab")),
        expected_tokens=st.sampled_from([0, 5, 6]),
        wire_versions=st.sampled_from([(), (2,), (2, 3)]),
        region=st.sampled_from(["", "eu", "us"]),
        route_class=st.sampled_from(["", "lan"]),
    ),
)
def test_a_node_is_used_exactly_if_nothing_is_said_against_it(node, asked):
    try:
        used = [stage.node for stage in select([node], asked)[0].stages]
    except RouteError:
        used = []
    assert used == ([] if why_not(node, asked) else ["a"])


@given(mesh=meshes(), loads=st.lists(st.integers(0, 9), min_size=5, max_size=5))
def test_a_table_made_from_an_earlier_one_selects_the_same(mesh, loads):
    before = RouteTable(mesh)
    changed = [replace(c, load=load) for c, load in zip(mesh, loads, strict=False)]
    changed[0] = replace(changed[0], links=())

    def outcome(table):
        try:
            return table.select(query(max_routes=3))
        except RouteError as error:
            return error.message

    outcome(before)
    assert outcome(RouteTable(changed, before)) == outcome(RouteTable(changed))


def test_a_large_mesh_is_routed_quickly_enough_to_do_it_per_session():
    mesh = [shard(f"n{i}", i % 121, min(126, i % 121 + 6 + i % 7), 126) for i in range(400)]
    (route,) = select(mesh, query())
    layers = [stage.layers for stage in route.stages]
    assert layers[0].start == 0
    assert layers[-1].end == 126
    assert all(a.end == b.start for a, b in itertools.pairwise(layers))
