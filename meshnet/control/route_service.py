"""RouteService: routes, models and the mesh's status."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing
from typing import Final

import meshnet
from meshnet.control.paging import page_of
from meshnet.control.registry import Snapshot, Store
from meshnet.control.validate import check_model, check_required, invalid, node_id_of
from meshnet.errors import Code, MeshError, RouteError
from meshnet.routing import Candidate, RouteQuery, Selected, select_routes, uncovered_layers
from meshnet.topology import LayerRange, NodeId
from meshnet.v1 import node_service_pb2 as node_pb
from meshnet.v1 import route_service_pb2 as pb
from meshnet.v1 import types_pb2

__all__ = ["RouteService"]

MAX_ROUTES: Final = 8
DEFAULT_WEIGHT: Final = 100


class RouteService:
    """Servicer of meshnet.v1.RouteService, for both faces.

    It remembers to which nodes it has given sessions, so that those which have not
    reached a node's load report yet are counted.
    """

    def __init__(self, store: Store, replica_id: str) -> None:
        self._store = store
        self._replica_id = replica_id
        self._turns: Counter[NodeId] = Counter()
        self._assigned: dict[NodeId, tuple[int, int]] = {}  # heartbeat time in ns, sessions since

    async def SelectRoute(  # noqa: N802 - the schema's name
        self, request: pb.SelectRouteRequest, _context: object
    ) -> pb.SelectRouteResponse:
        """Select routes for a new session."""
        check_required(request)
        check_model(request.model, "model")
        if request.max_routes > MAX_ROUTES:
            raise invalid("max_routes", f"{request.max_routes}: expected at most {MAX_ROUTES}")
        snapshot = await self._store.snapshot()
        query = RouteQuery(
            request.model,
            digest=request.model_digest,
            exclude=_node_ids(request.exclude_nodes, "exclude_nodes"),
            prefer=_node_ids(request.prefer_nodes, "prefer_nodes"),
            region=request.region,
            wire_versions=tuple(request.wire_versions),
            expected_tokens=request.expected_tokens,
            max_routes=request.max_routes,
            assigned=self._assigned_since_report(snapshot),
            turns=self._turns,
        )
        routes = select_routes(_candidates(snapshot), query)
        self._remember(routes[0], snapshot)
        return pb.SelectRouteResponse(
            routes=_messages(routes, snapshot), revision=snapshot.revision
        )

    async def WatchRoutes(  # noqa: N802
        self, request: pb.WatchRoutesRequest, _context: object
    ) -> AsyncIterator[pb.WatchRoutesResponse]:
        """Stream the best routes whenever they change."""
        check_required(request)
        check_model(request.model, "model")
        if request.max_routes > MAX_ROUTES:
            raise invalid("max_routes", f"{request.max_routes}: expected at most {MAX_ROUTES}")
        query = RouteQuery(request.model, region=request.region, max_routes=request.max_routes)
        snapshot = await self._store.snapshot()
        sent = _routes_now(snapshot, query)
        yield pb.WatchRoutesResponse(routes=sent, revision=snapshot.revision)
        async with aclosing(self._store.watch(snapshot.revision)) as events:
            async for event in events:
                if event.is_load:
                    continue
                snapshot = await self._store.snapshot()
                routes = _routes_now(snapshot, query)
                if routes != sent:
                    sent = routes
                    yield pb.WatchRoutesResponse(routes=sent, revision=snapshot.revision)

    async def GetModel(  # noqa: N802
        self, request: pb.GetModelRequest, _context: object
    ) -> pb.GetModelResponse:
        """Give one model; of several digests, the one with most READY nodes."""
        check_required(request)
        check_model(request.name, "name")
        models = [m for m in _models(await self._store.snapshot()) if m.name == request.name]
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
        models = _models(await self._store.snapshot())
        keyed = [(f"{m.name}\n{m.digest}\n{m.layer_count:06}", m) for m in models]
        page, token = page_of(request, keyed)
        return pb.ListModelsResponse(models=page, next_page_token=token)

    async def GetStatus(  # noqa: N802
        self, _request: pb.GetStatusRequest, _context: object
    ) -> pb.GetStatusResponse:
        """Give this replica's health and a count of the mesh."""
        snapshot = await self._store.snapshot()
        counts = Counter(node_pb.NodeState.Name(node.state) for node in snapshot.nodes)
        models = _models(snapshot)
        covered = {model.name for model in models if not model.uncovered}
        return pb.GetStatusResponse(
            serving=True,
            replica_id=self._replica_id,
            store_connected=True,
            revision=snapshot.revision,
            node_counts=counts,
            uncovered_models=sorted({model.name for model in models} - covered),
            software_version=meshnet.__version__,
        )

    def _assigned_since_report(self, snapshot: Snapshot) -> dict[NodeId, int]:
        """Give the sessions assigned to each node since its last heartbeat; forget the rest."""
        reported = {_id(node): node.heartbeat_time.ToNanoseconds() for node in snapshot.nodes}
        self._assigned = {
            node: (at, count)
            for node, (at, count) in self._assigned.items()
            if reported.get(node) == at
        }
        for node in [node for node in self._turns if node not in reported]:
            del self._turns[node]
        return {node: count for node, (_, count) in self._assigned.items()}

    def _remember(self, route: Selected, snapshot: Snapshot) -> None:
        times = {_id(node): node.heartbeat_time.ToNanoseconds() for node in snapshot.nodes}
        for stage in route.stages:
            self._turns[stage.node] += 1
            _, count = self._assigned.get(stage.node, (0, 0))
            self._assigned[stage.node] = (times[stage.node], count + 1)


def _id(node: node_pb.Node) -> NodeId:
    return NodeId(node.name.removeprefix("nodes/"))


def _node_ids(names: Iterable[str], field: str) -> frozenset[NodeId]:
    return frozenset(node_id_of(name, f"{field}[{index}]") for index, name in enumerate(names))


def _candidates(snapshot: Snapshot) -> list[Candidate]:
    return [
        Candidate(
            node=_id(node),
            model=shard.model,
            digest=shard.model_digest,
            layers=LayerRange(shard.layers.start, shard.layers.end),
            layer_count=shard.layer_count,
            embedding=shard.embedding,
            lm_head=shard.lm_head,
            ready=node.state == node_pb.NODE_STATE_READY and not node.cordoned,
            load=node.load.active_sessions + node.load.queue_depth,
            weight=node.weight or DEFAULT_WEIGHT,
            free_tokens=_free_tokens(node.load),
            wire_versions=tuple(node.wire.versions),
            region=node.location.region,
        )
        for node in snapshot.nodes
        for shard in node.shards
    ]


def _free_tokens(load: types_pb2.LoadStats) -> int | None:
    if load.kv_cache_capacity_tokens == 0:
        return None
    return max(0, load.kv_cache_capacity_tokens - load.kv_cache_used_tokens)


def _routes_now(snapshot: Snapshot, query: RouteQuery) -> list[pb.Route]:
    """Give the best routes; none while the model is unknown or not covered."""
    try:
        return _messages(select_routes(_candidates(snapshot), query), snapshot)
    except MeshError:
        return []


def _messages(routes: Iterable[Selected], snapshot: Snapshot) -> list[pb.Route]:
    nodes = {_id(node): node for node in snapshot.nodes}
    return [
        pb.Route(
            route_id=route.route_id,
            model=route.model,
            model_digest=route.digest,
            wire_version=route.wire_version,
            hops=[
                pb.Hop(
                    node=nodes[stage.node].name,
                    incarnation=nodes[stage.node].incarnation,
                    layers=types_pb2.LayerRange(start=stage.layers.start, end=stage.layers.end),
                    endpoint=nodes[stage.node].endpoints[0],
                    encodings=nodes[stage.node].wire.encodings,
                )
                for stage in route.stages
            ],
        )
        for route in routes
    ]


def _models(snapshot: Snapshot) -> list[pb.Model]:
    """Give each model with its coverage, in order of name, digest and layer count."""
    shards: dict[tuple[str, str, int], list[Candidate]] = defaultdict(list)
    for candidate in _candidates(snapshot):
        shards[candidate.model, candidate.digest, candidate.layer_count].append(candidate)
    models = []
    for (name, digest, layer_count), served in sorted(shards.items(), key=lambda item: item[0]):
        replicas = [0] * layer_count
        for candidate in (c for c in served if c.ready):
            for layer in range(candidate.layers.start, candidate.layers.end):
                replicas[layer] += 1
        uncovered = [
            types_pb2.LayerRange(start=gap.start, end=gap.end)
            for gap in uncovered_layers(served, layer_count)
        ]
        models.append(
            pb.Model(
                name=name,
                digest=digest,
                layer_count=layer_count,
                ready_replicas=replicas,
                uncovered=uncovered,
            )
        )
    return models
