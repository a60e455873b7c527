"""A gateway and float32 nodes as processes, each of which can be ended alone."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import openai

from tests.e2e.commands import Running, running

QUESTION = [{"role": "user", "content": "Name the planets of the solar system, one a line."}]
LAYERS = {"first": "0:10", "middle": "10:20", "last": "20:30"}
MAX_TOKENS = 24
KILL_AFTER = 5


@dataclass
class Mesh:
    """A gateway and nodes, each of which can be ended alone."""

    model: str
    dtype: str
    stack: ExitStack
    gateway: Running
    facts: dict
    nodes: dict[str, Running] = field(default_factory=dict)

    def start(self, name: str, layers: str, *options: str) -> Running:
        node = self.stack.enter_context(
            running(
                *("node", "--id", name, "--model", self.model, "--layers", layers),
                *("--listen", "127.0.0.1:0", "--control", self.facts["control"]),
                *("--dtype", self.dtype, "--threads", "1", *options),
            )
        )
        self.nodes[name] = node
        return node

    def join(self, name: str, layers: str, *options: str) -> Running:
        """Start a node and wait until it serves."""
        node = self.start(name, layers, *options)
        node.ready = node.event("ready")
        return node

    def join_aside(self, name: str, layers: str) -> Running:
        """The same; no route leads over it, until `admit`."""
        node = self.join(name, layers)
        self._cordon(name, cordoned=True)
        return node

    def admit(self, name: str) -> None:
        """Let routes lead over a node that was kept aside."""
        self._cordon(name, cordoned=False)

    def drain(self, name: str, reason: str = "") -> None:
        """Have a node's sessions leave it."""
        self._tell("POST", f"{name}:drain", {"gracePeriod": "60s", "reason": reason})

    def _cordon(self, name: str, *, cordoned: bool) -> None:
        self._tell("PATCH", f"{name}?updateMask=cordoned", {"cordoned": cordoned})

    def _tell(self, method: str, what: str, body: Mapping[str, object]) -> None:
        # Not by the CLI, whose start takes as long as some tokens.
        request = urllib.request.Request(
            f"{self.facts['control_http']}/v1/nodes/{what}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
            method=method,
        )
        with urllib.request.urlopen(request, timeout=10) as answer:
            assert answer.status == 200

    def client(self) -> openai.OpenAI:
        """Make a client with connections of its own, which are closed with the mesh."""
        url = self.facts["http"] + "/v1"
        return self.stack.enter_context(openai.OpenAI(base_url=url, api_key="none", max_retries=0))

    def ask(self, **options):
        asked = {"messages": QUESTION, "max_tokens": MAX_TOKENS, "temperature": 0, **options}
        return self.client().chat.completions.create(model=self.facts["models"][0], **asked)

    def stream_and(self, act, **options) -> str:
        """Stream the answer, call `act` after five pieces; gives the whole text."""
        pieces = []
        acted = False
        with self.ask(stream=True, **options) as stream:  # closed too where it breaks
            for chunk in stream:
                if chunk.choices and chunk.choices[0].delta.content:
                    pieces.append(chunk.choices[0].delta.content)
                if len(pieces) >= KILL_AFTER and not acted:
                    act()
                    acted = True
        assert acted
        return "".join(pieces)


def figures(address: str) -> dict[str, float]:
    """Give the metrics at ``host:port`` that have no labels."""
    with urllib.request.urlopen(f"http://{address}/metrics") as answer:
        lines = answer.read().decode().splitlines()
    plain = [line.split(" ") for line in lines if line[0] != "#" and "{" not in line]
    return {name: float(value) for name, value in plain}


@contextlib.contextmanager
def mesh(
    smollm2,
    *gateway_options: str,
    dtype: str = "float32",
    node_options: Mapping[str, Sequence[str]] | None = None,
) -> Iterator[Mesh]:
    with ExitStack() as stack:
        gateway = stack.enter_context(
            running(
                *("gateway", "--model", str(smollm2), "--listen", "127.0.0.1:0"),
                *("--control-listen", "127.0.0.1:0", "--control-grpc-listen", "127.0.0.1:0"),
                *("--lease-ttl", "3", *gateway_options),
            )
        )
        made = Mesh(str(smollm2), dtype, stack, gateway, gateway.event("listening"))
        for name, layers in LAYERS.items():
            made.start(name, layers, *(node_options or {}).get(name, ()))
        for node in made.nodes.values():
            node.ready = node.event("ready")
        yield made
