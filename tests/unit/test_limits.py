"""Limits that an operator changes, and nesting of JSON."""

from __future__ import annotations

import json

import pytest

from meshnet.control.limits import DEFAULT_LIMITS as CONTROL
from meshnet.control.limits import ControlLimits
from meshnet.errors import ConfigError
from meshnet.jsontext import check_nesting
from meshnet.limits import change_limits
from meshnet.plane.handler import PlaneLimits
from meshnet.wire import DEFAULT_LIMITS as WIRE


def test_each_group_takes_what_is_its_own() -> None:
    plane, wire = change_limits(
        ["max_chunk_bytes=1024", "read_timeout_s=2", "max_connections=7"], PlaneLimits(), WIRE
    )
    assert (wire.max_chunk_bytes, plane.read_timeout_s, plane.max_connections) == (1024, 2.0, 7)
    assert isinstance(plane.read_timeout_s, float)
    assert plane.max_header_count == PlaneLimits().max_header_count
    assert change_limits([], CONTROL) == [CONTROL]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("max_conections=7", "NAME=NUMBER with one of body_timeout_s"),
        ("max_connections", "expected a number"),
        ("max_connections=many", "expected a number"),
        ("max_connections=1.5", "expected a number"),
        ("max_connections=0", "expected 1 to 2147483647"),
        ("max_message_bytes=2147483648", "expected 1 to 2147483647"),
        ("max_streams=" + "9" * 400, "max_streams=9999"),
        ("max_metadata_bytes=" + "9" * 5000, "expected a number"),
        ("head_timeout_s=-1", "expected 0.001 to 2147483"),
        ("head_timeout_s=inf", "expected 0.001 to 2147483"),
        ("head_timeout_s=nan", "expected 0.001 to 2147483"),
        ("grpc_idle_timeout_s=1e8", "expected 0.001 to 2147483"),
    ],
)
def test_what_is_no_limit_is_named(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        change_limits([text], CONTROL)


def test_limits_are_checked_however_they_are_made() -> None:
    for limits in ({"max_streams": 0}, {"max_message_bytes": 1 << 40}, {"idle_timeout_s": 1e300}):
        with pytest.raises(ConfigError) as caught:
            ControlLimits(**limits)
        assert caught.value.field in limits


DEEP = "[" * 64 + "]" * 64


@pytest.mark.parametrize(
    "text",
    [
        DEEP,
        json.dumps({"a": "[" * 1000 + '\\"{' * 1000}),
        "[" + ",".join(["[]"] * 1000) + "]",
        "",
        "]" * 1000,
    ],
)
def test_nesting_within_bounds(text: str) -> None:
    check_nesting(text.encode())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" + DEEP + "]", "nested too deeply; expected at most 64 levels"),
        ('{"a":' * 65 + "1" + "}" * 65, "nested too deeply"),
        ("[" + "[]," * 2000 + "1]", "2001 arrays and objects; expected at most 2000"),
    ],
)
def test_nesting_past_them(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_nesting(text.encode(), max_containers=2000)
