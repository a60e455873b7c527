"""Errors of the activation plane as RFC 9457 problem details, and back (pure).

Source: proto/WIRE.md, Answers; RFC 9457.
"""

from __future__ import annotations

import json
import math
from typing import Any, Final

from meshnet.errors import (
    CacheFullError,
    Code,
    MeshError,
    NextHopError,
    PositionError,
    UnknownSessionError,
    WireError,
)
from meshnet.wire import WIRE_VERSION, Headers

__all__ = ["PROBLEM_JSON", "pack_problem", "unpack_problem"]

PROBLEM_JSON: Final = "application/problem+json"


def pack_problem(error: MeshError) -> tuple[int, list[tuple[str, str]], bytes]:
    """Write an error as (HTTP status, header fields, JSON body)."""
    body: dict[str, Any] = {
        "status": error.code.http_status,
        "code": error.code.name,
        "detail": error.message,
    }
    headers = [("Content-Type", PROBLEM_JSON), ("X-Meshnet-Wire-Version", str(WIRE_VERSION))]
    if error.field is not None:
        body["field"] = error.field
    if error.reason is not None:
        body["reason"] = error.reason
    if error.retry_after_s is not None or error.code.http_status in (429, 503):
        headers.append(("Retry-After", str(max(1, math.ceil(error.retry_after_s or 0)))))
    if isinstance(error, PositionError):
        body["expected_position"] = error.expected
        headers.append(("X-Meshnet-Expected-Position", str(error.expected)))
    if isinstance(error, NextHopError):
        body["failed_node"] = error.failed_node
        headers.append(("X-Meshnet-Failed-Node", error.failed_node))
    return error.code.http_status, headers, json.dumps(body).encode()


def unpack_problem(status: int, headers: Headers, body: bytes) -> MeshError:
    """Read an answer of status 400 or more; never raises, whatever a proxy may have put there."""
    fields = {name.lower(): value for name, value in headers}
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        parsed = None
    problem: dict[str, Any] = parsed if isinstance(parsed, dict) else {}
    message = str(problem.get("detail") or f"HTTP status {status} without problem details")[:2000]
    field = str(problem["field"]) if problem.get("field") else None
    code = _code(status, str(problem.get("code", "")))
    reason = str(problem["reason"]) if problem.get("reason") else None
    retry = fields.get("retry-after", "")
    retry_after_s = float(retry) if retry.isascii() and retry.isdigit() and len(retry) < 7 else None
    failed_node = _token(fields.get("x-meshnet-failed-node", ""))
    expected = fields.get("x-meshnet-expected-position", "")
    if failed_node is not None and status in (502, 504):
        return NextHopError(message, failed_node=failed_node, timed_out=status == 504)
    if status == 409 and expected.isascii() and expected.isdigit() and len(expected) < 20:
        return PositionError(message, expected=int(expected))
    if reason == "SESSION_UNKNOWN":
        return UnknownSessionError(message)
    if reason == "CACHE_FULL":
        return CacheFullError(message, retry_after_s=retry_after_s or 1.0)
    if field is not None and reason is None and 400 <= status < 500:
        return WireError(message, field=field, code=code)
    return MeshError(code, message, field=field, reason=reason, retry_after_s=retry_after_s)


def _token(value: str) -> str | None:
    """Take a name that is fit to be sent on in a header field, else None."""
    fit = value.isascii() and value.isprintable() and 0 < len(value) <= 255
    return value if fit else None


def _code(status: int, name: str) -> Code:
    """Take the named code where it fits the status, else the first that has this status."""
    named = Code.__members__.get(name)
    if named is not None and named.http_status == status:
        return named
    codes: list[Code] = [Code.INVALID_ARGUMENT, Code.ABORTED, Code.INTERNAL, *Code]
    for code in codes:
        if code.http_status == status:
            return code
    return Code.INVALID_ARGUMENT if status < 500 else Code.INTERNAL
