"""`meshnet bench`: each command's JSON, with sizes that take moments."""

from __future__ import annotations

import numpy as np
import pytest

from meshnet.cli.bench import wire
from meshnet.cli.bench.report import Run
from meshnet.cli.bench.wire import measure_wire
from meshnet.cli.bench.wire_cases import STACKS, WirePlan
from tests.e2e.commands import meshnet, meshnet_json, running

FIGURES = {"p50_us", "p99_us", "added_us", "ratio_to_raw", "cpu_s_per_gib"}
FAST = ("--quick", "--rounds", "1")


def test_wire_measures_every_stack(tmp_path):
    plot = tmp_path / "wire.svg"
    found = meshnet_json(
        "bench", "wire", *FAST, "--main-only", "--sizes", "64", "--plot", str(plot)
    )
    rows = {row["stack"]: row for row in found["results"]}
    assert tuple(rows) == STACKS
    for row in rows.values():
        assert row["bytes"] == 64
        assert row.keys() >= FIGURES
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert row["cpu_s_per_gib"] is None or row["cpu_s_per_gib"] > 0
    assert rows["raw"]["ratio_to_raw"] == 1.0
    assert rows["raw"]["added_us"] == 0.0
    assert rows["meshnet"]["ratio_to_meshnet"] == 1.0
    assert plot.read_text("utf-8").count('class="ours"') == 1


async def test_wire_has_a_row_for_a_stack_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(wire, "missing", lambda stack: "not here" if stack == "zmq" else None)
    report = await measure_wire(WirePlan(sizes=(64,), stacks=("zmq",)), Run(1, quick=True))
    found = report.describe()
    assert [row["stack"] for row in found["results"]] == ["raw", "meshnet", "zmq"]
    row = found["results"][2]
    assert row["not_measured"] == "not here"
    assert {row[name] for name in FIGURES} == {None}
    for section, stacks, rests, busy in (
        ("idle", ["raw", "meshnet"], 30.0, False),
        ("busy_node", ["raw", "meshnet", "meshnet_aio"], 0.0, True),
    ):
        rows = found[section]
        assert [row["stack"] for row in rows] == stacks
        assert {(row["rest_ms"], row["busy"]) for row in rows} == {(rests, busy)}


def test_codec_measures_every_encoding_of_every_file(tmp_path):
    path = tmp_path / "bits.npy"
    np.save(path, np.zeros((4, 512), dtype=np.uint16))
    rows = meshnet_json("bench", "codec", *FAST, str(path))["results"]
    assert [row["encoding"] for row in rows] == ["memcpy", "zstd", "bf16p"]
    assert {row["file"] for row in rows} == {str(path)}
    assert rows[0]["ratio"] == 1.0
    assert all(row["ratio"] > 1.0 for row in rows[1:])
    assert all(row["compress_mb_s"] > 0 and row["decompress_mb_s"] > 0 for row in rows)


def test_pipeline_measures_a_prompt_and_decode_steps(tmp_path):
    plot = tmp_path / "pipeline.svg"
    case = ("--stages", "2", "--chunks", "3", "--chunk-kib", "4", "--compute-ms", "5")
    found = meshnet_json("bench", "pipeline", *FAST, *case, "--plot", str(plot))
    overlapped, sequential = found["results"]
    assert (overlapped["window"], sequential["window"]) == ("auto", 1)
    for row in found["results"]:
        assert (row["stages"], row["chunks"], row["chunk_bytes"]) == (2, 3, 4096)
        assert row["compute_ms"] == 5.0
        # Stages that sleep: the ideal is a bound, and so is one chunk after the other.
        assert row["total_ms"] >= (20.0 if row["window"] == "auto" else 30.0)
        assert row["ratio_to_ideal"] == pytest.approx(row["total_ms"] / 20.0)
    assert found["decode"]["hops"] == 3
    assert found["decode"]["overhead_per_hop_ms_p50"] > 0
    assert plot.read_text("utf-8").count('class="ours"') == 1


def test_hop_measures_a_running_node():
    node = ("node", "--backend", "stub", "--hidden-size", "32", "--layers", "0:1")
    with running(*node, "--listen", "127.0.0.1:0", "--id", "one") as process:
        address = process.event("ready")["address"]
        found = meshnet_json("bench", "hop", f"http://{address}", *FAST)
        assert found["node"]["node"] == "one"
        assert found["node"]["hidden_size"] == 32
        assert [(row["tokens"], row["bytes"]) for row in found["results"]] == [
            (1, 64),
            (16, 1024),
            (128, 8192),
        ]
        for row in found["results"]:
            assert 0 < row["p50_us"] <= row["p99_us"]
            assert row["loopback_raw_us"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("wire", "--sizes", "3"), "--sizes: 3;"),
        (("wire", "--stacks", "smoke"), "--stacks: 'smoke';"),
        (("codec", "missing.npy"), "missing.npy: No such file"),
        (("hop", "ftp://node:1"), "URL: 'ftp://node:1';"),
        (("pipeline", "--model", "missing"), "missing"),
    ],
)
def test_wrong_use_is_one_line(arguments, message):
    done = meshnet("bench", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_node_that_does_not_answer_is_named():
    done = meshnet("bench", "hop", "127.0.0.1:1")
    assert done.returncode == 1
    assert "127.0.0.1:1: " in done.stderr
