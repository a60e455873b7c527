"""One error tree, and the one table from error codes to gRPC codes and HTTP statuses."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = [
    "CacheFullError",
    "Code",
    "ConfigError",
    "LeaseExpiredError",
    "MeshError",
    "NextHopError",
    "PositionError",
    "RouteError",
    "UnknownSessionError",
    "WireError",
]


class _Codes(NamedTuple):
    grpc: int
    http: int
    reason: str = ""  # keeps members with equal numbers apart: Enum would make them aliases


class Code(Enum):
    """What went wrong, as both faces say it.

    The first block is gRPC's canonical list with the HTTP statuses that its JSON
    mapping gives them. The second block are HTTP conditions that gRPC has no code
    for; each carries the nearest gRPC code.

    Source: google/rpc/code.proto; RFC 9110 for the second block.
    """

    CANCELLED = _Codes(1, 499)
    UNKNOWN = _Codes(2, 500)
    INVALID_ARGUMENT = _Codes(3, 400)
    DEADLINE_EXCEEDED = _Codes(4, 504)
    NOT_FOUND = _Codes(5, 404)
    ALREADY_EXISTS = _Codes(6, 409)
    PERMISSION_DENIED = _Codes(7, 403)
    RESOURCE_EXHAUSTED = _Codes(8, 429)
    FAILED_PRECONDITION = _Codes(9, 400)
    ABORTED = _Codes(10, 409)
    OUT_OF_RANGE = _Codes(11, 400)
    UNIMPLEMENTED = _Codes(12, 501)
    INTERNAL = _Codes(13, 500)
    UNAVAILABLE = _Codes(14, 503)
    DATA_LOSS = _Codes(15, 500)
    UNAUTHENTICATED = _Codes(16, 401)

    METHOD_NOT_ALLOWED = _Codes(12, 405, "METHOD_NOT_ALLOWED")
    REQUEST_TIMEOUT = _Codes(4, 408, "REQUEST_TIMEOUT")
    LENGTH_REQUIRED = _Codes(3, 411, "LENGTH_REQUIRED")
    TOO_LARGE = _Codes(3, 413, "TOO_LARGE")
    UNSUPPORTED_MEDIA_TYPE = _Codes(3, 415, "UNSUPPORTED_MEDIA_TYPE")
    HEADERS_TOO_LARGE = _Codes(3, 431, "HEADERS_TOO_LARGE")
    NEXT_HOP_FAILED = _Codes(14, 502, "NEXT_HOP_FAILED")

    @property
    def grpc_code(self) -> int:
        """Number of the gRPC status code (google.rpc.Code)."""
        return self.value.grpc

    @property
    def http_status(self) -> int:
        """HTTP status that an answer with this code carries."""
        return self.value.http


class MeshError(Exception):
    """An error that a user may read: what was wrong, where, and what was expected.

    Args:
        code: what kind of error; decides gRPC code and HTTP status.
        message: one line, with the value at fault and what was expected.
        field: the header, field path, variable or file at fault.
        reason: stable upper-case word for machines, finer than the code
            (google.rpc.ErrorInfo's reason), for example ``LEASE_EXPIRED``.
        retry_after_s: seconds after which trying again makes sense.
    """

    def __init__(
        self,
        code: Code,
        message: str,
        *,
        field: str | None = None,
        reason: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field
        self.reason = reason
        self.retry_after_s = retry_after_s


class WireError(MeshError):
    """A message of the activation plane breaks a rule of proto/WIRE.md; ``field`` is its header."""

    def __init__(
        self, message: str, *, field: str | None = None, code: Code = Code.INVALID_ARGUMENT
    ) -> None:
        super().__init__(code, message, field=field)


class ConfigError(MeshError):
    """A setting, flag, file or address given by the user cannot be used."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(Code.INVALID_ARGUMENT, message, field=field)


class PositionError(MeshError):
    """A chunk starts past the end of its session's cache (HTTP 409).

    Args:
        expected: the position that the session's cache can take next.
    """

    def __init__(self, message: str, *, expected: int) -> None:
        super().__init__(Code.ABORTED, message, field="X-Meshnet-Position", reason="POSITION_GAP")
        self.expected = expected


class UnknownSessionError(MeshError):
    """A chunk continues a session that this node does not hold (HTTP 404)."""

    def __init__(self, message: str) -> None:
        super().__init__(
            Code.NOT_FOUND, message, field="X-Meshnet-Session", reason="SESSION_UNKNOWN"
        )


class CacheFullError(MeshError):
    """No KV cache is left for what a session asks (HTTP 429)."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(
            Code.RESOURCE_EXHAUSTED, message, reason="CACHE_FULL", retry_after_s=retry_after_s
        )


class NextHopError(MeshError):
    """A node further along the route failed (HTTP 502) or timed out (HTTP 504).

    Args:
        failed_node: id of the node that failed, not of the one that noticed.
    """

    def __init__(self, message: str, *, failed_node: str, timed_out: bool = False) -> None:
        code = Code.DEADLINE_EXCEEDED if timed_out else Code.NEXT_HOP_FAILED
        super().__init__(code, message, reason="NEXT_HOP_FAILED")
        self.failed_node = failed_node


class RouteError(MeshError):
    """No route covers the layers now (503, or 429 for want of cache); or no such model (404)."""


class LeaseExpiredError(MeshError):
    """A heartbeat for a lease that has ended (HTTP 404): the node must register again."""

    def __init__(self, message: str) -> None:
        super().__init__(Code.NOT_FOUND, message, field="lease_id", reason="LEASE_EXPIRED")
