"""Nodes with stub backends on real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from meshnet.compression import CompressionPolicies
from meshnet.credentials import Credentials
from meshnet.plane.client import PlaneClient
from meshnet.topology import Hop, LayerRange, NodeId
from meshnet_node.app import Node
from meshnet_node.budget import SessionLimits
from meshnet_node.settings import NodeSettings
from tests.fakes import RecordingBackend

StartNode = Callable[..., Awaitable[tuple[Hop, Node, RecordingBackend]]]


@pytest.fixture
async def start_node() -> AsyncIterator[StartNode]:
    """Start nodes that are closed at the end: ``start_node("a", 0, 1, num_layers=2)``."""
    nodes: list[Node] = []

    async def start(
        name: str,
        first: int,
        end: int,
        *,
        num_layers: int | None = None,
        hidden_size: int = 8,
        load: bool = True,
        tls: Credentials | None = None,
        **limits: float,
    ) -> tuple[Hop, Node, RecordingBackend]:
        layers = LayerRange(first, end)
        backend = RecordingBackend(layers, hidden_size=hidden_size, num_layers=num_layers)
        limits.setdefault("reorder_wait_s", 0.05)
        settings = NodeSettings(
            NodeId(name), port=0, grace_s=1.0, sessions=SessionLimits(**limits), tls=tls
        )
        node = Node(settings, lambda: backend, CompressionPolicies())
        nodes.append(node)
        address = await node.listen()
        if load:
            await node.load()
            backend.calls.clear()
        return Hop(NodeId(name), address, layers), node, backend

    yield start
    for node in nodes:
        await node.close()


@pytest.fixture
async def client() -> AsyncIterator[PlaneClient]:
    plane = PlaneClient()
    yield plane
    await plane.close()
