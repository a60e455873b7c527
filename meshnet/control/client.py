"""A client of the control plane over gRPC: deadlines, retries, keepalive, MeshError."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any, Self

import grpc

from meshnet.control.calls import Calls, ClientSettings
from meshnet.control.stubs import (
    enrollment_stub,
    node_stub,
    operator_stub,
    reference_stub,
    route_stub,
)
from meshnet.control.validate import endpoint_address, endpoint_is_tls, node_id_of
from meshnet.credentials import Credentials
from meshnet.errors import Code, MeshError
from meshnet.topology import Hop, LayerRange, Route
from meshnet.v1 import enrollment_service_pb2 as enroll_pb
from meshnet.v1 import node_service_pb2 as node_pb
from meshnet.v1 import operator_service_pb2 as operator_pb
from meshnet.v1 import reference_service_pb2 as reference_pb
from meshnet.v1 import route_service_pb2 as route_pb
from meshnet.v1 import types_pb2

__all__ = ["ClientSettings", "ControlClient", "to_hops"]

_PAGE_SIZE = 1000


class ControlClient:
    """Calls of every service of a control plane.

    Every method raises MeshError alone, with reason and field as the server gave them.
    An attempt that got no answer (UNAVAILABLE without a reason) is tried again until the
    call's time is up; every call is safe to repeat. Of several replicas one is asked for as
    long as it answers; if it does not, or if its store is away, the next one is asked at once.

    Args:
        url: ``grpc://HOST:PORT``, ``HOST:PORT``, or ``http://HOST:PORT`` of the JSON face,
            which is then asked for the port of the gRPC face; of several replicas, all of
            them with commas between. ``grpcs`` and ``https`` need credentials.
        settings: see there.
        credentials: this process's, with which every connection has TLS; calls begin with
            those that were renewed, as soon as they are.

    Raises:
        ConfigError: `url` is none of these, naming the part at fault.
    """

    def __init__(
        self,
        url: str,
        settings: ClientSettings | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self._calls = Calls(url, settings or ClientSettings(), credentials)

    async def __aenter__(self) -> Self:
        """Give the client; it connects with its first call."""
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        """Close the client."""
        await self.close()

    async def close(self) -> None:
        """Close all connections; running calls are cancelled."""
        await self._calls.close()

    async def register(
        self, node_id: str, node: node_pb.Node, *, ttl_s: float | None = None
    ) -> node_pb.RegisterNodeResponse:
        """Register a node."""
        request = node_pb.RegisterNodeRequest(node_id=node_id, node=node)
        if ttl_s is not None:
            request.requested_ttl.FromMilliseconds(int(ttl_s * 1000))
        response: node_pb.RegisterNodeResponse = await self._nodes("RegisterNode", request)
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
        response: node_pb.HeartbeatResponse = await self._nodes("Heartbeat", request, timeout_s)
        return response

    async def get_node(self, node_id: str) -> node_pb.Node:
        """Give one node."""
        request = node_pb.GetNodeRequest(name=f"nodes/{node_id}")
        response: node_pb.GetNodeResponse = await self._nodes("GetNode", request)
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
        asked.page_size = _PAGE_SIZE
        while True:
            response: node_pb.ListNodesResponse = await self._nodes("ListNodes", asked)
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
        response: node_pb.DrainNodeResponse = await self._nodes("DrainNode", request)
        return response.node

    async def update(self, node: node_pb.Node, paths: Iterable[str]) -> node_pb.Node:
        """Change the fields `paths` (labels, weight, cordoned) of the node that `node` names."""
        request = node_pb.UpdateNodeRequest(node=node)
        request.update_mask.paths.extend(paths)
        response: node_pb.UpdateNodeResponse = await self._nodes("UpdateNode", request)
        return response.node

    async def deregister(self, node_id: str, *, allow_missing: bool = True) -> None:
        """Remove a node; by default one that is gone already is no error."""
        request = node_pb.DeregisterNodeRequest(
            name=f"nodes/{node_id}", allow_missing=allow_missing
        )
        await self._nodes("DeregisterNode", request)

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

    async def select_route(
        self,
        model: str,
        *,
        digest: str = "",
        exclude: Iterable[str] = (),
        prefer: Iterable[str] = (),
        borders: Iterable[int] = (),
        region: str = "",
        wire_versions: Iterable[int] = (),
        encodings: Iterable[str] = (),
        expected_tokens: int = 0,
        session: str = "",
    ) -> route_pb.Route:
        """Select the best route for a session; `exclude` and `prefer` are node ids.

        Where nodes ask for grants, and `session` is given, the route has one for it.

        `borders` are the layers at which its hops after the first began so far.

        Raises:
            RouteError: NOT_FOUND, the model is unknown; UNAVAILABLE, layers are uncovered;
                RESOURCE_EXHAUSTED, their nodes have no cache left for the session.
        """
        request = route_pb.SelectRouteRequest(
            model=model,
            model_digest=digest,
            exclude_nodes=[f"nodes/{node_id}" for node_id in exclude],
            prefer_nodes=[f"nodes/{node_id}" for node_id in prefer],
            prefer_borders=list(borders),
            region=region,
            wire_versions=list(wire_versions),
            encodings=list(encodings),
            expected_tokens=expected_tokens,
            session_id=session,
        )
        response: route_pb.SelectRouteResponse = await self._routes("SelectRoute", request)
        return response.routes[0]

    async def grant_route(
        self, model: str, session: str, hops: Iterable[route_pb.Hop]
    ) -> route_pb.GrantRouteResponse:
        """Have a session granted a route; of `hops`, node, incarnation and layers are read.

        Raises:
            MeshError: FAILED_PRECONDITION, reason ``HOP_UNKNOWN``: they are not as registered.
        """
        request = route_pb.GrantRouteRequest(model=model, session_id=session, hops=hops)
        response: route_pb.GrantRouteResponse = await self._routes("GrantRoute", request)
        return response

    async def get_grant_policy(self, key_id: str = "") -> types_pb2.GrantPolicy:
        """Ask how nodes are to check grants; a key that was met is looked for."""
        request = route_pb.GetGrantPolicyRequest(key_id=key_id)
        response: route_pb.GetGrantPolicyResponse = await self._routes("GetGrantPolicy", request)
        return response.policy

    async def explain_routes(
        self,
        model: str,
        *,
        exclude: Iterable[str] = (),
        region: str = "",
        expected_tokens: int = 0,
        max_routes: int = 1,
    ) -> route_pb.SelectRouteResponse:
        """Give the routes that a session would get, and the nodes left out; counts none.

        Raises:
            RouteError: as `select_route`.
        """
        request = route_pb.SelectRouteRequest(
            model=model,
            exclude_nodes=[f"nodes/{node_id}" for node_id in exclude],
            region=region,
            expected_tokens=expected_tokens,
            max_routes=max_routes,
            explain=True,
        )
        response: route_pb.SelectRouteResponse = await self._routes("SelectRoute", request)
        return response

    async def list_models(self) -> list[route_pb.Model]:
        """Give all models, page by page."""
        return await self._all(route_stub, "ListModels", route_pb.ListModelsRequest(), "models")

    async def get_model(self, name: str) -> route_pb.Model:
        """Give one model by its resource name."""
        request = route_pb.GetModelRequest(name=name)
        response: route_pb.GetModelResponse = await self._routes("GetModel", request)
        return response.model

    async def get_status(self) -> route_pb.GetStatusResponse:
        """Give the health of the replica and of the mesh."""
        request = route_pb.GetStatusRequest()
        response: route_pb.GetStatusResponse = await self._routes("GetStatus", request)
        return response

    async def put_reference(
        self, reference: reference_pb.Reference, *, replace: bool = False
    ) -> reference_pb.Reference:
        """Register what a model computes."""
        request = reference_pb.PutReferenceRequest(reference=reference, replace=replace)
        response: reference_pb.PutReferenceResponse = await self._references(
            "PutReference", request
        )
        return response.reference

    async def list_references(self) -> list[reference_pb.Reference]:
        """Give all references, page by page, without their parts."""
        request = reference_pb.ListReferencesRequest()
        return await self._all(reference_stub, "ListReferences", request, "references")

    async def delete_reference(self, model_digest: str) -> None:
        """Remove a reference."""
        request = reference_pb.DeleteReferenceRequest(name=f"references/{model_digest}")
        await self._references("DeleteReference", request)

    async def create_join_token(
        self, wanted: enroll_pb.JoinToken
    ) -> enroll_pb.CreateJoinTokenResponse:
        """Create a join token; only this answer has its secret."""
        request = enroll_pb.CreateJoinTokenRequest(join_token=wanted)
        response: enroll_pb.CreateJoinTokenResponse = await self._enrollment(
            "CreateJoinToken", request
        )
        return response

    async def list_join_tokens(self) -> list[enroll_pb.JoinToken]:
        """Give all join tokens, page by page."""
        request = enroll_pb.ListJoinTokensRequest()
        return await self._all(enrollment_stub, "ListJoinTokens", request, "join_tokens")

    async def delete_join_token(self, public: str) -> None:
        """Delete a join token by its public part."""
        request = enroll_pb.DeleteJoinTokenRequest(name=f"joinTokens/{public}")
        await self._enrollment("DeleteJoinToken", request)

    async def list_members(self) -> list[enroll_pb.Member]:
        """Give all who have joined, page by page."""
        request = enroll_pb.ListMembersRequest()
        return await self._all(enrollment_stub, "ListMembers", request, "members")

    async def delete_member(self, member: str) -> None:
        """Remove a member, ``ROLE.NAME``."""
        request = enroll_pb.DeleteMemberRequest(name=f"members/{member}")
        await self._enrollment("DeleteMember", request)

    async def create_operator(
        self, operator: operator_pb.Operator
    ) -> operator_pb.CreateOperatorResponse:
        """Create an operator; the answer has the token, which cannot be had again."""
        request = operator_pb.CreateOperatorRequest(operator=operator)
        response: operator_pb.CreateOperatorResponse = await self._operators(
            "CreateOperator", request
        )
        return response

    async def list_operators(self) -> list[operator_pb.Operator]:
        """Give all operators, page by page."""
        request = operator_pb.ListOperatorsRequest()
        return await self._all(operator_stub, "ListOperators", request, "operators")

    async def revoke_operator(self, name: str) -> operator_pb.Operator:
        """Refuse an operator from now on."""
        request = operator_pb.RevokeOperatorRequest(name=f"operators/{name}")
        response: operator_pb.RevokeOperatorResponse = await self._operators(
            "RevokeOperator", request
        )
        return response.operator

    async def _nodes(self, method: str, request: object, timeout_s: float | None = None) -> Any:
        return await self._call(node_stub, method, request, timeout_s)

    async def _routes(self, method: str, request: object) -> Any:
        return await self._call(route_stub, method, request)

    async def _references(self, method: str, request: object) -> Any:
        return await self._call(reference_stub, method, request)

    async def _enrollment(self, method: str, request: object) -> Any:
        return await self._call(enrollment_stub, method, request)

    async def _operators(self, method: str, request: object) -> Any:
        return await self._call(operator_stub, method, request)

    async def _all(
        self, stub: Callable[[grpc.aio.Channel], Any], method: str, request: Any, field: str
    ) -> list[Any]:
        """List page by page; gives what the answers have in `field`."""
        request.page_size = _PAGE_SIZE
        found: list[Any] = []
        while True:
            response = await self._call(stub, method, request)
            found += getattr(response, field)
            if not response.next_page_token:
                return found
            request.page_token = response.next_page_token

    async def _call(
        self,
        stub: Callable[[grpc.aio.Channel], Any],
        method: str,
        request: object,
        timeout_s: float | None = None,
    ) -> Any:
        return await self._calls.call(lambda c: getattr(stub(c), method), request, timeout_s)


def to_hops(route: route_pb.Route, *, tls: bool = False) -> Route:
    """Give a selected route as the activation plane's hops.

    A hop says only ``host:port``: whether hops are encrypted is one choice for a mesh.

    Args:
        route: as selected.
        tls: the caller connects with TLS.

    Raises:
        MeshError: INVALID_ARGUMENT, a hop has no usable name or endpoint; UNAVAILABLE, one is
            reached with TLS where the caller has none, or the other way round.
    """
    hops = []
    for index, hop in enumerate(route.hops):
        node = node_id_of(hop.node, f"hops[{index}].node")
        address = endpoint_address(hop.endpoint.uri, f"hops[{index}].endpoint.uri")
        if endpoint_is_tls(hop.endpoint.uri) != tls:
            mend = (
                "it has no TLS, as this gateway has; start it with --tls-cert and --tls-key"
                if tls
                else "it speaks TLS; start this gateway with --tls-ca"
            )
            raise MeshError(
                Code.UNAVAILABLE, f"node {node} at {address}: {mend}", reason="TLS_MISMATCH"
            )
        hops.append(Hop(node, address, LayerRange(hop.layers.start, hop.layers.end)))
    return tuple(hops)
