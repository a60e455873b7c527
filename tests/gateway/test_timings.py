"""Sums of hop timings, also when a route changes on the way."""

from __future__ import annotations

from meshnet.topology import NodeId
from meshnet_gateway.timings import CompletionTimings, PhaseTimings
from tests.gateway.fakes import hop_timings

FIRST, SECOND = hop_timings()


def test_means_are_over_the_steps_of_each_hop() -> None:
    phase = PhaseTimings()
    phase.add(1, 13.0, (FIRST, SECOND))
    spare = SECOND._replace(node=NodeId("c"), compute_ms=10.0, total_ms=6.0)
    phase.add(1, 20.0, (FIRST._replace(compute_ms=5.0), spare))
    described = phase.describe()
    assert (described["steps"], described["tokens"], described["wall_ms"]) == (2, 2, 33.0)
    hops = {hop["node"]: hop for hop in described["hops"]}
    assert list(hops) == ["b", "a", "c"]  # the route used last comes last, in order
    assert (hops["a"]["steps"], hops["a"]["compute_ms"], hops["a"]["wire_ms"]) == (2, 4.0, 1.5)
    assert (hops["b"]["steps"], hops["b"]["compute_ms"]) == (1, 4.0)
    assert (hops["c"]["steps"], hops["c"]["compute_ms"]) == (1, 10.0)


def test_completions_are_summed() -> None:
    total = CompletionTimings()
    for _ in range(2):
        one = CompletionTimings()
        one.prefill.add(5, 30.0, (FIRST, SECOND))
        one.decode.add(1, 10.0, (FIRST, SECOND))
        total.merge(one)
    described = total.describe()
    assert described["tokens_per_second"] == 100.0
    assert (described["prefill"]["tokens"], described["prefill"]["steps"]) == (10, 2)
    assert described["hops"][0]["compute_ms"] == 3.0


def test_nothing_decoded_has_no_rate_and_shows_the_prefill() -> None:
    timings = CompletionTimings()
    timings.prefill.add(5, 30.0, (FIRST, SECOND))
    described = timings.describe()
    assert described["tokens_per_second"] is None
    assert [hop["node"] for hop in described["hops"]] == ["a", "b"]
