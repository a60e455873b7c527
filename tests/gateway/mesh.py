"""A whole mesh in one process: a gateway with its control plane, and nodes, on real sockets."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from meshnet.compression import CompressionPolicies
from meshnet.control.grant_issuer import GrantTimes
from meshnet.control.settings import ControlSettings
from meshnet.topology import LayerRange, NodeId
from meshnet_gateway.app import Gateway, GatewaySettings
from meshnet_gateway.model_text import ModelText
from meshnet_gateway.recoveries import RecoverySettings
from meshnet_node.app import Node
from meshnet_node.backend import ShardBackend
from meshnet_node.budget import SessionLimits
from meshnet_node.heartbeat import Heartbeat, Registration
from meshnet_node.settings import NodeSettings
from meshnet_node.stub import StubBackend

NUM_LAYERS = 4
HIDDEN = 8


@dataclass
class Member:
    """A node of the mesh: what serves, and what keeps it registered."""

    node: Node
    heartbeat: Heartbeat
    address: str

    async def leave(self) -> None:
        """Deregister, and end."""
        await self.heartbeat.close()
        await self.node.close()

    def held(self) -> tuple[int, int]:
        """Give sessions and reserved cache tokens."""
        sessions = self.node.stage.sessions
        return len(sessions), sessions.reserved_tokens


@dataclass
class Mesh:
    """A gateway and nodes."""

    gateway: Gateway
    url: str
    model: str
    vocab_size: int
    letter: int
    http: aiohttp.ClientSession
    members: dict[str, Member] = field(default_factory=dict)

    async def join(
        self,
        name: str,
        start: int,
        end: int,
        *,
        load: bool = True,
        delay_s: float = 0.0,
        wrap: Callable[[StubBackend], ShardBackend] = lambda stub: stub,
        **limits: float,
    ) -> Member:
        """Start a node that passes chunks through, and register it."""
        stub = StubBackend(
            LayerRange(start, end),
            hidden_size=HIDDEN,
            num_layers=NUM_LAYERS,
            head=True,
            vocab_size=self.vocab_size,
            model=self.model,
            delay_s=delay_s,
        )
        settings = NodeSettings(NodeId(name), port=0, grace_s=1.0, sessions=SessionLimits(**limits))
        node = Node(settings, lambda: wrap(stub), CompressionPolicies())
        address = await node.listen()
        registration = Registration(NodeId(name), stub.spec, address, "")
        heartbeat = Heartbeat(self.gateway.control_grpc, registration, node)
        await heartbeat.start()
        member = self.members[name] = Member(node, heartbeat, address)
        if load:
            await self.load(member)
        return member

    async def load(self, member: Member) -> None:
        """Load a node's shard, and have it routed to."""
        await member.node.load()
        await member.heartbeat.beat()

    def request(self, **changes: Any) -> dict[str, Any]:
        """Give the body of a completion request, whose text will be one ``h`` a token."""
        body = {
            "model": self.model,
            "prompt": "hello",
            "max_tokens": 3,
            "temperature": 0,
            "logit_bias": {self.letter: 100},
        }
        return {**body, **changes}

    async def complete(self, **changes: Any) -> tuple[int, dict[str, Any]]:
        """Ask for a completion that is not streamed; gives status and JSON."""
        url = f"{self.url}/v1/completions"
        async with self.http.post(url, json=self.request(**changes)) as response:
            return response.status, await response.json()

    async def ask(self, *, stream: bool = False, **changes: Any) -> str:
        """Ask for a completion that must go well; gives its text."""
        body = self.request(stream=stream, **changes)
        async with self.http.post(f"{self.url}/v1/completions", json=body) as response:
            assert response.status == 200, await response.text()
            if not stream:
                return (await response.json())["choices"][0]["text"]
            raw = (await response.read()).decode()
        events = [item.removeprefix("data: ") for item in raw.strip().split("\n\n")]
        assert events.pop() == "[DONE]"
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)

    async def health(self) -> tuple[int, dict[str, Any]]:
        """Ask for the gateway's health; gives status and JSON."""
        async with self.http.get(f"{self.url}/healthz") as response:
            return response.status, await response.json()


@asynccontextmanager
async def stub_mesh(
    text: ModelText,
    *,
    model: str = "lab/tiny",
    spare_wait_s: float = 20.0,
    lease_ttl_s: float = 60.0,
    grants: GrantTimes | None = None,
    **settings: Any,
) -> AsyncIterator[Mesh]:
    """Run a gateway for `text` without nodes; ends it, and the nodes that joined.

    With `grants`, nodes want them.
    """
    gateway = Gateway(
        GatewaySettings(
            port=0,
            control=ControlSettings(
                http_port=0,
                grpc_port=0,
                lease_ttl_s=lease_ttl_s,
                require_grants=grants is not None,
                grants=grants or GrantTimes(),
            ),
            recovery=RecoverySettings(spare_wait_s=spare_wait_s),
            grace_s=1.0,
            **settings,
        ),
        {model: text},
        CompressionPolicies(),
    )
    url = f"http://{await gateway.start()}"
    async with aiohttp.ClientSession() as http:
        mesh = Mesh(gateway, url, model, text.vocab_size, text.encode("h")[0], http)
        try:
            yield mesh
        finally:
            for member in mesh.members.values():
                await member.leave()
            await gateway.close()
