"""Header fields of the requests that move a session's KV cache, and back (sans-IO).

Source: proto/WIRE.md, Sessions.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from meshnet.errors import WireError
from meshnet.fields import (
    OCTET_STREAM,
    WIRE_VERSION,
    Headers,
    check_media_type,
    check_version,
    collect,
    fault,
    optional,
    required,
)
from meshnet.grammar import (
    format_route,
    parse_count,
    parse_grant,
    parse_positive,
    parse_route,
    parse_wire_layers,
)
from meshnet.kv import KvLayout, format_kv, parse_kv, parse_kv_dtype
from meshnet.operations import OwnerId, parse_owner
from meshnet.topology import LayerRange, Route, SessionId

__all__ = [
    "CacheHeader",
    "MoveHeader",
    "pack_cache",
    "pack_move",
    "unpack_cache",
    "unpack_move",
]

_IMPOSSIBLE_BYTES: Final = 1 << 40
_DIGEST = re.compile(r"[!-+\--~]{1,200}")


@dataclass(frozen=True, slots=True)
class CacheHeader:
    """What the header of a cache says of it.

    Attributes:
        session: whose cache it is.
        layers: whose keys and values follow.
        tokens: positions held, at least 1.
        kv: what each of `layers` keeps of a token.
        max_tokens: to reserve for the session, where that is more than `tokens`.
        digest: of the model's files, so that no other model's cache is taken; None is not checked.
        epoch: of the session's route, see `meshnet.wire.ChunkHeader`.
        owner: with whom the session ends, see `meshnet.operations.Reservation`.
        grant: see `meshnet.wire.ChunkHeader`.
    """

    session: SessionId
    layers: LayerRange
    tokens: int
    kv: KvLayout
    max_tokens: int | None = None
    digest: str | None = None
    epoch: int = 0
    owner: OwnerId | None = None
    grant: str | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of the body, in unbounded integers."""
        return self.tokens * self.kv.bytes_per_token


@dataclass(frozen=True, slots=True)
class MoveHeader:
    """Where a session's cache is to go.

    Attributes:
        session: to move.
        route: the hops that take its layers over, at least one.
        position: tokens to move, from the first; None for all.
        grant: for the hops.
    """

    session: SessionId
    route: Route
    position: int | None = None
    grant: str | None = None


def unpack_cache(session: SessionId, headers: Headers) -> CacheHeader:
    """Read the header fields of ``PUT /sessions/{id}/cache``.

    Raises:
        WireError: for the first header at fault, named in ``field``.
    """
    fields = collect(headers)
    check_version(fields)
    check_media_type(fields)
    if "x-meshnet-encoding" in fields:
        raise fault("X-Meshnet-Encoding", fields["x-meshnet-encoding"], "a raw body")
    layers = required(fields, "X-Meshnet-Layers", parse_wire_layers)
    tokens = required(fields, "X-Meshnet-Position", parse_positive)
    dtype = required(fields, "X-Meshnet-Dtype", parse_kv_dtype)
    kv = required(fields, "X-Meshnet-Kv", lambda text: parse_kv(text, dtype))
    if kv.num_layers != len(layers):
        raise fault("X-Meshnet-Kv", fields["x-meshnet-kv"], f"{len(layers)} layers, as {layers}")
    header = CacheHeader(
        session=session,
        layers=layers,
        tokens=tokens,
        kv=kv,
        max_tokens=optional(fields, "X-Meshnet-Max-Tokens", parse_positive),
        digest=optional(fields, "X-Meshnet-Digest", _parse_digest),
        epoch=optional(fields, "X-Meshnet-Epoch", parse_count) or 0,
        owner=optional(fields, "X-Meshnet-Owner", parse_owner),
        grant=optional(fields, "X-Meshnet-Grant", parse_grant),
    )
    if header.num_bytes >= _IMPOSSIBLE_BYTES:
        raise WireError(
            f"X-Meshnet-Position: {tokens} tokens of {kv.bytes_per_token} bytes;"
            f" expected fewer than {_IMPOSSIBLE_BYTES} bytes in all",
            field="X-Meshnet-Position",
        )
    return header


def pack_cache(header: CacheHeader) -> list[tuple[str, str]]:
    """Write a cache's header fields; Content-Length is the framing's."""
    fields = [
        ("Content-Type", OCTET_STREAM),
        ("X-Meshnet-Wire", str(WIRE_VERSION)),
        ("X-Meshnet-Layers", str(header.layers)),
        ("X-Meshnet-Position", str(header.tokens)),
        ("X-Meshnet-Dtype", header.kv.dtype),
        ("X-Meshnet-Kv", format_kv(header.kv)),
    ]
    if header.max_tokens is not None:
        fields.append(("X-Meshnet-Max-Tokens", str(header.max_tokens)))
    if header.digest is not None:
        fields.append(("X-Meshnet-Digest", header.digest))
    if header.epoch:
        fields.append(("X-Meshnet-Epoch", str(header.epoch)))
    if header.owner is not None:
        fields.append(("X-Meshnet-Owner", header.owner))
    if header.grant is not None:
        fields.append(("X-Meshnet-Grant", header.grant))
    return fields


def unpack_move(session: SessionId, headers: Headers) -> MoveHeader:
    """Read the header fields of ``POST /sessions/{id}/move``.

    Raises:
        WireError: for the first header at fault, named in ``field``.
    """
    fields = collect(headers)
    check_version(fields)
    return MoveHeader(
        session=session,
        route=required(fields, "X-Meshnet-Route", parse_route),
        position=optional(fields, "X-Meshnet-Position", parse_positive),
        grant=optional(fields, "X-Meshnet-Grant", parse_grant),
    )


def pack_move(header: MoveHeader) -> list[tuple[str, str]]:
    """Write a move's header fields."""
    fields = [
        ("X-Meshnet-Wire", str(WIRE_VERSION)),
        ("X-Meshnet-Route", format_route(header.route)),
    ]
    if header.position is not None:
        fields.append(("X-Meshnet-Position", str(header.position)))
    if header.grant is not None:
        fields.append(("X-Meshnet-Grant", header.grant))
    return fields


def _parse_digest(text: str) -> str:
    if _DIGEST.fullmatch(text) is None:
        raise ValueError("1 to 200 printable characters without space and comma")
    return text
