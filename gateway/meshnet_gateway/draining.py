"""Which nodes drain, as the registry last said: sessions are to leave them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from meshnet.topology import NodeId
from meshnet.v1 import node_service_pb2 as nodes_pb2

__all__ = ["DrainingNodes"]

_LEAVING: Final = (nodes_pb2.NODE_STATE_DRAINING, nodes_pb2.NODE_STATE_DRAINED)


class DrainingNodes:
    """Nodes that drain, each with the start of its process that does."""

    def __init__(self) -> None:
        self._incarnations: dict[NodeId, int] = {}

    def observe(self, node: nodes_pb2.Node) -> None:
        """Take in a node as the registry has it now."""
        name = NodeId(node.name.removeprefix("nodes/"))
        if node.state in _LEAVING:
            self._incarnations[name] = node.incarnation
        else:
            self._incarnations.pop(name, None)

    def clear(self) -> None:
        """Forget all, before every node is observed anew."""
        self._incarnations.clear()

    def among(self, incarnations: Mapping[NodeId, int]) -> frozenset[NodeId]:
        """Give those of the nodes that drain; asked before every step, so quick where none does."""
        if not self._incarnations:
            return frozenset()
        return frozenset(
            node for node, start in incarnations.items() if self._incarnations.get(node) == start
        )
