"""Watches the registry for nodes that are lost, drain, or are in quarantine."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from meshnet.control.client import ControlClient
from meshnet.errors import MeshError
from meshnet.tasks import Background
from meshnet.topology import NodeId
from meshnet.v1 import node_service_pb2 as nodes_pb2
from meshnet_gateway.draining import DrainingNodes
from meshnet_gateway.lost import LostNodes

__all__ = ["NodeWatch"]

_log = logging.getLogger(__name__)

_RETRY_S: Final = 1.0


class NodeWatch(Background):
    """Watches the registry: `start`, until `close`.

    Args:
        control: whose nodes to watch; a control plane that is away loses no node.
        lost: told of nodes whose lease ended, or whose numbers are wrong.
        draining: told of every change.
    """

    def __init__(self, control: ControlClient, lost: LostNodes, draining: DrainingNodes) -> None:
        super().__init__()
        self._control = control
        self._lost = lost
        self._draining = draining

    async def _run(self) -> None:
        while True:
            # The watch begins with all nodes there are; one that is not among them is gone.
            self._draining.clear()
            try:
                async for change in self._control.watch_nodes():
                    if change.node.name:  # a bookmark has no node
                        self._observe(change.node)
            except MeshError as error:
                _log.info("watching the nodes failed, trying again: %s", error)
            await asyncio.sleep(_RETRY_S)

    def _observe(self, node: nodes_pb2.Node) -> None:
        node_id = NodeId(node.name.removeprefix("nodes/"))
        if node.state == nodes_pb2.NODE_STATE_LOST:
            self._lost.lose(node_id)
        if node.verification.state == nodes_pb2.Verification.STATE_FAILED:
            self._lost.quarantine(node_id)
        else:
            self._lost.wrong.discard(node_id)
        self._draining.observe(node)
