"""Random requests: both faces see the same one, and give the same answer or the same error."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from meshnet.v1 import node_service_pb2 as node_pb
from meshnet.v1 import route_service_pb2 as route_pb
from tests.control.test_faces import MODEL, ask_grpc, steady

NAMES = st.sampled_from(["nodes/left", "nodes/right", "nodes/none", "left", "nodes/A B", ""])
TEXTS = st.one_of(
    st.sampled_from([MODEL, "models/acme/none", "models/", "eu", "zstd", "x" * 300, ""]),
    NAMES,
    st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12),
)
INTEGERS = {
    FieldDescriptor.TYPE_INT32: st.integers(-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_UINT32: st.integers(0, (1 << 32) - 1),
    FieldDescriptor.TYPE_INT64: st.integers(-(1 << 63), (1 << 63) - 1).map(str),
    FieldDescriptor.TYPE_UINT64: st.integers(0, (1 << 64) - 1).map(str),
}


def values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Give ProtoJSON values of one field, sensible ones among them."""
    if field.message_type is not None and field.message_type.full_name.endswith("Duration"):
        one = st.integers(-5, 100_000).map(lambda seconds: f"{seconds}s")
    elif field.message_type is not None and field.message_type.full_name.endswith("Timestamp"):
        one = st.just("2030-01-01T00:00:00Z")
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        one = messages(field.message_type)
    elif field.type == FieldDescriptor.TYPE_ENUM:
        one = st.sampled_from([value.name for value in field.enum_type.values])
    elif field.type == FieldDescriptor.TYPE_BOOL:
        one = st.booleans()
    elif field.type == FieldDescriptor.TYPE_DOUBLE:
        one = st.floats(allow_nan=False, allow_infinity=False)
    elif field.type == FieldDescriptor.TYPE_FLOAT:
        one = st.floats(allow_nan=False, allow_infinity=False, width=32)
    elif field.type == FieldDescriptor.TYPE_BYTES:
        one = st.binary(max_size=9).map(lambda raw: base64.b64encode(raw).decode())
    elif field.type in INTEGERS:
        one = st.one_of(st.just(0 if "32" in str(field.type) else 1), INTEGERS[field.type])
    else:
        one = TEXTS
    return st.lists(one, max_size=3) if field.is_repeated else one


def messages(descriptor: Descriptor, leave_out: tuple[str, ...] = ()) -> st.SearchStrategy[Any]:
    """Give messages as ProtoJSON objects with any of their fields."""
    fields = {
        field.json_name: values(field) for field in descriptor.fields if field.name not in leave_out
    }
    return st.fixed_dictionaries({}, optional=fields)


def without_cost(value: Any) -> Any:
    """Leave out costs: each selection makes the nodes that it took a little dearer."""
    if isinstance(value, dict):
        return {key: without_cost(item) for key, item in value.items() if key != "cost"}
    return [without_cost(item) for item in value] if isinstance(value, list) else value


async def check(mesh, method: str, request: dict[str, Any], path: str, body: Any) -> None:
    code, by_grpc = await ask_grpc(mesh.addresses.grpc, method, request)
    status, by_json = await mesh.json("POST", path, json=body)
    assert without_cost(steady(by_json)) == without_cost(steady(by_grpc))
    assert (status == 200) == (code == 0)


@pytest.fixture
async def pair(start_mesh):
    mesh = await start_mesh()
    await mesh.join("left", (0, 4), port=7081, model=MODEL)
    await mesh.join("right", (4, 8), port=7082, model=MODEL)
    return mesh


EXAMPLES = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@EXAMPLES
@given(request_json=messages(route_pb.SelectRouteRequest.DESCRIPTOR))
async def test_any_route_request(pair, request_json):
    method = "meshnet.v1.RouteService/SelectRoute"
    await check(pair, method, request_json, "/v1/routes:select", request_json)


@EXAMPLES
@given(body=messages(node_pb.HeartbeatRequest.DESCRIPTOR, ("name",)))
async def test_any_heartbeat(pair, body):
    request = {"name": "nodes/left", **body}
    method = "meshnet.v1.NodeService/Heartbeat"
    await check(pair, method, request, "/v1/nodes/left:heartbeat", body)


@EXAMPLES
@given(body=messages(node_pb.DrainNodeRequest.DESCRIPTOR, ("name",)))
async def test_any_drain_of_a_node_that_is_not_there(pair, body):
    request = {"name": "nodes/none", **body}
    method = "meshnet.v1.NodeService/DrainNode"
    await check(pair, method, request, "/v1/nodes/none:drain", body)
