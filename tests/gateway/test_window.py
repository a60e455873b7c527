"""How many chunks are in flight, from what answers report."""

from __future__ import annotations

import pytest

from meshnet.timing import HopTiming
from meshnet.topology import NodeId
from meshnet_gateway.window import MAX_WINDOW, Window


def journey(compute_ms: list[float], wire_ms: float) -> list[HopTiming]:
    """Give the timings of one chunk over hops that compute that long, with equal links."""
    timings: list[HopTiming] = []
    after = 0.0
    for index, compute in enumerate(reversed(compute_ms)):
        next_ms = after + wire_ms if index else 0.0
        total = compute + next_ms
        timings.insert(0, HopTiming(NodeId("n"), 0.0, compute, 0.0, next_ms, total, 0, 0))
        after = total
    return timings


@pytest.mark.parametrize(
    ("compute_ms", "wire_ms", "size"),
    [
        ([20.0] * 3, 0.0, 5),
        ([20.0] * 5, 0.0, 7),
        ([20.0] * 3, 20.0, 7),
        ([20.0], 0.0, 3),
        ([100.0, 1.0, 1.0], 0.0, 4),
        ([1.0] * 3, 1000.0, MAX_WINDOW),
    ],
)
def test_the_window_holds_a_journey_and_a_little_more(compute_ms, wire_ms, size):
    window = Window(len(compute_ms))
    for _ in range(50):
        window.observe(journey(compute_ms, wire_ms))
    assert window.size == size


def test_queues_do_not_widen_the_window():
    window = Window(2)
    first, second = journey([10.0, 10.0], 0.0)
    queued = [
        HopTiming(first.node, 500.0, 10.0, 0.0, first.next_ms, first.total_ms + 500.0, 0, 0),
        second,
    ]
    for _ in range(50):
        window.observe(queued)
    assert window.size == 4


def test_a_fixed_window_stays():
    window = Window(3, fixed=1)
    window.observe(journey([1.0] * 3, 100.0))
    assert window.size == 1


def test_answers_without_times_change_nothing():
    window = Window(3)
    window.observe([])
    window.observe(journey([0.0, 0.0], 1.0))
    assert window.size == 5
