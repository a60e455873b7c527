"""A node's place in the mesh, with a real control plane on real sockets."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import AsyncIterator

import ml_dtypes
import numpy as np
import pytest

from meshnet.control.app import ControlServer
from meshnet.control.client import ControlClient
from meshnet.control.settings import ControlSettings
from meshnet.errors import MeshError
from meshnet.topology import SessionId
from meshnet.v1 import node_service_pb2 as nodes_pb2
from meshnet.wire import ChunkHeader
from meshnet_node.heartbeat import Heartbeat, Registration

TTL_S = 0.6


@pytest.fixture
async def control() -> AsyncIterator[ControlClient]:
    server = ControlServer(ControlSettings(http_port=0, grpc_port=0, lease_ttl_s=TTL_S))
    addresses = await server.start()
    client = ControlClient(f"grpc://{addresses.grpc}")
    client.url = f"grpc://{addresses.grpc}"
    yield client
    await client.close()
    await server.close()


async def join(control: ControlClient, hop, node, spec) -> Heartbeat:
    heartbeat = Heartbeat(control.url, Registration(hop.node, spec, hop.address, ""), node)
    await heartbeat.start()
    return heartbeat


async def test_a_node_gets_traffic_once_its_forward_ran(start_node, control):
    hop, node, backend = await start_node("only", 0, 1, load=False)
    heartbeat = await join(control, hop, node, backend.spec)
    assert (await control.get_node("only")).state == nodes_pb2.NODE_STATE_JOINING
    with pytest.raises(MeshError):
        await control.select_route("models/stub")
    await node.load()
    await heartbeat.beat()
    route = await control.select_route("models/stub")
    assert [hop.node for hop in route.hops] == ["nodes/only"]
    await heartbeat.close()
    assert await control.list_nodes() == []


async def test_a_node_that_computes_for_three_leases_stays_registered(
    start_node, control, client, monkeypatch
):
    """Its health is asked for with every heartbeat, and must not queue behind the chunk."""
    monkeypatch.setattr("meshnet_node.health._AGE_S", 0.0)
    hop, node, backend = await start_node("busy", 0, 1)
    heartbeat = await join(control, hop, node, backend.spec)
    await heartbeat.beat()
    release = threading.Event()
    backend.block = release
    header = ChunkHeader((1, 1, 8), "bfloat16", SessionId(str(uuid.uuid4())))
    tensor = np.zeros((1, 1, 8), ml_dtypes.bfloat16)
    computing = asyncio.create_task(
        client.forward(hop.address, hop.node, header, tensor, timeout_s=30.0)
    )
    created = (await control.get_node("busy")).create_time.ToNanoseconds()
    end = asyncio.get_running_loop().time() + 3 * TTL_S
    states = set()
    async for change in control.watch_nodes(include_load=True):
        if change.node.name:  # a bookmark has no node
            states.add(change.node.state)
        if asyncio.get_running_loop().time() > end:
            break
    release.set()
    await computing
    assert states == {nodes_pb2.NODE_STATE_READY}
    assert (await control.get_node("busy")).create_time.ToNanoseconds() == created
    await heartbeat.close()


async def test_a_drained_node_refuses_new_sessions_and_serves_held_ones(
    start_node, control, client
):
    hop, node, backend = await start_node("only", 0, 1)
    heartbeat = await join(control, hop, node, backend.spec)
    await heartbeat.beat()
    held, other = (SessionId(str(uuid.uuid4())) for _ in range(2))
    tensor = np.zeros((1, 1, 8), ml_dtypes.bfloat16)

    async def send(session: SessionId, position: int) -> None:
        header = ChunkHeader((1, 1, 8), "bfloat16", session, position=position)
        await client.forward(hop.address, hop.node, header, tensor, timeout_s=10.0)

    await send(held, 0)
    await control.drain("only")
    await heartbeat.beat()
    await send(held, 1)
    with pytest.raises(MeshError) as caught:
        await send(other, 0)
    assert caught.value.reason == "DRAINING"
    with pytest.raises(MeshError):
        await control.select_route("models/stub")
    await heartbeat.close()


async def test_a_node_whose_lease_ended_registers_again(start_node, control):
    hop, node, backend = await start_node("only", 0, 1)
    heartbeat = await join(control, hop, node, backend.spec)
    await heartbeat.beat()
    await control.deregister("only")
    await heartbeat.beat()
    assert (await control.get_node("only")).state == nodes_pb2.NODE_STATE_READY
    await heartbeat.close()


async def test_an_id_whose_node_was_killed_is_taken_when_its_lease_ends(start_node, control):
    dead_hop, dead, backend = await start_node("twin", 0, 1)
    dead_heartbeat = await join(control, dead_hop, dead, backend.spec)
    dead_heartbeat._task.cancel()
    hop, node, backend = await start_node("twin", 0, 1)
    heartbeat = await join(control, hop, node, backend.spec)
    endpoints = (await control.get_node("twin")).endpoints
    assert [endpoint.uri for endpoint in endpoints] == [f"http://{hop.address}/forward"]
    await heartbeat.close()


async def test_an_id_that_another_node_keeps_is_refused(start_node, control):
    hop, node, backend = await start_node("twin", 0, 1)
    heartbeat = await join(control, hop, node, backend.spec)
    other_hop, other, backend = await start_node("twin", 0, 1)
    with pytest.raises(MeshError) as caught:
        await join(control, other_hop, other, backend.spec)
    assert caught.value.reason == "NODE_ID_IN_USE"
    endpoints = (await control.get_node("twin")).endpoints
    assert [endpoint.uri for endpoint in endpoints] == [f"http://{hop.address}/forward"]
    await heartbeat.close()


async def test_a_node_that_is_told_to_end_lets_its_sessions_leave(
    start_node, control, client, caplog
):
    """The control plane knows before the node refuses anything."""
    hop, node, backend = await start_node("only", 0, 1)
    heartbeat = await join(control, hop, node, backend.spec)
    await heartbeat.beat()
    session = SessionId(str(uuid.uuid4()))
    header = ChunkHeader((1, 1, 8), "bfloat16", session, position=0)
    tensor = np.zeros((1, 1, 8), ml_dtypes.bfloat16)
    await client.forward(hop.address, hop.node, header, tensor, timeout_s=5.0)
    draining = asyncio.create_task(heartbeat.drain(60.0))
    async with asyncio.timeout(30.0):
        while not node.stage.sessions.draining:
            await asyncio.sleep(0.005)
    found = await control.get_node("only")
    assert (found.state, found.drain_reason) == (nodes_pb2.NODE_STATE_DRAINING, "told to end")
    await heartbeat.beat()
    later = ChunkHeader((1, 1, 8), "bfloat16", session, position=1)
    await client.forward(hop.address, hop.node, later, tensor, timeout_s=5.0)
    other = ChunkHeader((1, 1, 8), "bfloat16", SessionId(str(uuid.uuid4())), position=0)
    with pytest.raises(MeshError) as caught:
        await client.forward(hop.address, hop.node, other, tensor, timeout_s=5.0)
    assert caught.value.reason == "DRAINING"
    assert not draining.done()
    await client.release(hop.address, session)
    async with asyncio.timeout(30.0):
        await draining
    assert [text for text in caplog.messages if "drain" in text] == [
        "node only: draining, 1 sessions are to leave",
        "node only: drained",
    ]
    await heartbeat.close()


async def test_the_grace_ends_the_waiting_for_sessions(start_node, control):
    hop, node, backend = await start_node("only", 0, 1)
    heartbeat = await join(control, hop, node, backend.spec)
    node.stage.sessions.reserve("held", 10)
    async with asyncio.timeout(30.0):
        await heartbeat.drain(0.05)
    assert len(node.stage.sessions) == 1
    await heartbeat.close()


async def test_sessions_left_after_an_operators_grace_are_cut_off(start_node, control, caplog):
    hop, node, backend = await start_node("only", 0, 1)
    heartbeat = await join(control, hop, node, backend.spec)
    await heartbeat.beat()
    node.stage.sessions.reserve("held", 10)
    await control.drain("only", grace_s=0.2)
    async with asyncio.timeout(30.0):
        while len(node.stage.sessions):
            await asyncio.sleep(0.01)
    assert (await control.get_node("only")).state == nodes_pb2.NODE_STATE_DRAINED
    assert "node only: drained; it can be stopped" in caplog.messages
    await heartbeat.close()


async def test_a_control_plane_that_is_away_holds_no_node_up(start_node, control, monkeypatch):
    monkeypatch.setattr("meshnet_node.heartbeat._TELL_S", 0.1)
    hop, node, backend = await start_node("only", 0, 1)
    heartbeat = await join(control, hop, node, backend.spec)

    async def away(*_, **__):
        await asyncio.sleep(60.0)

    monkeypatch.setattr(heartbeat._client, "drain", away)
    monkeypatch.setattr(heartbeat._client, "deregister", away)
    async with asyncio.timeout(30.0):
        await heartbeat.drain(60.0)
        await heartbeat.close()
