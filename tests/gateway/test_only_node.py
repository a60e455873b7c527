"""A session whose node failed for a moment, where no other node has its layers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from meshnet.topology import NodeId
from meshnet_node.stub import StubBackend
from tests.gateway.mesh import Mesh, stub_mesh

BOUND_S = 20.0


@pytest.fixture
async def mesh(text) -> AsyncIterator[Mesh]:
    """A mesh whose gateway waits for spares for longer than any test."""
    async with stub_mesh(text, spare_wait_s=10 * BOUND_S) as made:
        await made.join("first", 0, 2)
        yield made


class Blocks(StubBackend):
    """Waits in its third forward until it may go on."""

    def __init__(self, stub: StubBackend) -> None:
        self.__dict__.update(stub.__dict__)
        self._count = 0
        self.entered = threading.Event()
        self.may_go_on = threading.Event()

    def forward(self, *arguments, **options):
        self._count += 1
        if self._count == 3:
            self.entered.set()
            self.may_go_on.wait(BOUND_S)
        return super().forward(*arguments, **options)


async def test_it_is_used_again_when_its_lease_ended_and_it_has_registered_since(mesh):
    blocks: list[Blocks] = []

    def wrap(stub: StubBackend) -> Blocks:
        blocks.append(Blocks(stub))
        return blocks[0]

    await mesh.join("last", 2, 4, wrap=wrap)
    asking = asyncio.create_task(mesh.ask(max_tokens=8))
    await asyncio.to_thread(blocks[0].entered.wait, BOUND_S)
    mesh.gateway._pipelines.shared.lost.lose(NodeId("last"))
    blocks[0].may_go_on.set()
    async with asyncio.timeout(BOUND_S):
        assert await asking == "h" * 8
