"""One table from codes to gRPC and HTTP."""

from __future__ import annotations

import grpc
import pytest

from meshnet.errors import (
    CacheFullError,
    Code,
    ConfigError,
    LeaseExpiredError,
    MeshError,
    NextHopError,
    PositionError,
    RouteError,
    UnknownSessionError,
    WireError,
)

HTTP = {
    "CANCELLED": 499,
    "UNKNOWN": 500,
    "INVALID_ARGUMENT": 400,
    "DEADLINE_EXCEEDED": 504,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "PERMISSION_DENIED": 403,
    "UNAUTHENTICATED": 401,
    "RESOURCE_EXHAUSTED": 429,
    "FAILED_PRECONDITION": 400,
    "ABORTED": 409,
    "OUT_OF_RANGE": 400,
    "UNIMPLEMENTED": 501,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DATA_LOSS": 500,
}


@pytest.mark.parametrize(("name", "status"), HTTP.items())
def test_canonical_codes(name: str, status: int) -> None:
    assert Code[name].http_status == status
    assert Code[name].grpc_code == grpc.StatusCode[name].value[0]


def test_every_grpc_code_is_there() -> None:
    assert {code.name for code in grpc.StatusCode} - {"OK"} == set(HTTP)


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (Code.METHOD_NOT_ALLOWED, 405),
        (Code.LENGTH_REQUIRED, 411),
        (Code.TOO_LARGE, 413),
        (Code.UNSUPPORTED_MEDIA_TYPE, 415),
        (Code.HEADERS_TOO_LARGE, 431),
        (Code.NEXT_HOP_FAILED, 502),
    ],
)
def test_http_conditions(code: Code, status: int) -> None:
    assert code.http_status == status
    assert 1 <= code.grpc_code <= 16


def test_no_member_is_another_names_alias() -> None:
    assert len(Code.__members__) == len(list(Code))


@pytest.mark.parametrize(
    ("error", "status", "field"),
    [
        (WireError("why", field="X-Meshnet-Shape"), 400, "X-Meshnet-Shape"),
        (ConfigError("why", field="MESHNET_LOG"), 400, "MESHNET_LOG"),
        (PositionError("why", expected=3), 409, "X-Meshnet-Position"),
        (UnknownSessionError("why"), 404, "X-Meshnet-Session"),
        (CacheFullError("why"), 429, None),
        (NextHopError("why", failed_node="b"), 502, None),
        (NextHopError("why", failed_node="b", timed_out=True), 504, None),
        (RouteError(Code.UNAVAILABLE, "why"), 503, None),
        (LeaseExpiredError("why"), 404, "lease_id"),
    ],
)
def test_errors_say_what_and_where(error: MeshError, status: int, field: str | None) -> None:
    assert isinstance(error, MeshError)
    assert str(error) == error.message == "why"
    assert error.code.http_status == status
    assert error.field == field
