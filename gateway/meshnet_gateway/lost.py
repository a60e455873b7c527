"""Hears from the control plane which nodes are lost, and interrupts what waits for them.

A node that was stopped or cut off closes no connection: without this, a session would wait
for its hop's timeout.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from meshnet.control.client import ControlClient
from meshnet.errors import MeshError, NextHopError
from meshnet.topology import NodeId
from meshnet.v1 import node_service_pb2 as nodes_pb2

__all__ = ["LostNodes"]

_log = logging.getLogger(__name__)

_RETRY_S: Final = 1.0


class _Guard:
    """One task that waits for nodes; `lost` names the one that it was interrupted for."""

    def __init__(self, nodes: frozenset[NodeId], task: asyncio.Task[object]) -> None:
        self.nodes = nodes
        self.lost: NodeId | None = None
        self._task = task

    def interrupt(self, node: NodeId) -> None:
        if self.lost is None:
            self.lost = node
            self._task.cancel()

    def interrupted(self) -> bool:
        """Tell whether a CancelledError is this guard's alone, and take it back then."""
        return self.lost is not None and self._task.uncancel() == 0


class LostNodes:
    """Watches the registry: `start`, until `close`.

    Args:
        control: whose nodes to watch; a control plane that is away loses no node.
    """

    def __init__(self, control: ControlClient) -> None:
        self._control = control
        self._guards: set[_Guard] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop watching."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    @contextmanager
    def guard(self, nodes: frozenset[NodeId]) -> Iterator[None]:
        """Interrupt the current task inside this context when one of `nodes` is lost.

        Raises:
            NextHopError: naming the lost node.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("guard needs a running task")
        guard = _Guard(nodes, task)
        self._guards.add(guard)
        try:
            yield
        except asyncio.CancelledError:
            if not guard.interrupted() or guard.lost is None:
                raise
            raise NextHopError(
                f"node {guard.lost} let its lease end", failed_node=guard.lost, timed_out=True
            ) from None
        finally:
            self._guards.discard(guard)

    def lose(self, node: NodeId) -> None:
        """Interrupt every task that waits for `node`."""
        for guard in [guard for guard in self._guards if node in guard.nodes]:
            guard.interrupt(node)

    async def _run(self) -> None:
        while True:
            try:
                async for change in self._control.watch_nodes():
                    if change.node.state == nodes_pb2.NODE_STATE_LOST:
                        self.lose(NodeId(change.node.name.removeprefix("nodes/")))
            except MeshError as error:
                _log.info("watching the nodes failed, trying again: %s", error)
            await asyncio.sleep(_RETRY_S)
