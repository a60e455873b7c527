"""Nodes and the control plane as processes: stops, restarts, taken ports."""

from __future__ import annotations

import signal
import socket

from tests.e2e.commands import eventually, meshnet, meshnet_json, running

STUB = ("node", "--backend", "stub", "--layers", "0:1", "--listen", "127.0.0.1:0")
TTL_S = 3.0


def control_arguments(http: str = "127.0.0.1:0", grpc: str = "127.0.0.1:0") -> tuple[str, ...]:
    return ("control", "--listen", http, "--grpc-listen", grpc, "--lease-ttl", str(TTL_S))


def states(control: str) -> dict[str, str]:
    nodes = meshnet_json("nodes", "list", "--control", control)["nodes"]
    return {node["name"].removeprefix("nodes/"): node["state"] for node in nodes}


def test_a_stopped_node_leaves_routes_and_registers_again_unaided():
    with running(*control_arguments()) as control:
        url = control.event("listening")["grpc"]
        with running(*STUB, "--id", "sleeper", "--control", url) as node:
            node.event("ready")
            assert states(url) == {"sleeper": "NODE_STATE_READY"}
            node.process.send_signal(signal.SIGSTOP)
            eventually(lambda: states(url).get("sleeper") != "NODE_STATE_READY")
            refused = meshnet("route", "stub", "--control", url)
            assert refused.returncode == 1
            assert "0-1" in refused.stderr
            node.process.send_signal(signal.SIGCONT)
            eventually(lambda: states(url) == {"sleeper": "NODE_STATE_READY"})
            eventually(lambda: meshnet("route", "stub", "--control", url).returncode == 0)


def test_a_killed_node_leaves_routes():
    with running(*control_arguments()) as control:
        url = control.event("listening")["grpc"]
        with running(*STUB, "--id", "victim", "--control", url) as node:
            node.event("ready")
            node.process.kill()
            eventually(lambda: states(url).get("victim") != "NODE_STATE_READY")


def test_a_node_that_ends_is_gone_at_once():
    with running(*control_arguments()) as control:
        url = control.event("listening")["grpc"]
        with running(*STUB, "--id", "leaver", "--control", url) as node:
            node.event("ready")
            assert node.interrupt() == 0
        assert states(url) == {}


def test_nodes_register_again_after_a_restart_of_the_control_plane():
    with running(*control_arguments()) as control:
        first = control.event("listening")
        with running(*STUB, "--id", "faithful", "--control", first["grpc"]) as node:
            node.event("ready")
            control.process.kill()
            control.process.wait(10)
            again = control_arguments(
                first["http"].removeprefix("http://"), first["grpc"].removeprefix("grpc://")
            )
            with running(*again) as restarted:
                restarted.event("listening")
                eventually(lambda: states(first["grpc"]) == {"faithful": "NODE_STATE_READY"})
                assert node.process.poll() is None


def test_a_taken_port_is_one_line_and_registers_nothing():
    with running(*control_arguments()) as control:
        url = control.event("listening")["grpc"]
        with running(*STUB, "--id", "first", "--control", url) as node:
            address = node.event("ready")["address"]
            second = meshnet(
                *("node", "--backend", "stub", "--layers", "0:1", "--listen", address),
                *("--id", "second", "--control", url),
                timeout_s=30.0,
            )
            assert second.returncode != 0
            assert second.stderr.strip().splitlines() == [
                f"meshnet: error: cannot listen on {address}: address already in use"
            ]
            assert list(states(url)) == ["first"]


def test_a_taken_port_of_every_server_is_one_line(smollm2):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for arguments in [
            control_arguments(http=address),
            control_arguments(grpc=address),
            (
                *("gateway", "--model", str(smollm2), "--listen", address),
                *("--control-listen", "127.0.0.1:0", "--control-grpc-listen", "127.0.0.1:0"),
            ),
            ("up", "--model", str(smollm2), "--listen", address),
        ]:
            done = meshnet(*arguments)
            assert done.returncode != 0
            assert "Traceback" not in done.stderr
            last = done.stderr.strip().splitlines()[-1]
            assert last.startswith("meshnet: error: ")
            assert address in last


def test_bad_arguments_are_one_clear_line(tmp_path):
    for arguments, says in [
        (("node", "--backend", "stub", "--layers", "3:1"), "--layers"),
        (("node", "--backend", "stub", "--layers", "0:2", "--stub-layers", "1"), "--stub-layers"),
        (("node", "--backend", "stub", "--layers", "0:1", "--listen", "nowhere:port"), "--listen"),
        (("node", "--layers", "0:1"), "--model"),
        (("node", "--layers", "0:1", "--model", str(tmp_path)), "config.json"),
        (("node", "--backend", "stub", "--layers", "0:1", "--id", "Bad_Id"), "--id"),
        (("nodes", "list", "--control", "ftp://x"), "ftp://x"),
        (("gateway", "--model", str(tmp_path / "absent")), "absent"),
    ]:
        done = meshnet(*arguments)
        assert done.returncode == 2, (arguments, done.stderr)
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert says in done.stderr


def test_a_bad_variable_is_named():
    done = meshnet("status", MESHNET_CHUNK_TOKENS="many")
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "meshnet: error: MESHNET_CHUNK_TOKENS: 'many'; expected a whole number of at least 1"
    )


def test_no_control_plane_is_one_clear_line():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    done = meshnet("nodes", "list", "--control", f"grpc://127.0.0.1:{port}")
    assert done.returncode == 1
    assert len(done.stderr.strip().splitlines()) == 1
    assert str(port) in done.stderr


def test_a_child_without_a_parent_ends_at_once():
    done = meshnet(*STUB, "--exit-with-parent")
    assert (done.returncode, done.stderr) == (0, "")
