"""Calls of the control plane that callers make who may not, as on either face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from google.protobuf import json_format

from meshnet.certificates import make_csr, make_key
from tests.adversary.mesh import MODEL, Call
from tests.control.conftest import make_node

__all__ = ["CALLS", "GRPC_CODES"]

GRPC_CODES: Final[Mapping[int, int]] = {401: 16, 403: 7, 409: 6, 400: 3, 404: 5}
"""The number of the gRPC code that stands for an HTTP status."""

_NODE: Final = json_format.MessageToDict(
    make_node((1, 2), count=2, port=6666, incarnation=99, model=MODEL, digest="stub")
)
_BEAT: Final = {"leaseId": "x", "incarnation": "99"}
_SELECT: Final = {"model": MODEL, "sessionId": "8d7f2f0a-5c1e-4b7a-9a53-0d7c6f1e2b34"}
_CSR: Final = {"csrPem": make_csr(make_key())}
_TOKEN: Final = {"role": "ROLE_ADMIN"}
_OPERATOR: Final = {"name": "operators/mallory", "role": "ROLE_ADMIN"}


def _posting(method: str, path: str, body: Mapping[str, Any], **more: Any) -> Call:
    return Call(method, {**more, **body}, ("POST", path), dict(body))


CALLS: Final[Mapping[str, Call]] = {
    "register": Call(
        "NodeService/RegisterNode",
        {"nodeId": "beta", "node": _NODE},
        ("POST", "/v1/nodes?nodeId=beta"),
        _NODE,
    ),
    "heartbeat": _posting(
        "NodeService/Heartbeat", "/v1/nodes/beta:heartbeat", _BEAT, name="nodes/beta"
    ),
    "drain": _posting("NodeService/DrainNode", "/v1/nodes/beta:drain", {}, name="nodes/beta"),
    "deregister": Call(
        "NodeService/DeregisterNode", {"name": "nodes/beta"}, ("DELETE", "/v1/nodes/beta")
    ),
    "update": Call(
        "NodeService/UpdateNode",
        {"node": {"name": "nodes/beta", "cordoned": True}, "updateMask": "cordoned"},
        ("PATCH", "/v1/nodes/beta?updateMask=cordoned"),
        {"cordoned": True},
    ),
    "select a route": _posting("RouteService/SelectRoute", "/v1/routes:select", _SELECT),
    "grant a route": _posting(
        "RouteService/GrantRoute",
        "/v1/routes:grant",
        {**_SELECT, "hops": [{"node": "nodes/beta", "layers": {"end": 2}}]},
    ),
    "renew": _posting("EnrollmentService/RenewCertificate", "/v1/members:renewCertificate", _CSR),
    "make a join token": Call(
        "EnrollmentService/CreateJoinToken",
        {"joinToken": _TOKEN},
        ("POST", "/v1/joinTokens"),
        _TOKEN,
    ),
    "list join tokens": Call("EnrollmentService/ListJoinTokens", {}, ("GET", "/v1/joinTokens")),
    "delete a join token": Call(
        "EnrollmentService/DeleteJoinToken",
        {"name": "joinTokens/abcdefghij"},
        ("DELETE", "/v1/joinTokens/abcdefghij"),
    ),
    "list members": Call("EnrollmentService/ListMembers", {}, ("GET", "/v1/members")),
    "remove a member": Call(
        "EnrollmentService/DeleteMember",
        {"name": "members/node.beta"},
        ("DELETE", "/v1/members/node.beta"),
    ),
    "make an operator": Call(
        "OperatorService/CreateOperator",
        {"operator": _OPERATOR},
        ("POST", "/v1/operators"),
        _OPERATOR,
    ),
    "list operators": Call("OperatorService/ListOperators", {}, ("GET", "/v1/operators")),
    "revoke an operator": _posting(
        "OperatorService/RevokeOperator", "/v1/operators/ann:revoke", {}, name="operators/ann"
    ),
    "delete a reference": Call(
        "ReferenceService/DeleteReference",
        {"name": "references/stub"},
        ("DELETE", "/v1/references/stub"),
    ),
}
