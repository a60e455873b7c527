from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet_node.pace import Counters, LayerPace


@pytest.mark.parametrize(
    ("windows", "want"),
    [
        ([], 0),
        ([(0, 0, 0.0)], 0),
        ([(1, 1, 0.010)], 1000),  # ten layers, one token
        ([(4, 4, 0.040)], 1000),
        ([(1, 100, 0.100)], 100),  # a prompt's token
        ([(1, 100, 0.100), (1, 1, 0.010)], 1000),  # a decode step is believed at once
        ([(1, 1, 0.010), (1, 100, 0.100)], 1000),  # and a prompt not any more
        ([(1, 1, 0.010), (1, 1, 0.020)], 1300),
        ([(1, 1, 0.010), (0, 0, 0.0)], 1000),
        ([(1, 1, 1e-9)], 1),
    ],
)
def test_what_a_layer_takes(windows, want):
    pace = LayerPace(10)
    chunks, tokens, seconds = 0, 0, 0.0
    for more in windows:
        chunks, tokens, seconds = chunks + more[0], tokens + more[1], seconds + more[2]
        pace.update(Counters(chunks, tokens, seconds))
    assert pace.microseconds == pytest.approx(want, abs=1)


@given(
    st.lists(
        st.tuples(st.integers(0, 9), st.integers(0, 999), st.floats(0, 10)), min_size=1, max_size=9
    )
)
def test_the_estimate_lies_between_the_samples(windows):
    pace = LayerPace(4)
    total = Counters(0, 0, 0.0)
    samples = []
    for chunks, tokens, seconds in windows:
        before = total
        total = Counters(
            total.num_chunks + chunks, total.num_tokens + tokens, total.compute_s + seconds
        )
        pace.update(total)
        taken = total.compute_s - before.compute_s
        if chunks and tokens and taken > 0:
            samples.append(taken / tokens / 4 * 1e6)
    if samples:
        assert min(samples) * (1 - 1e-9) <= pace.microseconds <= max(samples) * (1 + 1e-9) + 1
    else:
        assert pace.microseconds == 0
