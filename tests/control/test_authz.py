"""The table of who may call what: every method has a row, and rows hold what they say."""

from __future__ import annotations

import asyncio

import pytest

from meshnet.control.authz import RULES, check_caller, check_request
from meshnet.control.caller import acting, current_caller
from meshnet.control.stubs import SERVICES
from meshnet.errors import Code, MeshError
from meshnet.identity import Identity, Role
from meshnet.v1 import node_service_pb2 as nodes_pb2
from meshnet.v1 import route_service_pb2 as routes_pb2

NODES = "/meshnet.v1.NodeService/"
ROUTES = "/meshnet.v1.RouteService/"
NODE = Identity(Role.NODE, "node-1")
GATEWAY = Identity(Role.GATEWAY, "front")
READ, OPERATE, ADMIN = (Identity(role, "ann") for role in (Role.READ, Role.OPERATE, Role.ADMIN))
CONTROL = Identity(Role.CONTROL, "one")
EVERYBODY = (NODE, GATEWAY, READ, OPERATE, ADMIN, CONTROL)


def test_every_method_has_its_row() -> None:
    methods = {f"/{s.full_name}/{m.name}" for s in SERVICES for m in s.methods}
    assert methods <= RULES.keys()


@pytest.mark.parametrize("method", sorted(RULES))
def test_nobody_without_credentials_but_where_there_are_no_roles(method: str) -> None:
    if not RULES[method].roles:
        check_caller(method, None)
        return
    with pytest.raises(MeshError, match="needs credentials") as caught:
        check_caller(method, None)
    assert caught.value.code is Code.UNAUTHENTICATED
    assert caught.value.reason == "CREDENTIALS_MISSING"


@pytest.mark.parametrize(
    ("method", "request_", "may"),
    [
        (NODES + "RegisterNode", nodes_pb2.RegisterNodeRequest(node_id="node-1"), {NODE}),
        (NODES + "RegisterNode", nodes_pb2.RegisterNodeRequest(node_id="node-2"), set()),
        (NODES + "Heartbeat", nodes_pb2.HeartbeatRequest(name="nodes/node-1"), {NODE}),
        (NODES + "Heartbeat", nodes_pb2.HeartbeatRequest(name="nodes/node-11"), set()),
        (NODES + "Heartbeat", nodes_pb2.HeartbeatRequest(), set()),
        (NODES + "GetNode", nodes_pb2.GetNodeRequest(name="nodes/x"), {*EVERYBODY} - {CONTROL}),
        (NODES + "UpdateNode", nodes_pb2.UpdateNodeRequest(), {OPERATE, ADMIN}),
        (
            NODES + "DrainNode",
            nodes_pb2.DrainNodeRequest(name="nodes/node-1"),
            {NODE, OPERATE, ADMIN},
        ),
        (NODES + "DrainNode", nodes_pb2.DrainNodeRequest(name="nodes/b"), {OPERATE, ADMIN}),
        (
            NODES + "DeregisterNode",
            nodes_pb2.DeregisterNodeRequest(name="nodes/b"),
            {OPERATE, ADMIN},
        ),
        (ROUTES + "SelectRoute", routes_pb2.SelectRouteRequest(), {GATEWAY}),
        (
            ROUTES + "SelectRoute",
            routes_pb2.SelectRouteRequest(explain=True),
            {GATEWAY, READ, OPERATE, ADMIN},
        ),
        ("/metrics", None, {READ, OPERATE, ADMIN}),
        ("/healthz", None, {*EVERYBODY}),
        ("/meshnet.v1.NodeService/Nothing", None, set()),
    ],
)
def test_rows(method: str, request_: object, may: set[Identity]) -> None:
    for caller in EVERYBODY:
        if caller in may:
            check_request(method, caller, request_)
            continue
        with pytest.raises(MeshError) as caught:
            check_request(method, caller, request_)
        assert caught.value.code is Code.PERMISSION_DENIED
        speaks_for_another = method in RULES and RULES[method].own and caller is NODE
        assert caught.value.reason == ("NOT_OWN_NAME" if speaks_for_another else "ROLE_NOT_ALLOWED")


async def test_the_caller_is_known_in_its_call_alone() -> None:
    async def seen() -> Identity | None:
        return current_caller()

    assert current_caller() is None
    with acting(NODE):
        assert await asyncio.create_task(seen()) == NODE
        with acting(None):
            assert current_caller() is None
        assert current_caller() == NODE
    assert current_caller() is None
