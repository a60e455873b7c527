"""Routes as messages: what is asked of them, read and checked, and how they are answered (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from meshnet.candidate import RouteQuery
from meshnet.control.validate import invalid, node_id_of
from meshnet.routing import Selected, Stage
from meshnet.topology import NodeId
from meshnet.v1 import node_service_pb2 as node_pb
from meshnet.v1 import route_service_pb2 as pb
from meshnet.v1 import types_pb2

__all__ = ["are_equal", "check_wanted", "left_out_messages", "query_of", "route_messages"]

MAX_ROUTES: Final = 8
_MOST: Final = {
    "wire_versions": 16,
    "encodings": 16,
    "exclude_nodes": 1000,
    "prefer_nodes": 1000,
    "prefer_borders": 1000,
}
_CLASSES: Final = {
    types_pb2.ROUTE_CLASS_UNSPECIFIED: "",
    types_pb2.ROUTE_CLASS_LAN: "lan",
    types_pb2.ROUTE_CLASS_RELAY: "relay",
}
_CLASS_NUMBERS: Final = {name: number for number, name in _CLASSES.items()}

Nodes = Mapping[NodeId, node_pb.Node]


def query_of(request: pb.SelectRouteRequest) -> RouteQuery:
    """Read what a session asks of its route.

    Raises:
        MeshError: INVALID_ARGUMENT, naming the field.
    """
    check_wanted(request.max_routes, request.route_class)
    for name, limit in _MOST.items():
        if len(getattr(request, name)) > limit:
            raise invalid(name, f"{len(getattr(request, name))}: expected at most {limit}")
    return RouteQuery(
        request.model,
        digest=request.model_digest,
        exclude=_node_ids(request.exclude_nodes, "exclude_nodes"),
        prefer=_node_ids(request.prefer_nodes, "prefer_nodes"),
        borders=_borders(request.prefer_borders),
        region=request.region,
        route_class=_CLASSES[request.route_class],
        wire_versions=tuple(request.wire_versions),
        encodings=tuple(request.encodings) or None,
        expected_tokens=request.expected_tokens,
        max_routes=request.max_routes,
    )


def check_wanted(max_routes: int, route_class: int = 0) -> None:
    """Check how many routes are wanted, and of which class.

    Raises:
        MeshError: INVALID_ARGUMENT, naming the field.
    """
    if max_routes > MAX_ROUTES:
        raise invalid("max_routes", f"{max_routes}: expected at most {MAX_ROUTES}")
    if route_class not in types_pb2.RouteClass.values():
        expected = ", ".join(types_pb2.RouteClass.keys())
        raise invalid("route_class", f"{route_class}: expected one of {expected}")


def route_messages(routes: Iterable[Selected], nodes: Nodes) -> list[pb.Route]:
    """Write routes; `nodes` has theirs."""
    return [
        pb.Route(
            route_id=route.route_id,
            model=route.model,
            model_digest=route.digest,
            wire_version=route.wire_version,
            cost=route.cost_us,
            route_class=_CLASS_NUMBERS[route.route_class],
            hops=[_hop(stage, nodes[stage.node]) for stage in route.stages],
        )
        for route in routes
    ]


def left_out_messages(found: Iterable[tuple[NodeId, str]], nodes: Nodes) -> list[pb.LeftOutNode]:
    """Write which nodes are left out and why, as routes know it; `nodes` has them."""
    return [
        pb.LeftOutNode(node=nodes[node].name, reason=_reason(nodes[node], reason))
        for node, reason in found
    ]


def are_equal(routes: Sequence[pb.Route], others: Sequence[pb.Route]) -> bool:
    """Tell whether routes have the same hops; what they cost moves with every heartbeat."""

    def hops(route: pb.Route) -> list[tuple[str, str, int, str]]:
        return [(route.route_id, h.node, h.incarnation, h.endpoint.uri) for h in route.hops]

    return list(map(hops, routes)) == list(map(hops, others))


def _reason(node: node_pb.Node, reason: str) -> str:
    """Say why a node is left out; `reason` is what routes know."""
    if node.state == node_pb.NODE_STATE_QUARANTINED:
        return "QUARANTINED"
    if node.cordoned:
        return "CORDONED"
    waits = node.verification.state == node_pb.Verification.STATE_PENDING
    return "UNVERIFIED" if waits and node.state == node_pb.NODE_STATE_JOINING else reason


def _node_ids(names: Iterable[str], field: str) -> frozenset[NodeId]:
    return frozenset(node_id_of(name, f"{field}[{index}]") for index, name in enumerate(names))


def _borders(layers: Sequence[int]) -> frozenset[int]:
    if list(layers) != sorted({*layers} - {0}):
        raise invalid("prefer_borders", f"{list(layers)}: expected rising layers above 0")
    return frozenset(layers)


def _hop(stage: Stage, node: node_pb.Node) -> pb.Hop:
    cost = stage.cost
    return pb.Hop(
        node=node.name,
        incarnation=node.incarnation,
        layers=types_pb2.LayerRange(start=stage.layers.start, end=stage.layers.end),
        endpoint=node.endpoints[0],
        encodings=stage.encodings,
        cost=pb.HopCost(
            compute=cost.compute_us,
            queue=cost.queue_us,
            cache=cost.cache_us,
            link=cost.link_us,
            overhead=cost.overhead_us,
            penalty=cost.penalty_us,
            link_measured=cost.link_measured,
        ),
    )
