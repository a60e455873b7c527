"""Header fields of what is asked of a session besides its chunks, to values and back (sans-IO).

Source: proto/WIRE.md, Sessions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshnet.fields import WIRE_VERSION, Headers, check_version, collect, optional, required
from meshnet.grammar import format_route, parse_positive, parse_route, parse_wire_layers
from meshnet.topology import LayerRange, Route, SessionId

__all__ = ["Reservation", "pack_reservation", "unpack_reservation"]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Asks for a session's place at a node and at the hops after it (PUT /sessions/{id}).

    Attributes:
        session: to open, or to grow.
        max_tokens: tokens of cache that it will need in all.
        layers: that it will run here; None means all.
        route: the hops after this one.
    """

    session: SessionId
    max_tokens: int
    layers: LayerRange | None = None
    route: Route = ()

    def onward(self) -> Reservation:
        """Give what the next hop is asked; the route must have one."""
        return replace(self, layers=self.route[0].layers, route=self.route[1:])


def unpack_reservation(session: SessionId, headers: Headers) -> Reservation:
    """Read the header fields of one PUT /sessions/{id}.

    Raises:
        WireError: for the first field at fault, named in ``field``.
    """
    fields = collect(headers)
    check_version(fields)
    return Reservation(
        session=session,
        max_tokens=required(fields, "X-Meshnet-Max-Tokens", parse_positive),
        layers=optional(fields, "X-Meshnet-Layers", parse_wire_layers),
        route=optional(fields, "X-Meshnet-Route", parse_route) or (),
    )


def pack_reservation(asked: Reservation) -> list[tuple[str, str]]:
    """Write a reservation's header fields, in WIRE.md's order."""
    return [
        ("X-Meshnet-Wire", str(WIRE_VERSION)),
        *_places(asked.layers, asked.route),
        ("X-Meshnet-Max-Tokens", str(asked.max_tokens)),
    ]


def _places(layers: LayerRange | None, route: Route) -> list[tuple[str, str]]:
    fields = []
    if layers is not None:
        fields.append(("X-Meshnet-Layers", str(layers)))
    if route:
        fields.append(("X-Meshnet-Route", format_route(route)))
    return fields
