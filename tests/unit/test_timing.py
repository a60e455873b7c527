"""Server-Timing: one metric a hop, in the order of the route."""

from __future__ import annotations

import pytest

from meshnet.timing import HopTiming, format_timing, parse_timings
from meshnet.topology import NodeId

ALPHA = HopTiming(NodeId("alpha"), 0.1, 8.0, 0.3, 4.0, 12.5, 2048, 1152)
BETA = HopTiming(NodeId("beta-2"), 0.0, 3.5, 0.0, 0.0, 3.9, 1152, 32)


def test_format() -> None:
    assert format_timing(ALPHA) == (
        "hop;desc=alpha;dur=12.500;queue=0.100;compute=8.000;codec=0.300;next=4.000"
        ";in=2048;out=1152"
    )


def test_hops_come_in_the_order_of_the_route() -> None:
    assert parse_timings(format_timing(ALPHA, format_timing(BETA))) == [ALPHA, BETA]


def test_a_difference_just_below_zero_is_zero() -> None:
    timing = HopTiming(NodeId("a"), -1e-9, -0.0004, 0.0, -2.0, 1.0, 0, 0)

    assert parse_timings(format_timing(timing)) == [HopTiming(NodeId("a"), 0, 0, 0, 0, 1, 0, 0)]


@pytest.mark.parametrize(
    "value",
    [
        "",
        ",",
        "cache;dur=1",
        "hop",
        "hop;desc=alpha",
        format_timing(ALPHA).replace("12.500", "1.2.3"),
        format_timing(ALPHA).replace("12.500", "nan"),
        format_timing(ALPHA).replace("12.500", "-1"),
        format_timing(ALPHA).replace("alpha", "Alpha"),
        format_timing(ALPHA) + ";more=1",
        "hop;" * 10_000,
    ],
)
def test_what_is_not_a_hop_is_passed_over(value: str) -> None:
    assert parse_timings(value) == []
    assert parse_timings(f"{value}, {format_timing(BETA)}") == [BETA]
