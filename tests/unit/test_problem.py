"""Errors as problem details and back; whatever else a proxy may answer."""

from __future__ import annotations

import json

import pytest

from meshnet.errors import (
    CacheFullError,
    Code,
    MeshError,
    NextHopError,
    PositionError,
    UnknownSessionError,
    WireError,
)
from meshnet.problem import PROBLEM_JSON, pack_problem, unpack_problem

ERRORS: list[MeshError] = [
    WireError("bad shape", field="X-Meshnet-Shape"),
    WireError("too long", field="X-Meshnet-Shape", code=Code.TOO_LARGE),
    WireError("not octets", field="Content-Type", code=Code.UNSUPPORTED_MEDIA_TYPE),
    PositionError("gap", expected=128),
    PositionError("gap", expected=0),
    UnknownSessionError("unknown"),
    CacheFullError("full", retry_after_s=3.0),
    NextHopError("refused", failed_node="gamma"),
    NextHopError("late", failed_node="gamma", timed_out=True),
    MeshError(Code.UNAVAILABLE, "draining", reason="DRAINING", retry_after_s=5.0),
    MeshError(Code.UNAUTHENTICATED, "no key", field="Authorization", reason="KEY_MISSING"),
    MeshError(Code.ABORTED, "stale", reason="ROUTE_STALE"),
    MeshError(Code.FAILED_PRECONDITION, "recurrent", reason="CACHE_NOT_TRUNCATABLE"),
    MeshError(Code.INTERNAL, "sorry"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__}-{error}")
def test_round_trip(error: MeshError) -> None:
    status, headers, body = pack_problem(error)
    back = unpack_problem(status, headers, body)

    assert status == error.code.http_status
    assert type(back) is type(error)
    assert vars(back) == vars(error)


@pytest.mark.parametrize("code", Code)
def test_every_code_survives(code: Code) -> None:
    status, headers, body = pack_problem(MeshError(code, "why"))

    assert unpack_problem(status, headers, body).code is code


def test_members_and_fields() -> None:
    status, headers, body = pack_problem(PositionError("gap", expected=128))

    assert status == 409
    assert headers == [
        ("Content-Type", PROBLEM_JSON),
        ("X-Meshnet-Wire-Version", "2"),
        ("X-Meshnet-Expected-Position", "128"),
    ]
    assert json.loads(body) == {
        "status": 409,
        "code": "ABORTED",
        "detail": "gap",
        "field": "X-Meshnet-Position",
        "reason": "POSITION_GAP",
        "expected_position": 128,
    }


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (MeshError(Code.UNAVAILABLE, "x", retry_after_s=0.2), "1"),
        (MeshError(Code.UNAVAILABLE, "x", retry_after_s=2.1), "3"),
        (MeshError(Code.UNAVAILABLE, "x"), "1"),
        (MeshError(Code.RESOURCE_EXHAUSTED, "x"), "1"),
        (MeshError(Code.INTERNAL, "x"), None),
    ],
)
def test_retry_after(error: MeshError, expected: str | None) -> None:
    assert dict(pack_problem(error)[1]).get("Retry-After") == expected


@pytest.mark.parametrize("failed", ["a\r\nX-Evil: 1", "", "é", "a" * 256, "a\tb"])
def test_a_failed_node_unfit_for_a_header_is_not_handed_on(failed: str) -> None:
    error = unpack_problem(502, [("X-Meshnet-Failed-Node", failed)], b"")

    assert not isinstance(error, NextHopError)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"3",
        b"{",
        b'{"detail": null}',
        b'{"detail": {"a": 1}, "field": [1], "code": {}, "reason": 7}',
        b'{"code": "NOT_FOUND"}',
        b"[" * 100_000,
        b"1" * 10_000,
        b'{"a": 1' + b"0" * 10_000 + b"}",
    ],
)
@pytest.mark.parametrize("status", [400, 404, 409, 418, 429, 499, 500, 502, 503, 504, 599])
def test_anything_gives_an_error(status: int, body: bytes) -> None:
    headers = [
        ("Retry-After", "Wed, 21 Oct 2026 07:28:00 GMT"),
        ("X-Meshnet-Expected-Position", "-1"),
    ]

    error = unpack_problem(status, headers, body)

    assert isinstance(error, MeshError)
    assert error.message
    assert error.retry_after_s is None
    assert (error.code.http_status < 500) == (status < 500)


def test_long_detail_is_cut() -> None:
    body = json.dumps({"detail": "x" * 100_000}).encode()

    assert len(unpack_problem(500, [], body).message) == 2000
