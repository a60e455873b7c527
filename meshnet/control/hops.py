"""Selected routes as the activation plane's hops."""

from __future__ import annotations

from meshnet.control.validate import endpoint_address, endpoint_is_tls, node_id_of
from meshnet.errors import Code, MeshError
from meshnet.topology import Hop, LayerRange, Route
from meshnet.v1 import route_service_pb2 as route_pb

__all__ = ["to_hops"]


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
