"""RouteService: routes, models and the mesh's status."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace

import meshnet
from meshnet.candidate import RouteQuery
from meshnet.control.caller import current_caller
from meshnet.control.candidates import Candidates
from meshnet.control.grant_issuer import GrantIssuer
from meshnet.control.granting import check_session, granted, granted_hops
from meshnet.control.models import models_in
from meshnet.control.paging import page_of
from meshnet.control.registry import Snapshot, Store
from meshnet.control.route_shape import (
    are_equal,
    check_wanted,
    left_out_messages,
    query_of,
    route_messages,
)
from meshnet.control.validate import check_model, check_required
from meshnet.coverage import left_out
from meshnet.errors import Code, RouteError
from meshnet.identity import Role
from meshnet.routing import Selected
from meshnet.topology import NodeId
from meshnet.v1 import node_service_pb2 as node_pb
from meshnet.v1 import route_service_pb2 as pb
from meshnet.v1 import types_pb2

__all__ = ["RouteService"]


class RouteService:
    """Servicer of meshnet.v1.RouteService, for both faces.

    It remembers to which nodes it has given sessions, so that those which have not
    reached a node's load report yet are counted.

    Args:
        store: the registry.
        replica_id: of this process.
        bookmark_interval_s: how often a quiet watch says that it lives.
        grants: where nodes take sessions only with a grant.
    """

    def __init__(
        self,
        store: Store,
        replica_id: str,
        *,
        bookmark_interval_s: float = 10.0,
        grants: GrantIssuer | None = None,
    ) -> None:
        self._store = store
        self._grants = grants
        self._replica_id = replica_id
        self._bookmark_interval_s = bookmark_interval_s
        self._candidates = Candidates()
        self._turns: Counter[NodeId] = Counter()
        self._assigned: dict[NodeId, tuple[int, int]] = {}  # heartbeat time in ns, sessions since

    async def SelectRoute(  # noqa: N802 - the schema's name
        self, request: pb.SelectRouteRequest, _context: object
    ) -> pb.SelectRouteResponse:
        """Select routes for a new session."""
        check_required(request)
        check_model(request.model, "model")
        session = check_session(request.session_id) if request.session_id else None
        wanted = query_of(request)
        snapshot = await self._store.snapshot()
        table = self._candidates.table(snapshot)
        query = replace(
            wanted,
            exclude=wanted.exclude | snapshot.unconfirmed,
            assigned=self._assigned_since_report(),
            turns=self._turns,
        )
        try:
            routes = table.select(query)
        except RouteError as error:
            raise snapshot.explain(error) from None
        response = pb.SelectRouteResponse(routes=self._messages(routes), revision=snapshot.revision)
        if request.explain:
            found = sorted(left_out(table.candidates(query), query))
            response.left_out.extend(left_out_messages(found, self._candidates.nodes))
            return response
        self._remember(routes[0])
        if self._grants is not None and session is not None:
            for route in response.routes:
                issued = self._grants.issue(session, *granted(route.hops), _asking_gateway())
                route.grant = issued.grant
                route.grant_ttl.FromMilliseconds(int(issued.ttl_s * 1000))
        return response

    async def GrantRoute(  # noqa: N802
        self, request: pb.GrantRouteRequest, _context: object
    ) -> pb.GrantRouteResponse:
        """Grant a session a route that the caller names."""
        check_required(request)
        check_model(request.model, "model")
        session = check_session(request.session_id)
        if self._grants is None:
            raise RouteError(
                Code.FAILED_PRECONDITION, "nodes ask for no route grants here", reason="GRANTS_OFF"
            )
        self._candidates.table(await self._store.snapshot())
        hops = granted_hops(request, self._candidates.nodes)
        issued = self._grants.issue(session, *granted(hops), _asking_gateway())
        response = pb.GrantRouteResponse(grant=issued.grant)
        response.grant_ttl.FromMilliseconds(int(issued.ttl_s * 1000))
        return response

    async def GetGrantPolicy(  # noqa: N802
        self, request: pb.GetGrantPolicyRequest, _context: object
    ) -> pb.GetGrantPolicyResponse:
        """Say how nodes are to check grants."""
        policy = None if self._grants is None else await self._grants.policy(request.key_id)
        return pb.GetGrantPolicyResponse(policy=policy or types_pb2.GrantPolicy())

    async def WatchRoutes(  # noqa: N802
        self, request: pb.WatchRoutesRequest, _context: object
    ) -> AsyncIterator[pb.WatchRoutesResponse]:
        """Stream the best routes whenever they change, and in quiet times as they are."""
        check_required(request)
        check_model(request.model, "model")
        check_wanted(request.max_routes)
        query = RouteQuery(request.model, region=request.region, max_routes=request.max_routes)
        snapshot = await self._store.snapshot()
        sent = self._routes_now(snapshot, query)
        yield pb.WatchRoutesResponse(routes=sent, revision=snapshot.revision)
        events = self._store.watch(snapshot.revision)
        following = asyncio.ensure_future(anext(events))
        try:
            while True:
                await asyncio.wait((following,), timeout=self._bookmark_interval_s)
                is_quiet = not following.done()
                if not is_quiet:
                    event = following.result()
                    following = asyncio.ensure_future(anext(events))
                    if event.is_load:
                        continue
                snapshot = await self._store.snapshot()
                routes = self._routes_now(snapshot, query)
                if is_quiet or not are_equal(routes, sent):
                    sent = routes
                    yield pb.WatchRoutesResponse(routes=sent, revision=snapshot.revision)
        finally:
            following.cancel()
            await asyncio.wait((following,))
            await events.aclose()

    async def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, _context: object
    ) -> pb.GetModelResponse:
        """Give one model; of several digests, the one with most READY nodes."""
        check_required(request)
        check_model(request.name, "name")
        models = [m for m in models_in(await self._store.snapshot()) if m.name == request.name]
        if not models:
            raise RouteError(
                Code.NOT_FOUND,
                f"no node serves {request.name!r}",
                field="name",
                reason="MODEL_UNKNOWN",
            )
        return pb.GetModelResponse(model=max(models, key=lambda m: sum(m.ready_replicas)))

    async def ListModels(  # noqa: N802
        self, request: pb.ListModelsRequest, _context: object
    ) -> pb.ListModelsResponse:
        """Give a page of the models."""
        models = models_in(await self._store.snapshot())
        keyed = [(f"{m.name}\n{m.digest}\n{m.layer_count:06}", m) for m in models]
        page, token = page_of(request, keyed)
        return pb.ListModelsResponse(models=page, next_page_token=token)

    async def GetStatus(  # noqa: N802
        self, _request: pb.GetStatusRequest, _context: object
    ) -> pb.GetStatusResponse:
        """Give this replica's health and a count of the mesh."""
        snapshot = await self._store.snapshot()
        counts = Counter(node_pb.NodeState.Name(node.state) for node in snapshot.nodes)
        models = models_in(snapshot)
        covered = {model.name for model in models if not model.uncovered}
        health = snapshot.health
        response = pb.GetStatusResponse(
            serving=health.is_connected,
            replica_id=self._replica_id,
            store_connected=health.is_connected,
            revision=snapshot.revision,
            node_counts=counts,
            uncovered_models=sorted({model.name for model in models} - covered),
            software_version=meshnet.__version__,
        )
        if not health.is_connected:
            response.store_age.FromMilliseconds(int(health.age_s * 1000))
        return response

    def _assigned_since_report(self) -> dict[NodeId, int]:
        """Give the sessions assigned to each node since its last heartbeat; forget the rest."""
        self._assigned = {
            node: (at, count)
            for node, (at, count) in self._assigned.items()
            if self._reported(node) == at
        }
        for node in [node for node in self._turns if node not in self._candidates.nodes]:
            del self._turns[node]
        return {node: count for node, (_, count) in self._assigned.items()}

    def _remember(self, route: Selected) -> None:
        for stage in route.stages:
            self._turns[stage.node] += 1
            _, count = self._assigned.get(stage.node, (0, 0))
            self._assigned[stage.node] = (self._reported(stage.node) or 0, count + 1)

    def _reported(self, node_id: NodeId) -> int | None:
        """Give the time of a node's last heartbeat, in nanoseconds."""
        node = self._candidates.nodes.get(node_id)
        return None if node is None else node.heartbeat_time.ToNanoseconds()

    def _routes_now(self, snapshot: Snapshot, query: RouteQuery) -> list[pb.Route]:
        """Give the best routes; none while the model is unknown or not covered."""
        try:
            query = replace(query, exclude=snapshot.unconfirmed)
            return self._messages(self._candidates.table(snapshot).select(query))
        except RouteError:
            return []

    def _messages(self, routes: Iterable[Selected]) -> list[pb.Route]:
        return route_messages(routes, self._candidates.nodes)


def _asking_gateway() -> str:
    """Name the gateway whose session a grant is for; empty where callers are not known."""
    caller = current_caller()
    return caller.name if caller is not None and caller.role is Role.GATEWAY else ""
