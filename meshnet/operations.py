"""Header fields of what is asked of a session besides its chunks, to values and back (sans-IO).

Source: proto/WIRE.md, Sessions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NewType

from meshnet.fields import (
    WIRE_VERSION,
    Headers,
    check_version,
    collect,
    optional,
    required,
)
from meshnet.grammar import (
    format_route,
    parse_count,
    parse_grant,
    parse_positive,
    parse_route,
    parse_session,
    parse_wire_layers,
)
from meshnet.topology import LayerRange, Route, SessionId

__all__ = [
    "OwnerId",
    "Rebuild",
    "RebuildMode",
    "Release",
    "Reservation",
    "pack_rebuild",
    "pack_release",
    "pack_reservation",
    "parse_owner",
    "unpack_rebuild",
    "unpack_release",
    "unpack_reservation",
]


OwnerId = NewType("OwnerId", str)
"""Names a caller that owns sessions: a UUID of its own, in canonical form."""


class RebuildMode(StrEnum):
    """In which chunks a lost cache is computed again."""

    FAST = "fast"
    """Chunks of a prompt's length: quick; in bfloat16 kernels round differently by shape."""
    EXACT = "exact"
    """The very chunks of the first time: the same bits, and as many of them."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Asks for a session's place at a node and at the hops after it (PUT /sessions/{id}).

    Attributes:
        session: to open, or to grow.
        max_tokens: tokens of cache that it will need in all.
        layers: that it will run here; None means all.
        route: the hops after this one.
        owner: who shows by POST /owners/{id} that it lives, and with whom the session ends;
            None for nobody.
        grant: see `meshnet.wire.ChunkHeader`.
    """

    session: SessionId
    max_tokens: int
    layers: LayerRange | None = None
    route: Route = ()
    owner: OwnerId | None = None
    grant: str | None = None

    def onward(self) -> Reservation:
        """Give what the next hop is asked; the route must have one."""
        return replace(self, layers=self.route[0].layers, route=self.route[1:])


@dataclass(frozen=True, slots=True)
class Rebuild:
    """Asks a node to feed its journal to the hops that replace those after it.

    Attributes:
        session: whose journal.
        position: tokens to feed, from the session's first.
        route: the replacements, the one that follows this node first.
        mode: in which chunks.
        max_tokens: to reserve at the replacements; None reserves as it goes.
        epoch: of the chunks fed.
        grant: for the replacements, and for the node asked where its session has another.
    """

    session: SessionId
    position: int
    route: Route
    mode: RebuildMode = RebuildMode.FAST
    max_tokens: int | None = None
    epoch: int = 0
    grant: str | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """Asks to free a session.

    Attributes:
        session: to free.
        alone: at this node only, not along the route by which its chunks went on.
    """

    session: SessionId
    alone: bool = False


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
        owner=optional(fields, "X-Meshnet-Owner", parse_owner),
        grant=optional(fields, "X-Meshnet-Grant", parse_grant),
    )


def pack_reservation(asked: Reservation) -> list[tuple[str, str]]:
    """Write a reservation's header fields, in WIRE.md's order."""
    fields = [
        ("X-Meshnet-Wire", str(WIRE_VERSION)),
        *_places(asked.layers, asked.route),
        ("X-Meshnet-Max-Tokens", str(asked.max_tokens)),
    ]
    if asked.owner is not None:
        fields.append(("X-Meshnet-Owner", asked.owner))
    return fields + _granted(asked.grant)


def unpack_rebuild(session: SessionId, headers: Headers) -> Rebuild:
    """Read the header fields of one POST /sessions/{id}/rebuild.

    Raises:
        WireError: for the first field at fault, named in ``field``.
    """
    fields = collect(headers)
    check_version(fields)
    return Rebuild(
        session=session,
        position=required(fields, "X-Meshnet-Position", parse_positive),
        route=required(fields, "X-Meshnet-Route", parse_route),
        mode=optional(fields, "X-Meshnet-Rebuild", _parse_mode) or RebuildMode.FAST,
        max_tokens=optional(fields, "X-Meshnet-Max-Tokens", parse_positive),
        epoch=optional(fields, "X-Meshnet-Epoch", parse_count) or 0,
        grant=optional(fields, "X-Meshnet-Grant", parse_grant),
    )


def pack_rebuild(asked: Rebuild) -> list[tuple[str, str]]:
    """Write a rebuild's header fields."""
    fields = [
        ("X-Meshnet-Wire", str(WIRE_VERSION)),
        ("X-Meshnet-Position", str(asked.position)),
        *_places(None, asked.route),
        ("X-Meshnet-Rebuild", asked.mode.value),
    ]
    if asked.max_tokens is not None:
        fields.append(("X-Meshnet-Max-Tokens", str(asked.max_tokens)))
    if asked.epoch:
        fields.append(("X-Meshnet-Epoch", str(asked.epoch)))
    return fields + _granted(asked.grant)


def unpack_release(session: SessionId, headers: Headers) -> Release:
    """Read the header fields of one DELETE /sessions/{id}.

    Raises:
        WireError: for the first field at fault, named in ``field``.
    """
    fields = collect(headers)
    check_version(fields)
    return Release(session, alone=optional(fields, "X-Meshnet-Scope", _parse_scope) or False)


def pack_release(asked: Release) -> list[tuple[str, str]]:
    """Write a release's header fields."""
    return [("X-Meshnet-Scope", "node")] if asked.alone else []


def parse_owner(text: str) -> OwnerId:
    """Read an owner's id, which is written as a session's is."""
    return OwnerId(parse_session(text))


def _parse_mode(text: str) -> RebuildMode:
    try:
        return RebuildMode(text)
    except ValueError:
        raise ValueError("fast or exact") from None


def _parse_scope(text: str) -> bool:
    """Read whether a release is for the node alone."""
    if text not in ("node", "route"):
        raise ValueError("node or route")
    return text == "node"


def _granted(grant: str | None) -> list[tuple[str, str]]:
    return [] if grant is None else [("X-Meshnet-Grant", grant)]


def _places(layers: LayerRange | None, route: Route) -> list[tuple[str, str]]:
    fields = []
    if layers is not None:
        fields.append(("X-Meshnet-Layers", str(layers)))
    if route:
        fields.append(("X-Meshnet-Route", format_route(route)))
    return fields
