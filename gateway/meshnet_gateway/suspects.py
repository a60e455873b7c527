"""Which nodes failed this gateway of late, before the control plane can know it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

from meshnet.topology import NodeId

__all__ = ["SuspectNodes"]

_SUSPECT_S: Final = 10.0
"""As long as a lease lasts by default: then the control plane knows better."""


class SuspectNodes:
    """Nodes that sessions are not sent to for a while, where others can serve them.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[NodeId, float] = {}

    def add(self, node: NodeId) -> None:
        """Note that a node failed a session just now."""
        self._until[node] = self._clock() + _SUSPECT_S

    def clear(self, nodes: Collection[NodeId]) -> None:
        """Note that these serve a session."""
        for node in nodes:
            self._until.pop(node, None)

    def now(self) -> frozenset[NodeId]:
        """Give those that failed of late."""
        now = self._clock()
        self._until = {node: until for node, until in self._until.items() if until > now}
        return frozenset(self._until)
