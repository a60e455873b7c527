"""Requests and answers of EnrollmentService: what is read from them, what is written."""

from __future__ import annotations

import re
from typing import Final

from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf.timestamp_pb2 import Timestamp

from meshnet.certificates import read_csr
from meshnet.control.join_tokens import JoinToken, TokenSpec
from meshnet.control.members import Member
from meshnet.control.validate import MAX_LAYERS, check_model, invalid
from meshnet.identity import Identity, Role, parse_identity
from meshnet.topology import LayerRange
from meshnet.v1 import enrollment_service_pb2 as pb
from meshnet.v1 import types_pb2

__all__ = [
    "ROLES",
    "ROLE_NUMBERS",
    "id_of",
    "identity_named",
    "key_of",
    "layers_message",
    "member_message",
    "timestamp",
    "token_message",
    "token_spec",
]

MAX_TTL_S: Final = 7 * 24 * 3600.0
DEFAULT_TTL_S: Final = 3600.0
MIN_TTL_S: Final = 1.0
MAX_USES: Final = 100_000
_PATTERN: Final = re.compile(r"[a-z0-9.*-]{0,63}")
ROLES: Final = {
    pb.ROLE_NODE: Role.NODE,
    pb.ROLE_GATEWAY: Role.GATEWAY,
    pb.ROLE_READ: Role.READ,
    pb.ROLE_OPERATE: Role.OPERATE,
    pb.ROLE_ADMIN: Role.ADMIN,
}
ROLE_NUMBERS: Final = {role: number for number, role in ROLES.items()}


def identity_named(role: str, name: str, field: str) -> Identity:
    """Give somebody by role and name.

    Raises:
        MeshError: INVALID_ARGUMENT, the name cannot be one.
    """
    try:
        return parse_identity(f"spiffe://mesh/{role}/{name}")
    except ValueError:
        raise invalid(
            field,
            f"{name[:100]!r}: expected a name of 1 to 63 of a-z0-9.-, with a letter or digit at "
            "both ends",
        ) from None


def key_of(csr_pem: str) -> ec.EllipticCurvePublicKey:
    """Give the key that a request asks to certify.

    Raises:
        MeshError: INVALID_ARGUMENT, it is no such request.
    """
    try:
        return read_csr(csr_pem)
    except ValueError as error:
        raise invalid("csr_pem", str(error)) from None


def token_spec(wanted: pb.JoinToken) -> tuple[TokenSpec, float]:
    """Read what a token is to admit, and for how many seconds.

    Raises:
        MeshError: INVALID_ARGUMENT, naming the field.
    """
    role = ROLES.get(wanted.role)
    if role is None:
        raise invalid("join_token.role", f"{wanted.role}: expected one of {', '.join(_names())}")
    if _PATTERN.fullmatch(wanted.name_pattern) is None:
        raise invalid(
            "join_token.name_pattern",
            f"{wanted.name_pattern[:100]!r}: expected at most 63 of a-z0-9.-*",
        )
    if wanted.max_uses > MAX_USES:
        raise invalid("join_token.max_uses", f"{wanted.max_uses}: expected at most {MAX_USES}")
    ttl_s = DEFAULT_TTL_S
    if wanted.HasField("ttl"):
        ttl_s = wanted.ttl.ToNanoseconds() / 1e9
        if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:
            raise invalid("join_token.ttl", f"{ttl_s:g} s: expected 1 s to 7 days")
    layers = None
    if wanted.HasField("layers"):
        if not wanted.layers.start < wanted.layers.end <= MAX_LAYERS:
            raise invalid(
                "join_token.layers",
                f"{wanted.layers.start}-{wanted.layers.end}: expected START-END with "
                f"START < END <= {MAX_LAYERS}",
            )
        layers = LayerRange(wanted.layers.start, wanted.layers.end)
    if wanted.model:
        check_model(f"models/{wanted.model}", "join_token.model")
    if role is not Role.NODE and (wanted.model or layers is not None):
        raise invalid("join_token.model", "only a token for nodes has a model and layers")
    return TokenSpec(role, wanted.name_pattern, wanted.max_uses, wanted.model, layers), ttl_s


def _names() -> list[str]:
    return [pb.Role.Name(number) for number in ROLES]


def id_of(name: str, collection: str) -> str:
    """Read the resource name ``COLLECTION/ID``.

    Raises:
        MeshError: INVALID_ARGUMENT, not such a name.
    """
    prefix, _, found = name.partition("/")
    if prefix != collection or not found or "/" in found or len(found) > 200:
        raise invalid("name", f"{name[:100]!r}: expected {collection}/ID")
    return found


def token_message(token: JoinToken) -> pb.JoinToken:
    """Write a join token, without its secret."""
    message = pb.JoinToken(
        name=f"joinTokens/{token.public}",
        role=ROLE_NUMBERS[token.spec.role],
        name_pattern=token.spec.name_pattern,
        max_uses=token.spec.max_uses,
        used=token.used,
        expire_time=timestamp(token.expire_s),
        model=token.spec.model,
    )
    if token.spec.layers is not None:
        message.layers.CopyFrom(layers_message(token.spec.layers))
    return message


def member_message(member: Member) -> pb.Member:
    """Write a member."""
    identity = member.identity
    return pb.Member(
        name=f"members/{identity.role.value}.{identity.name}",
        role=ROLE_NUMBERS[identity.role],
        key_sha256=member.key_sha256,
        join_token=f"joinTokens/{member.token}",
        create_time=timestamp(member.joined_s),
        expire_time=timestamp(member.expire_s),
    )


def layers_message(layers: LayerRange) -> types_pb2.LayerRange:
    """Write a layer range."""
    return types_pb2.LayerRange(start=layers.start, end=layers.end)


def timestamp(seconds: float) -> Timestamp:
    """Write seconds since 1970."""
    stamp = Timestamp()
    stamp.FromNanoseconds(int(seconds * 1e9))
    return stamp
