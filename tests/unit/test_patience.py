"""When an answer is late."""

from __future__ import annotations

import pytest

from meshnet.grammar import Phase
from meshnet.patience import Flights, Patience, PatienceLimits
from meshnet.topology import NodeId

LIMITS = PatienceLimits(multiple=4.0, least_s=1.0, first_s=5.0, most_s=20.0)
PREFILL, DECODE = Phase.PREFILL, Phase.DECODE
A, B = NodeId("a"), NodeId("b")


def learned(*answers: tuple[Phase, int, float], times: int = 10) -> Patience:
    patience = Patience(LIMITS)
    for _ in range(times):
        for answer in answers:
            patience.record(*answer)
    return patience


@pytest.mark.parametrize(
    ("answers", "asked", "allowed_s"),
    [
        pytest.param([], (DECODE, 1), 5.0, id="nothing is known"),
        pytest.param([(DECODE, 1, 0.5)], (DECODE, 1), 2.0, id="a multiple of what is usual"),
        pytest.param([(DECODE, 1, 0.01)], (DECODE, 1), 1.0, id="never less than the least"),
        pytest.param([(PREFILL, 128, 9.0)], (PREFILL, 128), 20.0, id="never more than the most"),
        pytest.param([(DECODE, 1, 0.5)], (PREFILL, 1), 5.0, id="phases are apart"),
        pytest.param([(PREFILL, 8, 0.5)], (PREFILL, 128), 5.0, id="a small chunk says too little"),
        pytest.param([(PREFILL, 128, 1.5)], (PREFILL, 8), 6.0, id="a larger one says enough"),
        pytest.param(
            [(PREFILL, 128, 1.5), (PREFILL, 16, 0.5)], (PREFILL, 8), 2.0, id="the nearest larger"
        ),
        pytest.param([(PREFILL, 128, 1.5)], (PREFILL, 200), 6.0, id="of about the same size"),
    ],
)
def test_what_is_allowed(answers, asked, allowed_s):
    assert learned(*answers).allowed_s(*asked) == pytest.approx(allowed_s)


def test_two_measurements_are_not_enough():
    assert learned((DECODE, 1, 0.5), times=2).allowed_s(DECODE, 1) == LIMITS.first_s
    assert learned((DECODE, 1, 0.5), times=3).allowed_s(DECODE, 1) == 2.0


@pytest.mark.parametrize(
    ("slow", "of", "allowed_s"),
    [(1, 20, 1.0), (1, 64, 1.0), (4, 64, 12.0), (2, 20, 12.0), (64, 64, 12.0)],
)
def test_one_in_twenty_may_be_slow_without_effect(slow, of, allowed_s):
    patience = Patience(LIMITS)
    for index in range(of):
        patience.record(DECODE, 1, 3.0 if index < slow else 0.01)
    assert patience.allowed_s(DECODE, 1) == pytest.approx(allowed_s)


def test_what_was_long_ago_is_forgotten():
    patience = learned((DECODE, 1, 3.0), times=64)
    for _ in range(64):
        patience.record(DECODE, 1, 0.01)
    assert patience.allowed_s(DECODE, 1) == LIMITS.least_s


def ignore(error):
    raise AssertionError(error)


def begin(flights: Flights, address: str, now: float, phase: Phase = DECODE):
    return flights.begin(address, NodeId(address), phase, 1, ignore, now)


def test_a_request_is_late_when_its_time_is_over_then_after_twice_that():
    flights = Flights(LIMITS)
    flight = begin(flights, "a", 100.0)
    looked_at = [100.5, 101.0, 104.9, 105.0, 105.1, 109.9, 110.0, 119.9, 120.0, 139.9, 140.0, 160.0]
    late = [now for now in looked_at if flights.late(now)]
    # 5 s while nothing is known; then the waits are as long as all before, up to 20 s.
    assert late == [105.0, 110.0, 120.0, 140.0, 160.0]
    assert flight.asked == 5


def test_answers_are_learned_from_and_failures_are_not():
    flights = Flights(LIMITS)
    for now in range(10):
        flights.end(begin(flights, "a", now), now + 0.1, answered=True)
        flights.end(begin(flights, "b", now), now + 0.1, answered=False)
    assert len(flights) == 0
    for address in ("a", "b"):
        begin(flights, address, 100.0)
    assert [flight.address for flight in flights.late(101.0)] == ["a"]
    assert [flight.address for flight in flights.late(105.0)] == ["a", "b"]


def test_what_one_address_owes():
    flights = Flights(LIMITS)
    first, other, second = (
        begin(flights, address, now) for address, now in (("a", 1.0), ("b", 1.0), ("a", 2.0))
    )
    assert flights.owed_by("a", 1.5) == [first]
    assert flights.owed_by("a", 2.0) == [first, second]
    flights.end(first, 2.0, answered=True)
    assert flights.owed_by("a", 2.0) == [second]
    assert flights.owed_by("b", 2.0) == [other]
    assert flights.owed_by("c", 2.0) == []


def test_any_number_of_addresses_may_be_named():
    flights = Flights(LIMITS)
    for number in range(2000):
        flights.end(begin(flights, f"host-{number}", 0.0), 0.1, answered=True)
    assert len(flights._hops) <= 256
