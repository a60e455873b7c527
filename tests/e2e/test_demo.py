"""The first thing that a user runs."""

from __future__ import annotations

import json

from tests.e2e.commands import eventually, is_alive, meshnet


def test_demo_answers_from_three_processes_and_ends_them(smollm2):
    done = meshnet("demo", "--model", str(smollm2), "--json", timeout_s=240.0)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert "Paris" in facts["answer"]
    assert facts["finish_reason"] == "stop"
    assert len(set(facts["pids"].values())) == 3
    assert [hop["layers"] for hop in facts["route"]] == ["0-10", "10-20", "20-30"]
    hops = facts["mesh"]["hops"]
    assert [hop["node"] for hop in hops] == [hop["node"] for hop in facts["route"]]
    assert [hop["in_bytes"] for hop in hops] == [4, 576 * 2, 576 * 2]
    assert all(hop["compute_ms"] > 0 for hop in hops)
    eventually(lambda: not any(is_alive(pid) for pid in facts["pids"].values()), timeout_s=5.0)


def test_demo_shows_route_speed_and_hops(smollm2):
    done = meshnet(
        "demo", "--model", str(smollm2), "--nodes", "2", "Say hello.", "--max-tokens", "4",
        timeout_s=240.0, COLUMNS="200",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for piece in ("layers 0-15", "layers 15-30", "> Say hello.", "tokens/s", "compute ms"):
        assert piece in done.stdout


def test_more_nodes_than_layers_is_one_clear_line(smollm2):
    done = meshnet("demo", "--model", str(smollm2), "--nodes", "31")
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == [
        "meshnet: error: --nodes: 31; expected at most 30, the model's layers"
    ]
