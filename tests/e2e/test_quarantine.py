"""Nodes that compute something else get no traffic: real processes, one fault each."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager

import pytest

from tests.e2e.commands import Running, eventually, meshnet, running
from tests.node.tiny import save_tiny

MODEL = "tiny"
LAYERS = "1:4"

# What is wrong with a node, and the reason that the control plane finds.
IN_MEMORY = {
    "theta": "NUMBERS",
    "epsilon": "NUMBERS",
    "shift": "NUMBERS",
    "float16": "WEIGHTS",
    "bit": "WEIGHTS",
}
ON_DISK = {"file-bit": "WEIGHTS", "config": "MODEL_DIGEST"}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model with its reference, recorded as users do."""
    directory = save_tiny("llama", tmp_path_factory.mktemp("models") / MODEL)
    done = meshnet("model", "reference", str(directory), "--threads", "1", timeout_s=280)
    assert done.returncode == 0, done.stderr
    assert (directory / "meshnet-reference.json").is_file()
    return directory


@pytest.fixture(scope="module")
def control():
    with running("control", "--listen", "127.0.0.1:0", "--grpc-listen", "127.0.0.1:0") as server:
        yield server.event("listening")


@contextmanager
def _nodes(control, nodes):
    """Run nodes; gives their output, which says of each when it is ready."""
    arguments = {
        node_id: [
            *(fault, "--model", str(directory), "--layers", LAYERS, "--threads", "1"),
            *("--control", control["grpc"], "--listen", "127.0.0.1:0", "--grace", "0", *flags),
        ]
        for node_id, (fault, directory, *flags) in nodes.items()
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.node.faulty_node", json.dumps(arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    running_nodes = Running(process)
    try:
        yield running_nodes
    finally:
        process.stdin.close()  # nodes end with it
        process.wait(120)
        running_nodes.end()


def _found(control, node_id):
    """Give a node's state, and what is known of its numbers."""
    node = _get(control, f"nodes/{node_id}")["node"]
    return node["state"].removeprefix("NODE_STATE_"), node.get("verification") or {}


def _get(control, path):
    with urllib.request.urlopen(f"{control['http']}/v1/{path}", timeout=30) as answer:
        return json.load(answer)


def _spoil(directory, name, target):
    """Copy a model, with something wrong in its files."""
    target = target / name / MODEL
    shutil.copytree(directory, target)
    if name == "file-bit":
        path = next(target.glob("*.safetensors"))
        raw = bytearray(path.read_bytes())
        header = int.from_bytes(raw[:8], "little")
        tensors = json.loads(raw[8 : 8 + header])
        start, _ = tensors["model.layers.2.mlp.up_proj.weight"]["data_offsets"]
        raw[8 + header + start] ^= 1
        path.write_bytes(raw)
        return target
    path = target / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"]["rope_theta"] /= 10
    path.write_text(json.dumps(config))
    return target


@pytest.mark.timeout(900)
def test_faults_are_quarantined_before_they_serve_and_while_they_do(model, control, tmp_path):
    expected = {**IN_MEMORY, **ON_DISK}
    nodes = {fault: (fault, model) for fault in IN_MEMORY}
    nodes |= {fault: ("none", _spoil(model, fault, tmp_path)) for fault in ON_DISK}
    nodes["late"] = ("late-bit", model, "--probe-interval", "0.5")
    done = meshnet("references", "register", str(model), "--control", control["grpc"])
    assert done.returncode == 0, done.stderr
    with _nodes(control, nodes) as running_nodes:
        pids = {}
        for _ in nodes:
            started = running_nodes.event("started", 300)
            pids[started["node"]] = started["pid"]
        events = [running_nodes.event("ready", 600) for _ in nodes]
        assert {event["node"] for event in events} == set(nodes)
        for fault, reason in expected.items():
            state, verification = _found(control, fault)
            assert (state, verification["reason"]) == ("QUARANTINED", reason), fault
        assert _found(control, "late")[1]["state"] == "STATE_VERIFIED"
        _check_what_is_shown(control)
        _check_what_is_routed_to(control)

        os.kill(pids["late"], signal.SIGUSR1)
        found = eventually(lambda: _is(control, "late", "QUARANTINED"), 300)
        assert found["reason"] == "WEIGHTS"
        os.kill(pids["late"], signal.SIGUSR1)
        assert eventually(lambda: _is(control, "late", "READY"), 300)["state"] == "STATE_VERIFIED"
    assert any("late is quarantined and gets no sessions" in line for line in running_nodes.errors)


def _check_what_is_shown(control):
    listed = meshnet("nodes", "list", "--control", control["grpc"], COLUMNS="300").stdout
    assert "quarantined" in listed
    assert "computes something else: off by" in listed
    assert "the weights of layer.2 are not those of the model" in listed


def _check_what_is_routed_to(control):
    models = _get(control, "models")["models"]
    own = max(models, key=lambda each: sum(each["readyReplicas"]))
    assert own["readyReplicas"] == [0, 1, 1, 1, 0]
    (other,) = [each for each in models if each["digest"] != own["digest"]]
    assert not sum(other["readyReplicas"])


def _is(control, node_id, state):
    now, verification = _found(control, node_id)
    return verification if now == state else None
