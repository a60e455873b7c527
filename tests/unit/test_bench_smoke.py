"""The benchmarks' arithmetic, and one that needs no processes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from meshnet.cli.bench.measure import Series, interleave
from tests.bench import routes
from tests.bench.codec import break_even_bits_per_s


def test_ratios_are_of_the_same_round():
    """A machine that is ten times slower in one round changes no ratio."""
    ours = Series([[1.0, 1.0, 9.0], [10.0, 10.0, 90.0], [2.0, 2.0, 2.0]])
    other = Series([[2.0, 2.0, 2.0], [20.0, 20.0, 20.0], [1.0, 1.0, 1.0]])
    ratio = other.ratio_to(ours)
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 0.5, 2.0)


@pytest.mark.parametrize(("percent", "expected"), [(1, 1), (50, 50), (99, 99), (100, 100)])
def test_a_percentile_is_a_value_that_was_measured(percent, expected):
    assert Series([list(range(100, 0, -1))]).percentile(percent) == expected


async def test_each_round_begins_with_another_block():
    order = []

    def block(name):
        async def take():
            order.append(name)
            return [1.0]

        return take

    series = await interleave({name: block(name) for name in "abc"}, 3)
    assert "".join(order) == "abcbcacab"
    assert [len(values.rounds) for values in series.values()] == [3, 3, 3]


def test_coding_breaks_even_where_the_bytes_saved_take_as_long():
    bandwidth = break_even_bits_per_s(1_000_000, 2.0, 0.004)
    assert bandwidth == 1e9
    assert 8e6 / bandwidth == pytest.approx(4e6 / bandwidth + 0.004)


def test_the_codecs_benchmark_runs():
    command = [sys.executable, "-m", "tests.bench", "codec", "--quick", "--rounds", "1", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(done.stdout)["results"]["codec"]["results"]
    found = {row["bodies"]: row for row in rows}
    zstd = found["median of the prefills"]
    assert zstd["ratio"] == pytest.approx(1.27, abs=0.02)
    assert zstd["as_float32"] < 2.2
    assert found["median of the prefills, bf16p"]["gain"] >= 1.165
    planes = [row for row in rows if row.get("encoding") == "bf16p"]
    assert [row for row in planes if row["base"] and row["gain"] < 1.14] == []
    assert max(row["body_bytes"] for row in planes) == pytest.approx(4 << 20, rel=0.01)


@pytest.mark.parametrize("make", [routes.varied_mesh, routes.equal_mesh])
def test_the_routes_benchmark_runs(make):
    row = routes.measure(make, 120, 1)
    assert row["hops"] >= 10
    assert row["select"] > 0
