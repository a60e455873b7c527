"""Does to a mesh what a schedule says."""

from __future__ import annotations

import asyncio
import signal
import time
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress

import ml_dtypes
import numpy as np

from meshnet.dtypes import BFLOAT16, INT32
from meshnet.errors import MeshError
from meshnet.grammar import Want
from meshnet.plane.client import PlaneClient
from meshnet.topology import NodeId, SessionId
from meshnet.wire import ChunkHeader
from tests.chaos.mesh import Mesh, MeshNode
from tests.chaos.processes import until, until_async
from tests.chaos.schedule import Fault, Kind

__all__ = ["inflict"]

_LEAVE_S = 90.0
_SLOW_STOPPED_S = 0.06
_SLOW_RUNNING_S = 0.03


async def inflict(mesh: Mesh, fault: Fault) -> str:
    """Let a fault happen and pass; gives the node that it hit, or ``control``."""
    if fault.stage is None:
        async with mesh.on_control:
            await _ON_CONTROL[fault.kind](mesh, fault.for_s)
        return "control"
    node = await mesh.pick(fault.stage, busy=fault.busy)
    match fault.kind:
        case Kind.KILL:
            await mesh.kill_node(node)
            await asyncio.sleep(fault.for_s)
            await mesh.start_node(node.stage)
        case Kind.KILL_ALL:
            killed = mesh.of_stage(node.stage)
            await asyncio.gather(*map(mesh.kill_node, killed))
            await asyncio.sleep(fault.for_s)
            await asyncio.gather(*(mesh.start_node(node.stage) for _ in killed))
        case Kind.TERM:
            await _let_leave(mesh, node)
            await asyncio.sleep(fault.for_s)
            await mesh.start_node(node.stage)
        case Kind.DRAIN:
            mesh.nodes.pop(node.id, None)
            with suppress(MeshError):  # the control plane may be away: then it is told to end
                await mesh.registry.drain(node.id)
                await until_async(lambda: _is_free(mesh, node), _LEAVE_S, f"{node.id} is free")
            await _let_leave(mesh, node)
            await mesh.start_node(node.stage)
        case _:
            await _ON_NODE[fault.kind](mesh, node, fault)
    return node.id


async def _let_leave(mesh: Mesh, node: MeshNode) -> None:
    """Tell a node to end, which it must do well, and forget it."""
    mesh.nodes.pop(node.id, None)
    node.process.send(signal.SIGTERM)
    await until(lambda: node.process.exit_code is not None, _LEAVE_S, f"{node.id} has left")
    if node.process.exit_code != 0:
        raise AssertionError(f"{node.id} ended with {node.process.exit_code} on SIGTERM")


async def _is_free(mesh: Mesh, node: MeshNode) -> bool:
    held = await mesh.held(node)
    return held is not None and held.sessions == 0


async def _stop(mesh: Mesh, node: MeshNode, fault: Fault) -> None:
    node.process.send(signal.SIGSTOP)
    await asyncio.sleep(fault.for_s)
    node.process.send(signal.SIGCONT)


async def _slow(mesh: Mesh, node: MeshNode, fault: Fault) -> None:
    """Let the process run for a third of the time."""
    end = time.monotonic() + fault.for_s
    while time.monotonic() < end:
        node.process.send(signal.SIGSTOP)
        await asyncio.sleep(_SLOW_STOPPED_S)
        node.process.send(signal.SIGCONT)
        await asyncio.sleep(_SLOW_RUNNING_S)


async def _close(mesh: Mesh, node: MeshNode, fault: Fault) -> None:
    node.proxy.refuses = True
    node.proxy.reset()
    await asyncio.sleep(fault.for_s)
    node.proxy.refuses = False


async def _delay(mesh: Mesh, node: MeshNode, fault: Fault) -> None:
    node.proxy.delay_s = fault.amount / 1e3
    await asyncio.sleep(fault.for_s)
    node.proxy.delay_s = 0.0


async def _drop(mesh: Mesh, node: MeshNode, fault: Fault) -> None:
    node.proxy.swallows = True
    await asyncio.sleep(fault.for_s)
    node.proxy.swallows = False
    node.proxy.reset()


async def _truncate(mesh: Mesh, node: MeshNode, fault: Fault) -> None:
    node.proxy.cut_after = fault.amount


async def _split(mesh: Mesh, node: MeshNode, fault: Fault) -> None:
    node.proxy.piece_bytes = fault.amount
    await asyncio.sleep(fault.for_s)
    node.proxy.piece_bytes = None


async def _full(mesh: Mesh, node: MeshNode, fault: Fault) -> None:
    """Take all of the cache that is free on every node of the stage, by sessions of our own."""
    nodes = mesh.of_stage(node.stage)
    client = PlaneClient()
    taken = await asyncio.gather(*(_take_cache(mesh, client, each) for each in nodes))
    try:
        await asyncio.sleep(fault.for_s)
        for each, session in zip(nodes, taken, strict=True):
            if session is not None:
                with suppress(MeshError):  # the node may have been killed meanwhile
                    await client.release(each.address, session)
    finally:
        await client.close()


async def _take_cache(mesh: Mesh, client: PlaneClient, node: MeshNode) -> SessionId | None:
    held = await mesh.held(node)
    if held is None:
        return None
    is_first = node.stage == 0
    tensor = np.full((1, 1), 3, np.int32) if is_first else np.ones((1, 1, 64), ml_dtypes.bfloat16)
    header = ChunkHeader(
        shape=tensor.shape,
        dtype=INT32 if is_first else BFLOAT16,
        session=SessionId(str(uuid.uuid4())),
        position=0,
        want=Want("none"),
        max_tokens=held.capacity_tokens - held.reserved_tokens,
    )
    try:
        await client.forward(node.address, NodeId(node.id), header, tensor, timeout_s=10)
    except MeshError:  # another session was quicker: then it is nearly full all the same
        return None
    return header.session


async def _restart_control(mesh: Mesh, for_s: float) -> None:
    await mesh.control.kill()
    await asyncio.sleep(for_s)
    await mesh.start_control()


async def _take_control_away(mesh: Mesh, for_s: float) -> None:
    control = mesh.control
    control.send(signal.SIGSTOP)
    await asyncio.sleep(for_s)
    control.send(signal.SIGCONT)


_ON_CONTROL: dict[Kind, Callable[[Mesh, float], Awaitable[None]]] = {
    Kind.CONTROL_RESTART: _restart_control,
    Kind.CONTROL_AWAY: _take_control_away,
}
_ON_NODE: dict[Kind, Callable[[Mesh, MeshNode, Fault], Awaitable[None]]] = {
    Kind.STOP: _stop,
    Kind.SLOW: _slow,
    Kind.CLOSE: _close,
    Kind.DELAY: _delay,
    Kind.DROP: _drop,
    Kind.TRUNCATE: _truncate,
    Kind.SPLIT: _split,
    Kind.FULL: _full,
}
