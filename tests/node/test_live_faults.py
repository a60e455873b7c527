"""Faults of a node that serves, real shards on real sockets.

Heartbeats are 100 s apart here and the node's own probes 1000 s: what is seen comes with the one
probe that a test has done, and the heartbeat that the node sends because of it.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import pytest

from meshnet.compression import CompressionPolicies
from meshnet.control.app import ControlServer, ControlSettings
from meshnet.control.client import ControlClient
from meshnet.control.probe_messages import reference_message
from meshnet.errors import Code, MeshError
from meshnet.plane.client import PlaneClient
from meshnet.topology import LayerRange, NodeId, SessionId
from meshnet.v1 import node_service_pb2 as pb
from meshnet.wire import ChunkHeader
from meshnet_node.app import Node
from meshnet_node.heartbeat import Heartbeat, Registration
from meshnet_node.hf.reference import make_reference
from meshnet_node.hf.shard import TransformersShard
from meshnet_node.settings import NodeSettings
from tests.node.faulty_node import FAULTS
from tests.node.tiny import save_tiny

LAYERS = LayerRange(1, 4)
NODE = NodeId("lent")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model's directory and its reference."""
    directory = save_tiny("llama", tmp_path_factory.mktemp("models") / "tiny")
    return directory, make_reference(directory)


@dataclass
class Lent:
    """A node that serves, and whom to ask what is known of it."""

    node: Node
    shard: TransformersShard
    heartbeat: Heartbeat
    address: str
    control: ControlClient
    plane: PlaneClient

    async def probe(self) -> None:
        await asyncio.to_thread(self.node.prober.step)

    async def becomes(self, state: str) -> pb.Verification:
        """Wait until the control plane shows the node in a state."""
        async with asyncio.timeout(60):
            while True:
                found = await self.control.get_node(NODE)
                if pb.NodeState.Name(found.state) == f"NODE_STATE_{state}":
                    return found.verification
                await asyncio.sleep(0.02)

    async def send(self, session: SessionId, position: int = 0) -> None:
        header = ChunkHeader((1, 1, 64), "bfloat16", session, position=position, layers=LAYERS)
        tensor = np.ones((1, 1, 64), ml_dtypes.bfloat16)
        async with asyncio.timeout(60):
            await self.plane.forward(self.address, NODE, header, tensor, timeout_s=30.0)


@pytest.fixture
async def lend(model):
    """Give a function that starts such a node, verified unless there is no reference."""
    directory, reference = model
    async with AsyncExitStack() as stack:

        async def start(*, with_reference: bool = True) -> Lent:
            server = ControlServer(ControlSettings(http_port=0, grpc_port=0, lease_ttl_s=300.0))
            addresses = await server.start()
            stack.push_async_callback(server.close)
            control = ControlClient(f"grpc://{addresses.grpc}")
            stack.push_async_callback(control.close)
            shard = TransformersShard(
                directory, LAYERS, model="tiny", digest=reference.model_digest, dtype="auto"
            )
            settings = NodeSettings(NODE, port=0, grace_s=0.5, probe_interval_s=1000.0)
            node = Node(settings, lambda: shard, CompressionPolicies())
            stack.push_async_callback(node.close)
            address = await node.listen()
            given = reference_message(reference) if with_reference else None
            registration = Registration(NODE, shard.spec, address, "", reference=given)
            heartbeat = Heartbeat(f"grpc://{addresses.grpc}", registration, node)
            await heartbeat.start()
            stack.push_async_callback(heartbeat.close)
            await node.load()
            await heartbeat.beat()
            plane = PlaneClient()
            stack.push_async_callback(plane.close)
            return Lent(node, shard, heartbeat, address, control, plane)

        yield start


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("bit", "WEIGHTS"), ("float16", "WEIGHTS"), ("shift", "NUMBERS"), ("theta", "NUMBERS")],
)
async def test_a_fault_is_quarantined_by_a_heartbeat_of_its_own(lend, fault, reason):
    lent = await lend()
    assert (await lent.becomes("READY")).state == pb.Verification.STATE_VERIFIED
    await lent.probe()
    assert lent.node.prober.failure == ""
    FAULTS[fault](lent.shard)
    await lent.probe()
    found = await lent.becomes("QUARANTINED")
    assert (found.state, found.reason) == (pb.Verification.STATE_FAILED, reason)
    assert found.message


async def test_a_node_refuses_sessions_itself_from_its_own_probe_on(lend):
    """Also while the control plane is away; sessions that it holds go on."""
    lent = await lend()
    held, other = (SessionId(str(uuid.uuid4())) for _ in range(2))
    await lent.send(held)
    lent.node.on_news = lambda: None  # no heartbeat: nobody else knows
    FAULTS["bit"](lent.shard)
    await lent.probe()
    await lent.send(held, 1)
    with pytest.raises(MeshError) as caught:
        await lent.send(other)
    assert (caught.value.code, caught.value.reason) == (Code.UNAVAILABLE, "QUARANTINED")
    assert "the weights of layer.2 have changed in memory" in caught.value.message
    FAULTS["bit"](lent.shard)
    await lent.probe()
    await lent.send(other)


async def test_a_node_without_a_reference_speaks_against_itself(lend):
    lent = await lend(with_reference=False)
    assert (await lent.becomes("READY")).state == pb.Verification.STATE_UNVERIFIED
    FAULTS["theta"](lent.shard)
    await lent.probe()
    found = await lent.becomes("QUARANTINED")
    assert (found.reason, "something else than before" in found.message) == ("PROBE_FAILED", True)
    await lent.heartbeat.beat()  # says nothing new
    await lent.becomes("QUARANTINED")


async def test_an_error_has_all_of_the_shard_probed_at_once(lend):
    lent = await lend()
    forward = lent.shard.forward
    lent.shard.forward = _broken
    with pytest.raises(MeshError):
        await lent.send(SessionId(str(uuid.uuid4())))
    found = await lent.becomes("QUARANTINED")
    assert (found.reason, "no such kernel" in found.message) == ("PROBE_FAILED", True)
    lent.shard.forward = forward
    await lent.probe()
    await lent.becomes("READY")


def _broken(*_args, **_kwargs):
    raise MeshError(Code.INTERNAL, "no such kernel")
