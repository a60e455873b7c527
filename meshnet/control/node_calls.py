"""Calls of the NodeService."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing

from meshnet.control.service_calls import PAGE_SIZE, ServiceCalls
from meshnet.control.stubs import node_stub
from meshnet.v1 import node_service_pb2 as node_pb
from meshnet.v1 import types_pb2

__all__ = ["NodeCalls"]


class NodeCalls(ServiceCalls):
    """Nodes: what they say of themselves, and what is done to them."""

    async def register(
        self, node_id: str, node: node_pb.Node, *, ttl_s: float | None = None
    ) -> node_pb.RegisterNodeResponse:
        """Register a node."""
        request = node_pb.RegisterNodeRequest(node_id=node_id, node=node)
        if ttl_s is not None:
            request.requested_ttl.FromMilliseconds(int(ttl_s * 1000))
        response: node_pb.RegisterNodeResponse = await self._call(
            node_stub, "RegisterNode", request
        )
        return response

    async def heartbeat(
        self,
        node_id: str,
        *,
        lease_id: str,
        incarnation: int,
        ready: bool,
        load: types_pb2.LoadStats | None = None,
        probes: Iterable[node_pb.ProbeReport] = (),
        timeout_s: float | None = None,
    ) -> node_pb.HeartbeatResponse:
        """Renew a lease; LeaseExpiredError tells the node to register again."""
        request = node_pb.HeartbeatRequest(
            name=f"nodes/{node_id}",
            lease_id=lease_id,
            incarnation=incarnation,
            ready=ready,
            load=load,
            probes=probes,
        )
        response: node_pb.HeartbeatResponse = await self._call(
            node_stub, "Heartbeat", request, timeout_s
        )
        return response

    async def get_node(self, node_id: str) -> node_pb.Node:
        """Give one node."""
        request = node_pb.GetNodeRequest(name=f"nodes/{node_id}")
        response: node_pb.GetNodeResponse = await self._call(node_stub, "GetNode", request)
        return response.node

    async def list_nodes(
        self, *, model: str = "", region: str = "", states: Iterable[node_pb.NodeState] = ()
    ) -> list[node_pb.Node]:
        """Give all nodes that pass the filters, page by page."""
        request = node_pb.ListNodesRequest(model=model, region=region, states=list(states))
        return list((await self.list_nodes_page(request)).nodes)

    async def list_nodes_page(self, request: node_pb.ListNodesRequest) -> node_pb.ListNodesResponse:
        """Give all nodes as one page, with the revision of the last one that was read."""
        asked = node_pb.ListNodesRequest()
        asked.CopyFrom(request)
        nodes: list[node_pb.Node] = []
        asked.page_size = PAGE_SIZE
        while True:
            response: node_pb.ListNodesResponse = await self._call(node_stub, "ListNodes", asked)
            nodes += response.nodes
            if not response.next_page_token:
                return node_pb.ListNodesResponse(nodes=nodes, revision=response.revision)
            asked.page_token = response.next_page_token

    async def drain(
        self, node_id: str, *, grace_s: float | None = None, reason: str = ""
    ) -> node_pb.Node:
        """Take a node off new routes and let its sessions end."""
        request = node_pb.DrainNodeRequest(name=f"nodes/{node_id}", reason=reason)
        if grace_s is not None:
            request.grace_period.FromMilliseconds(int(grace_s * 1000))
        response: node_pb.DrainNodeResponse = await self._call(node_stub, "DrainNode", request)
        return response.node

    async def update(self, node: node_pb.Node, paths: Iterable[str]) -> node_pb.Node:
        """Change the fields `paths` (labels, weight, cordoned) of the node that `node` names."""
        request = node_pb.UpdateNodeRequest(node=node)
        request.update_mask.paths.extend(paths)
        response: node_pb.UpdateNodeResponse = await self._call(node_stub, "UpdateNode", request)
        return response.node

    async def deregister(self, node_id: str, *, allow_missing: bool = True) -> None:
        """Remove a node; by default one that is gone already is no error."""
        request = node_pb.DeregisterNodeRequest(
            name=f"nodes/{node_id}", allow_missing=allow_missing
        )
        await self._call(node_stub, "DeregisterNode", request)

    async def watch_nodes(
        self, *, start_revision: int = 0, model: str = "", include_load: bool = False
    ) -> AsyncGenerator[node_pb.WatchNodesResponse, None]:
        """Give the nodes and then each change; no deadline, and no retry once begun."""
        request = node_pb.WatchNodesRequest(
            start_revision=start_revision, model=model, include_load=include_load
        )
        watch = self._calls.stream(lambda c: node_stub(c).WatchNodes, request)
        async with aclosing(watch):
            async for response in watch:
                yield response
