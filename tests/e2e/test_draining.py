"""Nodes that are told to leave while they answer: sessions move with their cache."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import openai
import pytest

from tests.e2e.commands import Running, eventually, meshnet_json
from tests.e2e.sessions import LAYERS, MAX_TOKENS, Mesh, figures, mesh

STREAMS = 4
SHORT = 12
BYTES_A_TOKEN = 10 * 2 * 3 * 64 * 4
"""10 layers, keys and values of 3 heads of 64, float32."""


def node_figures(node: Running) -> dict[str, float]:
    return figures(node.ready["address"])


def gateway_figures(made: Mesh) -> dict[str, float]:
    return figures(made.facts["http"].removeprefix("http://"))


def without_tracebacks(made: Mesh) -> None:
    for process in (made.gateway, *made.nodes.values()):
        assert not any("Traceback" in line for line in process.errors), "".join(process.errors)


@pytest.mark.timeout(900)
def test_sigterm_moves_a_session_with_its_cache(smollm2):
    """Each stage in turn: what the new node computes is what the old one had left to do."""
    with mesh(smollm2) as made:
        undisturbed = made.ask().choices[0].message.content
        tokens = node_figures(made.nodes["first"])["meshnet_tokens_total"]
        prompt = tokens - (MAX_TOKENS - 1)
        serving = dict(made.nodes)
        for moved, (stage, layers) in enumerate(LAYERS.items(), start=1):
            old, new = serving[stage], made.join_aside(f"{stage}-2", layers)
            healthy = serving["last" if stage == "first" else "first"]
            before, healthy_before = node_figures(new), node_figures(healthy)

            def replace(old: Running = old, stage: str = stage) -> None:
                made.admit(f"{stage}-2")
                old.process.send_signal(signal.SIGTERM)

            assert made.stream_and(replace) == undisturbed
            assert old.process.wait(60) == 0
            serving[stage] = new
            more = {name: value - before[name] for name, value in node_figures(new).items()}
            assert more["meshnet_caches_taken_total"] == 1
            size, rest = divmod(more["meshnet_caches_taken_bytes_total"], BYTES_A_TOKEN)
            assert rest == 0
            assert size > prompt
            assert more["meshnet_tokens_total"] == tokens - size, "none was computed twice"
            healthy_more = (
                node_figures(healthy)["meshnet_tokens_total"]
                - (healthy_before["meshnet_tokens_total"])
            )
            assert healthy_more == tokens
            gateway = gateway_figures(made)
            assert gateway["meshnet_sessions_moved_total"] == moved
            assert gateway["meshnet_sessions_recovered_total"] == 0
        without_tracebacks(made)


@pytest.mark.timeout(600)
def test_draining_moves_sessions_and_ends_drained(smollm2):
    with mesh(smollm2) as made:
        made.join_aside("spare", LAYERS["middle"])
        control = ("--control", made.facts["control"])
        undisturbed = made.ask().choices[0].message.content

        name, old = "middle", made.nodes["middle"]

        def drain() -> None:
            made.admit("spare")
            made.drain(name, "new disk")

        assert made.stream_and(drain) == undisturbed
        assert node_figures(old)["meshnet_caches_sent_total"] == 1
        assert node_figures(old)["meshnet_sessions"] == 0

        def is_drained() -> bool:
            shown = meshnet_json("nodes", "get", name, *control)["node"]
            return shown["state"] == "NODE_STATE_DRAINED" and shown["drainReason"] == "new disk"

        eventually(is_drained)
        assert old.process.poll() is None
        assert made.ask().choices[0].message.content == undisturbed
        assert old.interrupt() == 0
        without_tracebacks(made)


@pytest.mark.timeout(600)
def test_a_second_sigterm_ends_a_node_at_once(smollm2):
    with mesh(smollm2, "--spare-wait", "1") as made:
        last = made.nodes["last"]

        def end_twice() -> None:
            last.process.send_signal(signal.SIGTERM)
            control = ("--control", made.facts["control"])
            eventually(
                lambda: (
                    meshnet_json("nodes", "get", "last", *control)["node"]["state"]
                    == "NODE_STATE_DRAINING"
                )
            )
            assert last.process.poll() is None, "it waits for its session"
            last.process.send_signal(signal.SIGTERM)
            assert last.process.wait(2.0) == 130

        with pytest.raises(openai.APIError):
            made.stream_and(end_twice, max_tokens=20 * MAX_TOKENS)
        without_tracebacks(made)


class Load:
    """Streams that follow one another, several at a time, until told to end."""

    def __init__(self, made: Mesh) -> None:
        self._made = made
        self._end = threading.Event()
        self.texts: list[str] = []
        self.failures: list[BaseException] = []

    def run(self) -> None:
        while not self._end.is_set():
            try:
                pieces = [
                    chunk.choices[0].delta.content or ""
                    for chunk in self._made.ask(stream=True, max_tokens=SHORT)
                    if chunk.choices
                ]
            except Exception as error:  # noqa: BLE001 - whatever a request fails by is counted
                self.failures.append(error)
                return
            self.texts.append("".join(pieces))

    def end(self) -> None:
        self._end.set()


@contextmanager
def under_load(made: Mesh) -> Iterator[Load]:
    """Keep `STREAMS` streams going; at the end none has failed."""
    load = Load(made)
    with ThreadPoolExecutor(STREAMS) as pool:
        for _ in range(STREAMS):
            pool.submit(load.run)
        try:
            yield load
        finally:
            load.end()
    assert load.failures == []


def restarted(made: Mesh, load: Load, *options: str, spare: bool) -> int:
    """Restart every node, one after the other, each in the middle of some answers.

    Gives how many of them had to cut sessions off.
    """
    num_cut = 0
    for name, layers in LAYERS.items():
        old = made.nodes[name]
        seen = len(load.texts)
        eventually(lambda old=old: node_figures(old)["meshnet_sessions"] > 0, 120)
        if spare:
            made.join(f"{name}-2", layers)
        old.process.send_signal(signal.SIGTERM)
        assert old.process.wait(120) == 0
        old.end()  # all that it logged is there then
        num_cut += any("are cut off" in line for line in old.errors)
        without_tracebacks(made)
        if not spare:
            made.join(name, layers, *options)
        eventually(lambda seen=seen: len(load.texts) > seen, 120)
    return num_cut


@pytest.mark.timeout(900)
def test_a_rolling_restart_with_a_spare_fails_no_request(smollm2):
    with mesh(smollm2) as made:
        undisturbed = made.ask(max_tokens=SHORT).choices[0].message.content
        with under_load(made) as load:
            num_cut = restarted(made, load, spare=True)
        assert set(load.texts) == {undisturbed}
        assert len(load.texts) >= STREAMS
        figures = gateway_figures(made)
        assert num_cut == 0
        assert figures["meshnet_sessions_moved_total"] > 0
        assert figures["meshnet_sessions_abandoned_total"] == 0
        without_tracebacks(made)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("grace", ["60", "0.2"], ids=["finished", "rebuilt"])
def test_a_rolling_restart_of_just_enough_nodes_fails_no_request(smollm2, grace):
    options = dict.fromkeys(LAYERS, ("--grace", grace))
    with mesh(smollm2, "--spare-wait", "120", node_options=options) as made:
        undisturbed = made.ask(max_tokens=SHORT).choices[0].message.content
        with under_load(made) as load:
            num_cut = restarted(made, load, "--grace", grace, spare=False)
        assert set(load.texts) == {undisturbed}
        assert len(load.texts) >= STREAMS
        figures = gateway_figures(made)
        assert figures["meshnet_sessions_abandoned_total"] == 0
        if grace == "60":
            assert num_cut == 0
        else:
            assert num_cut > 0
            assert figures["meshnet_sessions_recovered_total"] > 0
        without_tracebacks(made)
