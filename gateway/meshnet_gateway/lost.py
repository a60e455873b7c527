"""Interrupts what waits for nodes that are lost, and keeps sessions off those that are wrong.

A node that was stopped or cut off closes no connection: without this, a session would wait
for its hop's timeout. A node in quarantine answers, but what it computed is of no use, nor is
what the nodes after it made of that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from meshnet.errors import NextHopError
from meshnet.topology import NodeId

__all__ = ["WRONG_NUMBERS", "LostNodes"]

WRONG_NUMBERS: Final = "WRONG_NUMBERS"
"""Reason of the error that names a node in quarantine."""


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
    """Tasks that wait for nodes, and which of them to interrupt.

    Attributes:
        wrong: nodes in quarantine: no task may begin to wait for them.
    """

    def __init__(self) -> None:
        self.wrong: set[NodeId] = set()
        self._guards: set[_Guard] = set()

    @contextmanager
    def guard(self, nodes: frozenset[NodeId]) -> Iterator[None]:
        """Interrupt the current task inside this context when one of `nodes` is lost or wrong.

        Raises:
            NextHopError: naming that node, with reason `WRONG_NUMBERS` for one in quarantine.
        """
        for node in nodes & self.wrong:
            raise _wrong(node)
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
            if guard.lost in self.wrong:
                raise _wrong(guard.lost) from None
            raise NextHopError(
                f"node {guard.lost} let its lease end", failed_node=guard.lost, timed_out=True
            ) from None
        finally:
            self._guards.discard(guard)

    def lose(self, node: NodeId) -> None:
        """Interrupt every task that waits for `node`."""
        for guard in [guard for guard in self._guards if node in guard.nodes]:
            guard.interrupt(node)

    def quarantine(self, node: NodeId) -> None:
        """Interrupt every task that waits for `node`, and let none begin to."""
        if node not in self.wrong:
            self.wrong.add(node)
            self.lose(node)


def _wrong(node: NodeId) -> NextHopError:
    error = NextHopError(
        f"node {node} is in quarantine: what it computes is not its model's", failed_node=node
    )
    error.reason = WRONG_NUMBERS
    return error
