"""Calls of the RouteService."""

from __future__ import annotations

from collections.abc import Iterable

from meshnet.control.service_calls import ServiceCalls
from meshnet.control.stubs import route_stub
from meshnet.v1 import route_service_pb2 as route_pb
from meshnet.v1 import types_pb2

__all__ = ["RouteCalls"]


class RouteCalls(ServiceCalls):
    """Routes and their grants, models, and how the mesh is."""

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
        response: route_pb.SelectRouteResponse = await self._call(
            route_stub, "SelectRoute", request
        )
        return response.routes[0]

    async def grant_route(
        self, model: str, session: str, hops: Iterable[route_pb.Hop]
    ) -> route_pb.GrantRouteResponse:
        """Have a session granted a route; of `hops`, node, incarnation and layers are read.

        Raises:
            MeshError: FAILED_PRECONDITION, reason ``HOP_UNKNOWN``: they are not as registered.
        """
        request = route_pb.GrantRouteRequest(model=model, session_id=session, hops=hops)
        response: route_pb.GrantRouteResponse = await self._call(route_stub, "GrantRoute", request)
        return response

    async def get_grant_policy(self, key_id: str = "") -> types_pb2.GrantPolicy:
        """Ask how nodes are to check grants; a key that was met is looked for."""
        request = route_pb.GetGrantPolicyRequest(key_id=key_id)
        response: route_pb.GetGrantPolicyResponse = await self._call(
            route_stub, "GetGrantPolicy", request
        )
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
        response: route_pb.SelectRouteResponse = await self._call(
            route_stub, "SelectRoute", request
        )
        return response

    async def list_models(self) -> list[route_pb.Model]:
        """Give all models, page by page."""
        return await self._all(route_stub, "ListModels", route_pb.ListModelsRequest(), "models")

    async def get_model(self, name: str) -> route_pb.Model:
        """Give one model by its resource name."""
        request = route_pb.GetModelRequest(name=name)
        response: route_pb.GetModelResponse = await self._call(route_stub, "GetModel", request)
        return response.model

    async def get_status(self) -> route_pb.GetStatusResponse:
        """Give the health of the replica and of the mesh."""
        request = route_pb.GetStatusRequest()
        response: route_pb.GetStatusResponse = await self._call(route_stub, "GetStatus", request)
        return response
