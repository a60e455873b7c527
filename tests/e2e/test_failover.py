"""Nodes that end in the middle of an answer: a pause for the reader, not an error."""

from __future__ import annotations

import signal
import threading
import time
import urllib.request

import openai
import pytest

from tests.e2e.commands import Running, eventually
from tests.e2e.sessions import LAYERS, Mesh, figures, mesh


def computed(node: Running) -> float:
    """Give the token positions that a node has computed."""
    return figures(node.ready["address"])["meshnet_tokens_total"]


def replace_killed(made: Mesh, name: str) -> None:
    """Kill a node on the route; the spare one may take its place."""
    made.admit("spare")
    made.nodes[name].process.kill()


def replace_stopped(made: Mesh, name: str) -> None:
    made.admit("spare")
    made.nodes[name].process.send_signal(signal.SIGSTOP)


@pytest.mark.timeout(600)
def test_s1_a_killed_node_is_replaced_by_a_spare_without_a_wrong_token(smollm2):
    """Only its layers are computed again, from the journal of the node before it."""
    with mesh(smollm2) as made:
        made.join_aside("spare", LAYERS["middle"])
        undisturbed = made.ask().choices[0].message.content
        before = {name: computed(node) for name, node in made.nodes.items()}
        session = before["first"]
        disturbed = made.stream_and(lambda: replace_killed(made, "middle"))
        assert disturbed == undisturbed
        again = {
            name: computed(node) - before[name]
            for name, node in made.nodes.items()
            if name != "middle"
        }
        assert again.pop("spare") == session
        assert all(session <= tokens <= session + 1 for tokens in again.values())
        with urllib.request.urlopen(made.facts["http"] + "/metrics") as answer:
            lines = answer.read().decode().splitlines()
        assert "meshnet_sessions_recovered_total 1.0" in lines
        assert 'meshnet_recoveries_total{way="journal"} 1.0' in lines
        assert not any("Traceback" in line for line in made.gateway.errors)


@pytest.mark.timeout(600)
def test_without_a_journal_the_whole_route_computes_the_session_again(smollm2):
    off = dict.fromkeys(LAYERS, ("--journal-bytes", "0"))
    with mesh(smollm2, node_options=off) as made:
        made.join_aside("spare", LAYERS["last"])
        undisturbed = made.ask().choices[0].message.content
        session = computed(made.nodes["first"])
        assert made.stream_and(lambda: replace_killed(made, "last")) == undisturbed
        assert computed(made.nodes["first"]) > 2 * session + 1
        with urllib.request.urlopen(made.facts["http"] + "/metrics") as answer:
            assert 'meshnet_recoveries_total{way="replay"} 1.0' in answer.read().decode()
        assert any("the journal of this session" in line for line in made.gateway.errors)


@pytest.mark.timeout(600)
def test_an_exact_recovery_gives_the_same_text_in_bfloat16(smollm2):
    with mesh(smollm2, "--recovery", "exact", dtype="bfloat16") as made:
        made.join_aside("spare", LAYERS["last"])
        undisturbed = made.ask().choices[0].message.content
        assert made.stream_and(lambda: replace_killed(made, "last")) == undisturbed


@pytest.mark.timeout(600)
def test_s1_without_a_spare_the_stream_ends_with_an_error_and_never_with_a_stop(smollm2):
    with mesh(smollm2, "--spare-wait", "2") as made:
        with pytest.raises(openai.APIError) as caught:
            made.stream_and(made.nodes["middle"].process.kill)
        assert "10-20" in str(caught.value)
        with pytest.raises(openai.InternalServerError) as refused:
            made.ask()
        assert refused.value.status_code == 503


@pytest.mark.timeout(600)
def test_a_node_that_starts_again_takes_its_session_up(smollm2):
    with mesh(smollm2, "--spare-wait", "60") as made:
        undisturbed = made.ask().choices[0].message.content

        def restart() -> None:
            made.nodes["last"].process.kill()
            made.nodes["last"].process.wait(10)
            made.start("last", LAYERS["last"])

        assert made.stream_and(restart) == undisturbed


@pytest.mark.timeout(600)
def test_a_node_that_hangs_is_left_when_its_lease_ends(smollm2):
    with mesh(smollm2) as made:
        made.join_aside("spare", LAYERS["first"])
        undisturbed = made.ask().choices[0].message.content
        first = made.nodes["first"]
        assert made.stream_and(lambda: replace_stopped(made, "first")) == undisturbed
        first.process.send_signal(signal.SIGCONT)
        eventually(lambda: made.ask().choices[0].finish_reason)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("hop", [0, 1])
def test_a_node_that_hangs_is_left_in_seconds_whatever_its_lease(smollm2, hop):
    """Found by asking it: its lease, and the timeouts of chunks, are far longer."""
    with mesh(smollm2, "--lease-ttl", "3000") as made:
        layers = list(LAYERS.values())[hop]
        made.join_aside("spare", layers)
        undisturbed = made.ask().choices[0].message.content
        name = list(LAYERS)[hop]
        hung = made.nodes[name]
        began = time.monotonic()
        assert made.stream_and(lambda: replace_stopped(made, name)) == undisturbed
        assert time.monotonic() - began < 110.0  # a hop's own timeout is 120 s
        hung.process.send_signal(signal.SIGCONT)
        named = [line for line in made.gateway.errors if "GET /healthz" in line]
        assert named
        assert all(f"node {name} at" in line for line in named)


@pytest.mark.timeout(600)
def test_a_node_that_hung_is_gone_back_to_where_no_other_has_its_layers(smollm2):
    """It was taken for dead; that costs its sessions a rebuild, and no more."""
    with mesh(smollm2, "--lease-ttl", "3000", "--spare-wait", "120") as made:
        undisturbed = made.ask().choices[0].message.content
        hung = made.nodes["middle"]

        def stop_until_it_is_noticed() -> None:
            hung.process.send_signal(signal.SIGSTOP)
            noticed = threading.Thread(target=go_on_when_noticed)
            noticed.start()

        def go_on_when_noticed() -> None:
            try:
                eventually(lambda: any("GET /healthz" in line for line in made.gateway.errors), 110)
            finally:
                hung.process.send_signal(signal.SIGCONT)

        assert made.stream_and(stop_until_it_is_noticed) == undisturbed
        assert any("GET /healthz" in line for line in made.gateway.errors)
