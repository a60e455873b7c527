from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet_gateway.rate_limit import TokenBucket, duration_text


def test_as_many_as_a_minute_has_at_once_then_one_after_the_other() -> None:
    bucket = TokenBucket(60, 100.0)
    assert [bucket.take(100.0) for _ in range(60)] == [0.0] * 60
    assert bucket.take(100.0) == pytest.approx(1.0)
    assert bucket.take(100.75) == pytest.approx(0.25)
    assert bucket.take(101.0) == 0.0
    assert bucket.take(101.0) == pytest.approx(1.0)


def test_a_rest_fills_the_bucket_and_no_more() -> None:
    bucket = TokenBucket(3, 0.0)
    for _ in range(3):
        bucket.take(0.0)
    assert [bucket.take(1e6) for _ in range(3)] == [0.0] * 3
    assert bucket.take(1e6) == pytest.approx(20.0)


def test_time_that_goes_back_gives_nothing() -> None:
    bucket = TokenBucket(1, 50.0)
    assert bucket.take(50.0) == 0.0
    assert bucket.take(10.0) == pytest.approx(60.0)
    assert bucket.take(50.0) == pytest.approx(60.0)


def test_headers() -> None:
    bucket = TokenBucket(60, 0.0)
    assert bucket.headers(0.0) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "60",
        "x-ratelimit-reset-requests": "0s",
    }
    for _ in range(10):
        bucket.take(0.0)
    assert bucket.headers(0.5) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "50",
        "x-ratelimit-reset-requests": "9.5s",
    }


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (0.0001, "1ms"),
        (0.12, "120ms"),
        (0.9995, "1s"),
        (1, "1s"),
        (8.64, "8.64s"),
        (60, "1m0s"),
        (360, "6m0s"),
        (61.5, "1m1.5s"),
        (3600, "1h0m0s"),
        (5025.25, "1h23m45.25s"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@given(
    per_minute=st.integers(1, 1000),
    waits=st.lists(st.floats(0, 90, allow_nan=False), max_size=60),
)
def test_no_window_has_more_than_the_burst_and_the_rate(
    per_minute: int, waits: list[float]
) -> None:
    bucket, now_s, taken = TokenBucket(per_minute, 0.0), 0.0, 0
    for wait_s in waits:
        now_s += wait_s
        left_s = bucket.take(now_s)
        taken += left_s == 0
        assert 0 <= left_s <= 60 / per_minute + 1e-6
        assert taken <= per_minute * (1 + now_s / 60) + 1e-6
