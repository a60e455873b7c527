"""Interrupts what waits for nodes that are lost.

A node that was stopped or cut off closes no connection: without this, a session would wait
for its hop's timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from meshnet.errors import NextHopError
from meshnet.topology import NodeId

__all__ = ["LostNodes"]


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
    """Tasks that wait for nodes, and which of them to interrupt."""

    def __init__(self) -> None:
        self._guards: set[_Guard] = set()

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
