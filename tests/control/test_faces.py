"""One request through gRPC and through JSON: the same answer and the same error."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from google.rpc import status_pb2

from meshnet.control.status import DETAILS_KEY
from meshnet.v1 import node_service_pb2 as node_pb
from meshnet.v1 import route_service_pb2 as route_pb

MODEL = "models/acme/tiny"
NODE = {
    "incarnation": "9007199254740993",
    "endpoints": [{"uri": "http://127.0.0.1:7080/forward"}],
    "shards": [
        {
            "model": MODEL,
            "modelDigest": "d1",
            "layers": {"start": 0, "end": 8},
            "layerCount": 8,
            "embedding": True,
            "lmHead": True,
        }
    ],
}


def node(**changes: Any) -> dict[str, Any]:
    return {**NODE, **changes}


def sharded(**changes: Any) -> dict[str, Any]:
    return node(shards=[{**NODE["shards"][0], **changes}])


# gRPC method, its request as JSON, and the same request as the JSON face takes it
Register = "meshnet.v1.NodeService/RegisterNode"
CASES = [
    (Register, {"nodeId": "a", "node": NODE}, ("POST", "/v1/nodes?node_id=a", NODE)),
    (
        Register,
        {"nodeId": "a", "node": NODE, "requestedTtl": "2.5s"},
        ("POST", "/v1/nodes?nodeId=a&requestedTtl=2.5s", NODE),
    ),
    (Register, {"node": NODE}, ("POST", "/v1/nodes", NODE)),
    (Register, {"nodeId": "a"}, ("POST", "/v1/nodes?node_id=a", None)),
    *(
        (Register, {"nodeId": "a", "node": bad}, ("POST", "/v1/nodes?node_id=a", bad))
        for bad in (
            node(incarnation=0),
            node(endpoints=[]),
            node(endpoints=[{"uri": "ftp://x"}]),
            node(endpoints=[{"uri": "http://u@x:1/forward"}]),
            node(endpoints=[{"uri": "http://x:99999/forward"}]),
            node(name="nodes/b"),
            node(weight=10_001),
            sharded(model="acme/tiny"),
            sharded(model="models/"),
            sharded(layers={"start": 4, "end": 4}),
            sharded(layers={"start": 0, "end": 9}),
            sharded(layerCount=4_000_000_000, layers={"start": 0, "end": 4_000_000_000}),
            sharded(layers={"start": 1, "end": 8}),
            sharded(modelDigest=""),
            node(shards=NODE["shards"] * 2),
        )
    ),
    (
        "meshnet.v1.NodeService/Heartbeat",
        {"name": "nodes/none", "leaseId": "x", "incarnation": "1"},
        ("POST", "/v1/nodes/none:heartbeat", {"leaseId": "x", "incarnation": 1}),
    ),
    (
        "meshnet.v1.NodeService/GetNode",
        {"name": "nodes/none"},
        ("GET", "/v1/nodes/none", None),
    ),
    (
        "meshnet.v1.NodeService/GetNode",
        {"name": "nodes/Rack_1"},
        ("GET", "/v1/nodes/Rack_1", None),
    ),
    (
        "meshnet.v1.NodeService/ListNodes",
        {"pageSize": 1, "states": ["NODE_STATE_READY"], "model": MODEL},
        ("GET", f"/v1/nodes?pageSize=1&states=NODE_STATE_READY&model={MODEL}", None),
    ),
    (
        "meshnet.v1.NodeService/ListNodes",
        {"pageToken": "bm9wZQ"},
        ("GET", "/v1/nodes?page_token=bm9wZQ", None),
    ),
    ("meshnet.v1.NodeService/ListNodes", {"pageSize": -1}, ("GET", "/v1/nodes?page_size=-1", None)),
    (
        "meshnet.v1.NodeService/UpdateNode",
        {"node": {"name": "nodes/x", "weight": 5}, "updateMask": "state"},
        ("PATCH", "/v1/nodes/x?update_mask=state", {"weight": 5}),
    ),
    (
        "meshnet.v1.NodeService/DrainNode",
        {"name": "nodes/x", "gracePeriod": "-1s"},
        ("POST", "/v1/nodes/x:drain", {"gracePeriod": "-1s"}),
    ),
    (
        "meshnet.v1.NodeService/DeregisterNode",
        {"name": "nodes/none"},
        ("DELETE", "/v1/nodes/none", None),
    ),
    (
        "meshnet.v1.NodeService/DeregisterNode",
        {"name": "nodes/none", "allowMissing": True},
        ("DELETE", "/v1/nodes/none?allow_missing=true", None),
    ),
    (
        "meshnet.v1.RouteService/SelectRoute",
        {"model": "models/none"},
        ("POST", "/v1/routes:select", {"model": "models/none"}),
    ),
    ("meshnet.v1.RouteService/SelectRoute", {}, ("POST", "/v1/routes:select", {})),
    (
        "meshnet.v1.RouteService/SelectRoute",
        {"model": MODEL, "maxRoutes": 9},
        ("POST", "/v1/routes:select", {"model": MODEL, "max_routes": 9}),
    ),
    (
        "meshnet.v1.RouteService/SelectRoute",
        {"model": MODEL, "preferBorders": [4, 2]},
        ("POST", "/v1/routes:select", {"model": MODEL, "prefer_borders": [4, 2]}),
    ),
    (
        "meshnet.v1.RouteService/SelectRoute",
        {"model": MODEL, "preferBorders": [0, 2]},
        ("POST", "/v1/routes:select", {"model": MODEL, "prefer_borders": [0, 2]}),
    ),
    (
        "meshnet.v1.RouteService/SelectRoute",
        {"model": MODEL, "wireVersions": list(range(17))},
        ("POST", "/v1/routes:select", {"model": MODEL, "wire_versions": list(range(17))}),
    ),
    (
        "meshnet.v1.RouteService/SelectRoute",
        {"model": MODEL, "routeClass": 7},
        ("POST", "/v1/routes:select", {"model": MODEL, "route_class": 7}),
    ),
    (
        "meshnet.v1.NodeService/Heartbeat",
        {"name": "nodes/a", "leaseId": "x", "incarnation": "1", "load": {"links": [{}]}},
        (
            "POST",
            "/v1/nodes/a:heartbeat",
            {"leaseId": "x", "incarnation": 1, "load": {"links": [{}]}},
        ),
    ),
    (
        "meshnet.v1.RouteService/SelectRoute",
        {"model": MODEL, "excludeNodes": ["nodes/a", "b"]},
        ("POST", "/v1/routes:select", {"model": MODEL, "excludeNodes": ["nodes/a", "b"]}),
    ),
    (
        "meshnet.v1.RouteService/GetModel",
        {"name": "models/acme/none"},
        ("GET", "/v1/models/acme/none", None),
    ),
    ("meshnet.v1.RouteService/ListModels", {}, ("GET", "/v1/models", None)),
]
CHANGING = ("etag", "revision", "createTime", "heartbeatTime", "leaseId")


def steady(value: Any) -> Any:
    """Leave out what differs from one registration to the next."""
    if isinstance(value, dict):
        return {key: steady(item) for key, item in value.items() if key not in CHANGING}
    return [steady(item) for item in value] if isinstance(value, list) else value


def grpc_shape(method: str) -> tuple[Any, Any]:
    service, name = method.rsplit("/", 1)
    module = node_pb if service.endswith("NodeService") else route_pb
    return getattr(module, f"{name}Request"), getattr(module, f"{name}Response")


async def ask_grpc(target: str, method: str, request: Any) -> tuple[int, Any]:
    """Call through gRPC; gives the status code and the answer (or the Status) as JSON."""
    kind, answer = grpc_shape(method)
    message = json_format.ParseDict(request, kind())
    async with grpc.aio.insecure_channel(target) as channel:
        call = channel.unary_unary(
            f"/{method}",
            request_serializer=kind.SerializeToString,
            response_deserializer=answer.FromString,
        )(message, timeout=5)
        code, text = (await call.code()).value[0], await call.details()
        if code != 0:
            details = dict(await call.trailing_metadata())[DETAILS_KEY]
            status = status_pb2.Status.FromString(details)
            assert (status.code, status.message) == (code, text)
            return code, json_format.MessageToDict(status)
        response = await call
    return 0, json_format.MessageToDict(response, always_print_fields_with_no_presence=True)


@pytest.mark.parametrize(("method", "request_json", "http"), CASES)
async def test_both_faces_give_the_same_answer(start_mesh, method, request_json, http):
    one, other = await start_mesh(), await start_mesh()
    code, by_grpc = await ask_grpc(one.addresses.grpc, method, request_json)
    verb, path, body = http
    status, by_json = await other.json(verb, path, **({} if body is None else {"json": body}))
    assert steady(by_json) == steady(by_grpc)
    assert (status == 200) == (code == 0)
    if code != 0:
        assert by_json["code"] == code
        assert "Traceback" not in json.dumps(by_json)


def violations(status: dict[str, Any]) -> list[str]:
    return [
        violation["field"]
        for detail in status["details"]
        for violation in detail.get("fieldViolations", ())
    ]


def reasons(status: dict[str, Any]) -> list[str]:
    return [detail["reason"] for detail in status["details"] if "reason" in detail]


@pytest.mark.parametrize("node_id", ["rack%2F1%20%2B%C3%A9", "%2523", "A", "-a", "9", "a" * 64, ""])
async def test_c1_a_bad_node_id_is_refused_by_name(mesh, node_id):
    status, body = await mesh.json("POST", f"/v1/nodes?node_id={node_id}", json=NODE)
    assert (status, violations(body)) == (400, ["node_id"])
    if node_id:
        status, body = await mesh.json("GET", f"/v1/nodes/{node_id}")
        assert (status, violations(body)) == (400, ["name"])


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("models/rack/1 +é", "models/rack/1%20%2B%C3%A9"),
        ("models/%23", "models/%2523"),
        ("models/llama3:8b", "models/llama3%3A8b"),
        ("models/llama3:8b", "models/llama3:8b"),
    ],
)
async def test_c1_a_model_name_is_decoded_once(mesh, model, path):
    body = sharded(model=model)
    assert (await mesh.json("POST", "/v1/nodes?node_id=a", json=body))[0] == 200
    status, answer = await mesh.json("GET", f"/v1/{path}")
    assert (status, answer["model"]["name"]) == (200, model)


async def test_c3_a_64_bit_integer_survives_as_a_string(mesh):
    for value in ("9007199254740993", 9007199254740993):
        status, body = await mesh.json("POST", "/v1/nodes?node_id=a", json=node(incarnation=value))
        assert status == 200
        assert body["node"]["incarnation"] == "9007199254740993"
    assert (await mesh.client.get_node("a")).incarnation == 9007199254740993


@pytest.mark.parametrize("value", [1.5, 2**32, -1, True, "x", "1_0", " 1", [], {}])
async def test_c3_what_is_no_integer_of_32_bits_is_refused(mesh, value):
    bad = sharded(layers={"start": value, "end": 8})
    status, body = await mesh.json("POST", "/v1/nodes?node_id=a", json=bad)
    assert (status, violations(body)) == (400, ["node.shards[0].layers.start"])


async def test_c5_a_misspelt_field_is_refused_by_name(mesh):
    bad = sharded(start_layr=3)
    status, body = await mesh.json("POST", "/v1/nodes?node_id=a", json=bad)
    assert (status, violations(body)) == (400, ["node.shards[0].start_layr"])
    status, body = await mesh.json("POST", "/v1/nodes?node_id=a", json={"start_layr": 3})
    assert (status, violations(body)) == (400, ["node.start_layr"])


async def test_c5_an_unknown_field_number_is_ignored(mesh):
    request = json_format.ParseDict({"nodeId": "a", "node": NODE}, node_pb.RegisterNodeRequest())
    raw = request.SerializeToString() + b"\xba\x3e\x01x"  # field 999, one byte
    async with grpc.aio.insecure_channel(mesh.addresses.grpc) as channel:
        call = channel.unary_unary(f"/{Register}")
        response = node_pb.RegisterNodeResponse.FromString(await call(raw, timeout=5))
    assert response.node.name == "nodes/a"


async def test_two_spellings_of_one_field_are_refused(mesh):
    bad = sharded(model_digest="d2")
    status, body = await mesh.json("POST", "/v1/nodes?node_id=a", json=bad)
    assert (status, violations(body)) == (400, ["node.shards[0].model_digest"])


async def test_a_field_that_the_server_sets_is_not_taken_from_the_caller(mesh):
    status, body = await mesh.json(
        "POST", "/v1/nodes?node_id=a", json=node(state="NODE_STATE_READY", etag="mine")
    )
    assert (status, body["node"]["state"]) == (200, "NODE_STATE_JOINING")
    assert body["node"]["etag"] != "mine"
