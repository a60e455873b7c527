"""Route grants: what the control plane signs, and nodes check before they take a session (pure).

A grant is a compact JWS (RFC 7515) with an Ed25519 signature (RFC 8037). It says that a
session may run over certain hops, and until when it may be opened there.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import jwt
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from meshnet.errors import Code, MeshError
from meshnet.grammar import MAX_GRANT_CHARS, format_route, parse_route, parse_session
from meshnet.identity import NAME
from meshnet.topology import LayerRange, NodeId, Route, SessionId

__all__ = [
    "GRANT_FIELD",
    "LEEWAY_S",
    "Grant",
    "GrantKey",
    "key_id_of",
    "refused",
    "sign",
    "verify",
]

GRANT_FIELD: Final = "X-Meshnet-Grant"
LEEWAY_S: Final = 5.0
"""How far the clocks of the control plane's replicas may be apart."""

_ALGORITHM: Final = "EdDSA"
_TYPE: Final = "meshnet-grant"
_MAX_HEADER_CHARS: Final = 200
_KEY_ID = re.compile(r"[0-9a-f]{16}")
_GRANT_ID = re.compile(r"[A-Za-z0-9_-]{8,64}")
_JWS: Final = jwt.PyJWS(algorithms=[_ALGORITHM])


@dataclass(frozen=True, slots=True)
class Grant:
    """That a session may run over a route.

    Attributes:
        id: no other grant's.
        session: whose.
        route: all of its hops.
        incarnations: of the hops' nodes, in their order.
        expires_s: Unix seconds, by the control plane's clock, until which it opens the session.
        gateway: name of the one that it was issued to; empty where that was not known.
    """

    id: str
    session: SessionId
    route: Route
    incarnations: tuple[int, ...]
    expires_s: int
    gateway: str = ""

    def check(
        self,
        session: SessionId,
        node: NodeId,
        incarnation: int,
        layers: LayerRange,
        route: Route,
    ) -> None:
        """Check what a node is asked to do for a session.

        Args:
            session: asked.
            node: the one asked.
            incarnation: of that node's process.
            layers: to run there.
            route: the hops after it; may end before the grant's does.

        Raises:
            MeshError: PERMISSION_DENIED, reason ``GRANT_MISMATCH``.
        """
        self._check_session(session)
        names = [hop.node for hop in self.route]
        if node not in names:
            raise _mismatch(f"is for nodes {', '.join(names)}", f"node {node} among them")
        at = names.index(node)
        if self.incarnations[at] != incarnation:
            raise _mismatch(
                f"is for start {self.incarnations[at]} of node {node}", f"{incarnation}"
            )
        if self.route[at].layers != layers:
            raise _mismatch(f"is for layers {self.route[at].layers}", f"{layers}, as asked")
        if self.route[at + 1 : at + 1 + len(route)] != route:
            after = format_route(self.route[at + 1 :]) or "none"
            raise _mismatch(
                f"is for hops {after[:300]} after node {node}",
                f"{format_route(route)[:300]}, as X-Meshnet-Route says",
            )

    def check_time(self, now: float) -> None:
        """Check that it may still be shown to who does not know it.

        Args:
            now: Unix seconds by the control plane's clock.

        Raises:
            MeshError: PERMISSION_DENIED, reason ``GRANT_EXPIRED``.
        """
        if self.expires_s + LEEWAY_S < now:
            raise refused(
                f"expired {now - self.expires_s:.0f} s ago; expected one that has not, for a"
                " session that is not open, or that takes another route",
                "GRANT_EXPIRED",
            )

    def check_takers(self, session: SessionId, hops: Route) -> None:
        """Check that hops which are to take a session over are the grant's.

        Raises:
            MeshError: as `check`.
        """
        self._check_session(session)
        for start in range(len(self.route)):
            if self.route[start : start + len(hops)] == hops:
                return
        raise _mismatch(
            f"is for hops {format_route(self.route)[:300]}",
            f"{format_route(hops)[:300]} among them, as X-Meshnet-Route says",
        )

    def _check_session(self, session: SessionId) -> None:
        if self.session != session:
            raise _mismatch("is for another session", session)


@dataclass(frozen=True, slots=True)
class GrantKey:
    """A key that grants are checked with.

    Attributes:
        public: of the pair; no secret.
        expires_s: Unix seconds, by the control plane's clock, after which it checks nothing.
    """

    public: Ed25519PublicKey
    expires_s: int

    @classmethod
    def of(cls, public_key: bytes, expires_s: int) -> GrantKey:
        """Take a key's 32 bytes.

        Raises:
            ValueError: they are not 32.
        """
        return cls(Ed25519PublicKey.from_public_bytes(public_key), expires_s)

    @property
    def public_bytes(self) -> bytes:
        """The key's 32 bytes."""
        return self.public.public_bytes_raw()

    @property
    def key_id(self) -> str:
        """The name that grants have for it: 16 hexadecimal digits, which follow from the key."""
        return hashlib.sha256(self.public_bytes).hexdigest()[:16]


def sign(grant: Grant, key: Ed25519PrivateKey, key_id: str) -> str:
    """Write a grant as a compact JWS.

    Raises:
        MeshError: FAILED_PRECONDITION, the route is too long for one.
    """
    claims = {
        "jti": grant.id,
        "sub": grant.session,
        "exp": grant.expires_s,
        "hops": format_route(grant.route),
        "starts": grant.incarnations,
        **({"gateway": grant.gateway} if grant.gateway else {}),
    }
    payload = json.dumps(claims, separators=(",", ":")).encode()
    headers = {"kid": key_id, "typ": _TYPE}
    token = _JWS.encode(payload, key, _ALGORITHM, headers)
    if len(token) > MAX_GRANT_CHARS:
        raise MeshError(
            Code.FAILED_PRECONDITION,
            f"a grant for a route of {len(grant.route)} hops has {len(token)} characters; expected"
            f" at most {MAX_GRANT_CHARS}",
            reason="ROUTE_TOO_LONG",
        )
    return token


def key_id_of(token: str) -> str:
    """Read which key a grant says it is signed with.

    Raises:
        MeshError: PERMISSION_DENIED, reason ``GRANT_INVALID``: it is no grant.
    """
    header = _json(token.partition(".")[0][: _MAX_HEADER_CHARS + 1])
    if header.keys() != {"alg", "kid", "typ"} or header["typ"] != _TYPE:
        raise _invalid(f"its header is not that of a grant; expected alg, kid and typ {_TYPE}")
    if header["alg"] != _ALGORITHM:
        raise _invalid(f"alg {str(header['alg'])[:20]!r}; expected {_ALGORITHM}")
    key_id = header["kid"]
    if not isinstance(key_id, str) or _KEY_ID.fullmatch(key_id) is None:
        raise _invalid("its kid is not the name of a key; expected 16 hexadecimal digits")
    return key_id


def verify(token: str, keys: Mapping[str, GrantKey], now: float) -> Grant:
    """Check a grant's signature and time.

    Args:
        token: of at most `MAX_GRANT_CHARS` characters.
        keys: of the control plane, by key id.
        now: Unix seconds by the control plane's clock.

    Raises:
        MeshError: PERMISSION_DENIED, reason ``GRANT_INVALID``, ``GRANT_KEY_UNKNOWN`` or
            ``GRANT_EXPIRED``.
    """
    key_id = key_id_of(token)
    key = keys.get(key_id)
    if key is None or key.expires_s + LEEWAY_S < now:
        raise refused(
            f"is signed with key {key_id}; expected one of those that the control plane"
            f" publishes now: {', '.join(sorted(keys)[:8]) or 'none'}",
            "GRANT_KEY_UNKNOWN",
        )
    try:
        payload = _JWS.decode(token, key.public, algorithms=[_ALGORITHM])
        grant = _grant_of(json.loads(payload))
    except (jwt.PyJWTError, ValueError, TypeError, KeyError, RecursionError):
        raise _invalid(
            f"its signature is not that of key {key_id}; expected it as it was issued"
        ) from None
    grant.check_time(now)
    return grant


def refused(problem: str, reason: str) -> MeshError:
    """Give the error for a grant that does not serve; `problem` follows the field's name."""
    return MeshError(
        Code.PERMISSION_DENIED, f"{GRANT_FIELD} {problem}", field=GRANT_FIELD, reason=reason
    )


def _grant_of(claims: dict[str, Any]) -> Grant:
    route = parse_route(claims["hops"])
    incarnations = tuple(int(number) for number in claims["starts"])
    if len(incarnations) != len(route) or _GRANT_ID.fullmatch(claims["jti"]) is None:
        raise ValueError("not the claims of a grant")
    session, gateway = parse_session(claims["sub"]), claims.get("gateway", "")
    if gateway != "" and NAME.fullmatch(gateway) is None:
        raise ValueError("not the name of a gateway")
    return Grant(claims["jti"], session, route, incarnations, int(claims["exp"]), gateway)


def _json(segment: str) -> dict[str, Any]:
    """Read a JSON object in base64url."""
    try:
        if len(segment) > _MAX_HEADER_CHARS:
            raise ValueError("too long")
        found = json.loads(base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4)))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise _invalid("it is no compact JWS; expected HEADER.CLAIMS.SIGNATURE as it was issued")
    return found


def _invalid(problem: str) -> MeshError:
    return refused(f"is not valid: {problem}", "GRANT_INVALID")


def _mismatch(granted: str, expected: str) -> MeshError:
    return refused(f"{granted}; expected {expected}", "GRANT_MISMATCH")
