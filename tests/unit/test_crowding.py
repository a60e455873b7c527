"""Which body a crowded server ends: the one that is overdue for longest, if any is."""

from __future__ import annotations

import pytest

from meshnet.plane.crowding import Receiving, is_crowded, slowest

MIB = 1 << 20


@pytest.mark.parametrize(
    ("num_open", "most", "crowded"),
    [
        (0, 1, False),
        (1, 1, True),
        (1, 2, False),
        (2, 2, True),
        (512, 1024, False),
        (513, 1024, True),
    ],
)
def test_more_than_half_is_a_crowd(num_open, most, crowded):
    assert is_crowded(num_open, most) is crowded


@pytest.mark.parametrize(
    ("bodies", "found"),
    [
        ({}, None),
        ({"just begun": Receiving(100.0, 32 << 10)}, None),
        ({"small, in its spare time": Receiving(95.1, 32 << 10)}, None),
        ({"small, and past it": Receiving(94.9, 32 << 10)}, "small, and past it"),
        ({"large, still in time": Receiving(87.1, 8 * MIB)}, None),
        ({"large, at half the rate": Receiving(84.0, 8 * MIB)}, "large, at half the rate"),
        (
            {
                "due a second ago": Receiving(86.0, 8 * MIB),
                "due two seconds ago": Receiving(93.0, 0),
                "not due": Receiving(0.0, 1000 * MIB),
            },
            "due two seconds ago",
        ),
    ],
)
def test_the_one_that_is_overdue_for_longest_is_ended(bodies, found):
    assert slowest(bodies.items(), 100.0, spare_s=5.0, bytes_per_s=MIB) == found


def test_who_sends_at_little_over_the_least_rate_is_ended_in_seconds_and_a_fast_one_never():
    """A piece of 8 MiB, of which each has a deadline of its own: 128 s at 64 KiB a second."""
    for rate, ends in ((64 << 10, True), (MIB // 2, True), (MIB, False), (10 * MIB, False)):
        taken_s = 8 * MIB / rate
        piece = {"sender": Receiving(0.0, 8 * MIB)}
        last = slowest(piece.items(), taken_s, spare_s=5.0, bytes_per_s=MIB)
        assert (last == "sender") is (ends and taken_s > 13.0)
    assert slowest(piece.items(), 13.0, spare_s=5.0, bytes_per_s=MIB) is None
    assert slowest(piece.items(), 13.01, spare_s=5.0, bytes_per_s=MIB) == "sender"
