"""Which routes a grant may name: hops of the registry, that together run a model (pure)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from meshnet.control.validate import endpoint_address, invalid, node_id_of
from meshnet.errors import Code, MeshError
from meshnet.grammar import parse_session
from meshnet.topology import Hop, LayerRange, NodeId, Route, SessionId
from meshnet.v1 import node_service_pb2 as node_pb
from meshnet.v1 import route_service_pb2 as pb
from meshnet.v1 import types_pb2

__all__ = ["Granted", "check_session", "granted", "granted_hops"]

_MAX_HOPS: Final = 64


class Granted(NamedTuple):
    """What a grant says of a route: its hops, and the incarnations of their nodes."""

    route: Route
    incarnations: tuple[int, ...]


def check_session(text: str) -> SessionId:
    """Read a session's id.

    Raises:
        MeshError: INVALID_ARGUMENT.
    """
    try:
        return parse_session(text)
    except ValueError as error:
        raise invalid("session_id", f"{text[:80]!r}: expected {error}") from None


def granted(hops: Iterable[pb.Hop]) -> Granted:
    """Take hops as they were selected."""
    route, incarnations = [], []
    for index, hop in enumerate(hops):
        address = endpoint_address(hop.endpoint.uri, f"hops[{index}].endpoint.uri")
        layers = LayerRange(hop.layers.start, hop.layers.end)
        route.append(Hop(node_id_of(hop.node), address, layers))
        incarnations.append(hop.incarnation)
    return Granted(tuple(route), tuple(incarnations))


def granted_hops(
    request: pb.GrantRouteRequest, nodes: Mapping[NodeId, node_pb.Node]
) -> list[pb.Hop]:
    """Check hops that a caller names; gives them with the addresses that the registry has.

    Raises:
        MeshError: INVALID_ARGUMENT, they are no route; FAILED_PRECONDITION, reason
            ``HOP_UNKNOWN``, they are not the nodes that are registered.
    """
    if len(request.hops) > _MAX_HOPS:
        raise invalid("hops", f"{len(request.hops)}: expected at most {_MAX_HOPS}")
    hops: list[pb.Hop] = []
    models = set()
    end = 0
    for index, asked in enumerate(request.hops):
        field = f"hops[{index}]"
        name = node_id_of(asked.node, f"{field}.node")
        if any(hop.node == asked.node for hop in hops):
            raise invalid(f"{field}.node", f"{asked.node!r} is on the route already")
        if not asked.layers.start == end < asked.layers.end:
            raise invalid(
                f"{field}.layers",
                f"{asked.layers.start}-{asked.layers.end}: expected layers from {end} on",
            )
        end = asked.layers.end
        node = nodes.get(name)
        if node is None or node.state == node_pb.NODE_STATE_LOST:
            raise _unknown(field, f"node {name} is not registered")
        if node.incarnation != asked.incarnation:
            raise _unknown(field, f"node {name} has started again: it is {node.incarnation} by now")
        shard = _shard_of(node, request.model, asked.layers)
        if shard is None:
            raise _unknown(
                field, f"node {name} has not layers {asked.layers.start}-{end} of {request.model}"
            )
        models.add((shard.model_digest, shard.layer_count))
        hops.append(
            pb.Hop(
                node=asked.node,
                incarnation=asked.incarnation,
                layers=asked.layers,
                endpoint=node.endpoints[0],
            )
        )
    if len(models) > 1 or {count for _, count in models} != {end}:
        raise _unknown("hops", f"layers 0-{end} are not all of one model {request.model}")
    return hops


def _shard_of(
    node: node_pb.Node, model: str, layers: types_pb2.LayerRange
) -> types_pb2.Shard | None:
    for shard in node.shards:
        held = shard.layers
        if shard.model == model and held.start <= layers.start and layers.end <= held.end:
            return shard
    return None


def _unknown(field: str, problem: str) -> MeshError:
    return MeshError(
        Code.FAILED_PRECONDITION,
        f"{field}: {problem}; expected hops that are registered now",
        field=field,
        reason="HOP_UNKNOWN",
    )
