"""Nodes that end in the middle of an answer: a pause for the reader, not an error."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import openai
import pytest

from tests.e2e.commands import Running, eventually, meshnet_json, running

QUESTION = [{"role": "user", "content": "Name the planets of the solar system, one a line."}]
LAYERS = {"first": "0:10", "middle": "10:20", "last": "20:30"}
MAX_TOKENS = 24
KILL_AFTER = 5


@dataclass
class Mesh:
    """A gateway and float32 nodes, each of which can be ended alone."""

    model: str
    stack: ExitStack
    gateway: Running
    facts: dict
    nodes: dict[str, Running] = field(default_factory=dict)

    def start(self, name: str, layers: str) -> Running:
        node = self.stack.enter_context(
            running(
                *("node", "--id", name, "--model", self.model, "--layers", layers),
                *("--listen", "127.0.0.1:0", "--control", self.facts["control"]),
                *("--dtype", "float32", "--threads", "1"),
            )
        )
        self.nodes[name] = node
        return node

    def on_route(self, hop: int) -> Running:
        """Give the node that the next session will run through at this hop."""
        control = self.facts["control"]
        selected = meshnet_json("route", self.facts["models"][0], "--control", control)
        return self.nodes[selected["routes"][0]["hops"][hop]["node"].removeprefix("nodes/")]

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=self.facts["http"] + "/v1", api_key="none", max_retries=0)

    def ask(self, **options):
        return self.client().chat.completions.create(
            model=self.facts["models"][0],
            messages=QUESTION,
            max_tokens=MAX_TOKENS,
            temperature=0,
            **options,
        )

    def stream_and(self, act) -> str:
        """Stream the answer, call `act` after five pieces; gives the whole text."""
        pieces = []
        acted = False
        for chunk in self.ask(stream=True):
            if chunk.choices and chunk.choices[0].delta.content:
                pieces.append(chunk.choices[0].delta.content)
            if len(pieces) >= KILL_AFTER and not acted:
                act()
                acted = True
        assert acted
        return "".join(pieces)


@contextlib.contextmanager
def mesh(smollm2, *gateway_options: str) -> Iterator[Mesh]:
    with ExitStack() as stack:
        gateway = stack.enter_context(
            running(
                *("gateway", "--model", str(smollm2), "--listen", "127.0.0.1:0"),
                *("--control-listen", "127.0.0.1:0", "--control-grpc-listen", "127.0.0.1:0"),
                *("--lease-ttl", "3", *gateway_options),
            )
        )
        made = Mesh(str(smollm2), stack, gateway, gateway.event("listening"))
        for name, layers in LAYERS.items():
            made.start(name, layers)
        for node in list(made.nodes.values()):
            node.event("ready")
        yield made


@pytest.mark.timeout(600)
def test_s1_a_killed_node_is_replaced_by_a_spare_without_a_wrong_token(smollm2):
    with mesh(smollm2) as made:
        made.start("spare", LAYERS["middle"]).event("ready")
        undisturbed = made.ask().choices[0].message.content
        disturbed = made.stream_and(made.on_route(1).process.kill)
        assert disturbed == undisturbed
        assert not any("Traceback" in line for line in made.gateway.errors)


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
        made.start("spare", LAYERS["first"]).event("ready")
        undisturbed = made.ask().choices[0].message.content
        first = made.on_route(0)
        assert made.stream_and(lambda: first.process.send_signal(signal.SIGSTOP)) == undisturbed
        first.process.send_signal(signal.SIGCONT)
        eventually(lambda: made.ask().choices[0].finish_reason)
