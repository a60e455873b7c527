"""What errors of TLS on the activation plane mean."""

from __future__ import annotations

import re
import ssl
from typing import Final

from meshnet.errors import Code, MeshError, NextHopError
from meshnet.tls import TLS_CA, TLS_CERT, TLS_KEY
from meshnet.topology import NodeId

__all__ = ["explain", "name_node", "plain_caller"]

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
_REFUSED: Final = re.compile(r".*_ALERT_(.*(?:CERT|UNKNOWN_CA|ACCESS_DENIED|HANDSHAKE).*)")
"""Its reasons for the alerts that refuse a certificate, or that there is none."""


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
