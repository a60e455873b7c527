"""Who may be at the other end of a connection, and what errors of TLS mean."""

from __future__ import annotations

import re
import ssl
from typing import Final, Protocol

from meshnet.credentials import Credentials
from meshnet.errors import Code, MeshError, NextHopError
from meshnet.identity import Identity, Role
from meshnet.tls import TLS_CA, TLS_CERT, TLS_KEY
from meshnet.topology import NodeId

__all__ = [
    "WrongNodeError",
    "check_caller",
    "check_node",
    "explain",
    "is_member",
    "is_removed",
    "name_node",
    "plain_caller",
    "removed",
]

_TLS_REQUIRED: Final = "TLS_REQUIRED"
_NO_TLS: Final = frozenset(
    {
        "HTTP_REQUEST",
        "PACKET_LENGTH_TOO_LONG",
        "RECORD_LAYER_FAILURE",
        "UNKNOWN_PROTOCOL",
        "WRONG_VERSION_NUMBER",
    }
)
"""OpenSSL's reasons for bytes that are no TLS; which one depends on its version."""
_MEMBERS: Final = (Role.NODE, Role.GATEWAY)
_FOR_OPERATORS: Final = ("/healthz", "/metrics")
_REFUSED: Final = re.compile(r".*_ALERT_(.*(?:CERT|UNKNOWN_CA|ACCESS_DENIED|HANDSHAKE).*)")
"""Its reasons for the alerts that refuse a certificate, or that there is none."""


class WrongNodeError(OSError):
    """A connection leads to somebody else than the node that was to be reached."""


class _End(Protocol):
    """A connection, as one looks at who is at its other end."""

    peer: Identity | None
    key_sha256: str
    removals: int


def check_node(own: Credentials | None, end: _End, node: NodeId | None) -> None:
    """Check whom a client reached; without names of a mesh, its TLS has checked the host.

    Args:
        own: this side's.
        end: the connection.
        node: the one to be reached; None for any of the mesh.

    Raises:
        WrongNodeError: it is another one, no node, or a member no more.
    """
    if own is None or own.identity is None:
        return
    peer = end.peer
    if peer is None or peer.role is not Role.NODE or node not in (None, peer.name):
        found = "no certificate of a mesh" if peer is None else peer.uri
        wanted = "a node" if node is None else Identity(Role.NODE, node).uri
        raise WrongNodeError(f"expected {wanted}, found {found}")
    if is_removed(own, end):
        raise WrongNodeError(f"{peer.uri} was removed from the mesh")


def is_removed(own: Credentials, end: _End) -> bool:
    """Tell whether the other end was removed from the mesh: looked up once for each change.

    Where it was, the connection is to be closed: the next time this says no.
    """
    removals = own.removals
    if end.removals == removals.generation:
        return False
    end.removals = removals.generation
    return end.key_sha256 in removals


def removed(peer: Identity | None) -> MeshError:
    """Give what a caller is answered that was removed from the mesh."""
    name = "the holder of this certificate" if peer is None else peer.uri
    return MeshError(
        Code.PERMISSION_DENIED,
        f"{name} was removed from the mesh: join again by a new token",
        reason="MEMBER_REMOVED",
    )


def is_member(own: Credentials | None, peer: Identity | None) -> bool:
    """Tell whether a caller may send anything: in a mesh that has names, nodes and gateways."""
    if own is None or own.identity is None:
        return True
    return peer is not None and peer.role in _MEMBERS


def check_caller(peer: Identity | None, method: str, path: str) -> None:
    """Let somebody who is no member of the mesh do what operators may: look.

    Raises:
        MeshError: PERMISSION_DENIED, with who may.
    """
    is_look = method in ("GET", "HEAD") and path in _FOR_OPERATORS
    if peer is not None and peer.role.is_operator and is_look:
        return
    name = "a certificate without a name of the mesh" if peer is None else peer.uri
    raise MeshError(
        Code.PERMISSION_DENIED,
        f"{method} {path[:80]!r} is not open to {name}: nodes and gateways of the mesh may;"
        f" operators may GET {' and '.join(_FOR_OPERATORS)}",
        reason="ROLE_NOT_ALLOWED",
    )


def explain(error: Exception) -> str:
    """Say what a connection failed by, with the flag that mends it where that is TLS."""
    cause = error if isinstance(error, ssl.SSLError) else error.__cause__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"its certificate is not accepted ({cause.verify_message}); see {TLS_CA}"
    if not isinstance(cause, ssl.SSLError):
        return str(error)
    reason = cause.reason or ""
    if reason in _NO_TLS:
        return f"it does not speak TLS, as this side does; start it with {TLS_CERT} and {TLS_KEY}"
    refused = _REFUSED.fullmatch(reason)
    if refused is not None:
        said = refused[1].lower().replace("_", " ")
        return f"it refused this side's certificate ({said}); see {TLS_CERT} here, {TLS_CA} there"
    return f"TLS failed: {re.sub(r' ?[(]_ssl[.]c:[0-9]+[)]', '', str(cause))}"


def plain_caller() -> MeshError:
    """Give what a server with TLS answers to a request that came without."""
    return MeshError(
        Code.FAILED_PRECONDITION,
        f"this port speaks TLS; expected https, or a caller started with {TLS_CA}",
        reason=_TLS_REQUIRED,
    )


def name_node(error: MeshError, address: str, node: NodeId) -> MeshError:
    """Name the node in its answer that it wants TLS; any other error stays as it is."""
    if error.reason != _TLS_REQUIRED:
        return error
    return NextHopError(f"node {node} at {address}: {error.message}", failed_node=node)
