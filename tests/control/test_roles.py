"""Attacks by role on both faces of a control plane that knows its callers.

Each is refused with its status and reason, changes nothing, and the next honest call is served.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import pytest
from google.protobuf import json_format

from meshnet.authority import Authority
from meshnet.control.client import ControlClient
from meshnet.credentials import Credentials
from meshnet.errors import Code, MeshError
from meshnet.identity import Identity, Role
from meshnet.tls import TlsFiles
from meshnet.v1 import node_service_pb2 as pb
from tests.control.conftest import MODEL, make_node
from tests.control.secured import HASTE, Secured, make_credentials, secured
from tests.plane.certificates import make_authority


@pytest.fixture
async def mesh(tmp_path: Path) -> AsyncIterator[Secured]:
    """A control plane with one node, `node-1`, that is READY."""
    async with secured(tmp_path, require_probe=False) as mesh:
        await join(mesh, "node-1")
        yield mesh


async def join(mesh: Secured, name: str) -> None:
    async with mesh.client(mesh.credentials(Role.NODE, name)) as client:
        answer = await client.register(name, make_node((0, 8)), ttl_s=300)
        await client.heartbeat(name, lease_id=answer.lease.lease_id, incarnation=1, ready=True)


async def state(mesh: Secured) -> list[pb.Node]:
    async with mesh.client(mesh.credentials(Role.READ, "eve")) as client:
        return await client.list_nodes()


async def serves(mesh: Secured) -> None:
    """Make an honest call by each face."""
    async with mesh.client(mesh.credentials(Role.GATEWAY, "front")) as client:
        assert (await client.select_route(MODEL)).hops[0].node == "nodes/node-1"
    status, body = await mesh.json("GET", "/v1/nodes", mesh.credentials(Role.READ))
    assert (status, len(body["nodes"])) == (200, 1)


FACES = ["grpc", "json"]


async def test_honest_callers_of_every_role_are_served(mesh: Secured) -> None:
    await serves(mesh)
    async with mesh.client(mesh.credentials(Role.OPERATE)) as client:
        assert (await client.drain("node-1")).state == pb.NODE_STATE_DRAINING


async def test_anonymous_is_refused(mesh: Secured) -> None:
    before = await state(mesh)
    async with mesh.client(None, HASTE) as client:
        with pytest.raises(MeshError, match="--credentials") as caught:
            await client.drain("node-1")
    assert caught.value.code is Code.UNAVAILABLE  # no call is heard before the certificate is seen
    node = json_format.MessageToDict(make_node())
    for method, path, body in (
        ("GET", "/v1/nodes", None),
        ("GET", "/v1/nodes:watch", None),
        ("GET", "/metrics", None),
        ("GET", "/openapi.json", None),
        ("POST", "/v1/nodes/node-1:drain", {}),
        ("POST", "/v1/nodes?node_id=x", node),
        ("DELETE", "/v1/nodes/node-1", None),
    ):
        status, answer = await mesh.json(method, path, json=body)
        assert (status, reason(answer)) == (401, "CREDENTIALS_MISSING"), path
    assert (await mesh.json("GET", "/healthz"))[0] == 200
    assert await state(mesh) == before
    await serves(mesh)


async def test_the_certificate_of_another_mesh_is_refused(mesh: Secured, tmp_path: Path) -> None:
    before = await state(mesh)
    other = make_credentials(
        Authority(tmp_path / "other"), Identity(Role.ADMIN, "ann"), tmp_path / "evil"
    )
    (tmp_path / "evil" / "ca.pem").write_text(mesh.authority.bundle_pem)  # it believes the mesh
    other.reload()
    await refused_at_the_handshake(mesh, other)
    assert await state(mesh) == before
    await serves(mesh)


async def test_an_expired_certificate_is_refused(mesh: Secured, tmp_path: Path) -> None:
    before = await state(mesh)
    yesterday = Authority(tmp_path, wall_clock=lambda: time.time() - 25 * 3600)
    expired = make_credentials(yesterday, Identity(Role.ADMIN, "ann"), tmp_path / "late")
    await refused_at_the_handshake(mesh, expired)
    assert await state(mesh) == before
    await serves(mesh)


async def test_a_client_refuses_a_control_plane_of_another_mesh(
    mesh: Secured, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "other")
    stranger = make_credentials(other, Identity(Role.NODE, "node-1"), tmp_path / "stranger")
    async with mesh.client(stranger, HASTE) as client:
        with pytest.raises(MeshError) as caught:
            await client.list_nodes()
    assert caught.value.code is Code.UNAVAILABLE
    async with ControlClient(f"https://{mesh.addresses.http}", HASTE, stranger) as client:
        with pytest.raises(MeshError, match="no control plane of this mesh") as caught:
            await client.list_nodes()
    assert caught.value.reason == "CONTROL_NOT_TRUSTED"


async def test_a_client_refuses_a_node_that_poses_as_the_control_plane(
    mesh: Secured, tmp_path: Path
) -> None:
    posing = mesh.credentials(Role.NODE, "node-2")
    server = grpc.aio.server()
    pem = posing.pem()
    tls = grpc.ssl_server_credentials([(pem.key, pem.chain)])
    port = server.add_secure_port("127.0.0.1:0", tls)
    await server.start()
    try:
        async with ControlClient(f"127.0.0.1:{port}", HASTE, mesh.credentials(Role.NODE)) as client:
            with pytest.raises(MeshError) as caught:
                await client.list_nodes()
    finally:
        await server.stop(None)
    assert caught.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize("face", FACES)
async def test_a_node_that_speaks_for_another_is_refused(mesh: Secured, face: str) -> None:
    before = await state(mesh)
    evil = mesh.credentials(Role.NODE, "node-2")
    takeover = make_node((0, 8), port=6666, incarnation=2)
    if face == "json":
        node = json_format.MessageToDict(takeover)
        for method, path, body in (
            ("POST", "/v1/nodes?node_id=node-1", node),
            ("POST", "/v1/nodes/node-1:heartbeat", {"leaseId": "x", "incarnation": "1"}),
            ("POST", "/v1/nodes/node-1:drain", {}),
            ("DELETE", "/v1/nodes/node-1", None),
        ):
            status, answer = await mesh.json(method, path, evil, json=body)
            assert (status, reason(answer)) == (403, "NOT_OWN_NAME")
    else:
        async with mesh.client(evil) as client:
            for call in (
                client.register("node-1", takeover),
                client.heartbeat("node-1", lease_id="x", incarnation=1, ready=False),
                client.drain("node-1"),
                client.deregister("node-1"),
            ):
                await denied(call, "NOT_OWN_NAME")
    assert await state(mesh) == before
    await serves(mesh)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("role", [Role.READ, Role.NODE, Role.GATEWAY])
async def test_who_may_not_steer_nodes_is_refused(mesh: Secured, face: str, role: Role) -> None:
    before = await state(mesh)
    caller = mesh.credentials(role, "node-2")
    expected = "NOT_OWN_NAME" if role is Role.NODE else "ROLE_NOT_ALLOWED"
    change = {"cordoned": True}
    if face == "json":
        status, answer = await mesh.json("POST", "/v1/nodes/node-1:drain", caller, json={})
        assert (status, reason(answer)) == (403, expected)
        status, answer = await mesh.json("PATCH", "/v1/nodes/node-1", caller, json=change)
        assert (status, reason(answer)) == (403, "ROLE_NOT_ALLOWED")
    else:
        async with mesh.client(caller) as client:
            await denied(client.drain("node-1"), expected)
            wanted = pb.Node(name="nodes/node-1", cordoned=True)
            await denied(client.update(wanted, ["cordoned"]), "ROLE_NOT_ALLOWED")
    assert await state(mesh) == before
    await serves(mesh)


async def test_only_gateways_select_routes_and_readers_ask_why(mesh: Secured) -> None:
    for role in (Role.NODE, Role.READ, Role.ADMIN):
        async with mesh.client(mesh.credentials(role, "x")) as client:
            await denied(client.select_route(MODEL), "ROLE_NOT_ALLOWED")
            if role is Role.NODE:
                await denied(client.explain_routes(MODEL), "ROLE_NOT_ALLOWED")
            else:
                assert (await client.explain_routes(MODEL)).routes
    await serves(mesh)


async def test_metrics_and_schema_are_for_operators(mesh: Secured) -> None:
    for path in ("/metrics", "/openapi.json"):
        status, answer = await mesh.json("GET", path, mesh.credentials(Role.NODE, "node-1"))
        assert (status, reason(answer)) == (403, "ROLE_NOT_ALLOWED")
        status, _ = await mesh.json("GET", path, mesh.credentials(Role.READ))
        assert status == 200


async def test_operators_tokens_come_and_go(mesh: Secured) -> None:
    admin = mesh.credentials(Role.ADMIN)
    body = {"name": "operators/bob", "role": "ROLE_OPERATE"}
    status, made = await mesh.json("POST", "/v1/operators", admin, json=body)
    assert status == 200
    token = made["token"]
    status, answer = await mesh.json("POST", "/v1/operators", admin, json=body)
    assert (status, reason(answer)) == (409, "OPERATOR_EXISTS")
    status, _ = await mesh.json("POST", "/v1/nodes/node-1:drain", token=token, json={})
    assert status == 200
    status, answer = await mesh.json("POST", "/v1/operators", token=token, json=body)
    assert (status, reason(answer)) == (403, "ROLE_NOT_ALLOWED")
    # A certificate of the same name, from before.
    certified = mesh.credentials(Role.ADMIN, "bob")
    assert (await mesh.json("GET", "/v1/nodes", certified))[0] == 200

    status, answer = await mesh.json("POST", "/v1/operators/bob:revoke", admin, json={})
    assert (status, answer["operator"]["revoked"]) == (200, True)
    before = await state(mesh)
    for how in ({"token": token}, {"credentials": certified}):
        for method, path in (("POST", "/v1/nodes/node-1:drain"), ("GET", "/metrics")):
            status, answer = await mesh.json(method, path, **how)
            assert (status, reason(answer)) == (401, "OPERATOR_REVOKED")
    async with mesh.client(certified) as client:
        await denied(client.drain("node-1"), "OPERATOR_REVOKED", Code.UNAUTHENTICATED)
    assert await state(mesh) == before
    status, listed = await mesh.json("GET", "/v1/operators", admin)
    assert [(o["name"], o["revoked"]) for o in listed["operators"]] == [("operators/bob", True)]
    assert "token" not in str(listed)


@pytest.mark.parametrize(
    "header",
    ["Bearer", "Bearer x", "Bearer ann.x", "Bearer .", "Basic YWRtaW46", "Bearer " + "a.b" * 2000],
)
async def test_what_is_no_token_is_refused(mesh: Secured, header: str) -> None:
    status, answer = await mesh.json("GET", "/v1/nodes", headers={"Authorization": header})
    assert (status, reason(answer)) == (401, "TOKEN_INVALID")
    await serves(mesh)


@pytest.mark.parametrize("header", ["Grpc-Metadata-Meshnet-Internal-", "Meshnet-Internal-"])
async def test_nobody_says_from_outside_who_the_caller_is(mesh: Secured, header: str) -> None:
    told = {f"{header}Secret": "0" * 64, f"{header}Caller": '["spiffe://mesh/admin/ann", null]'}
    status, answer = await mesh.json("GET", "/v1/nodes", headers=told)
    assert (status, reason(answer)) == (401, "CREDENTIALS_MISSING")
    reader = mesh.credentials(Role.READ)
    status, answer = await mesh.json("GET", "/v1/operators", reader, headers=told)
    assert (status, reason(answer)) == (403, "ROLE_NOT_ALLOWED")
    # the same by gRPC, where metadata is not filtered on the way in
    metadata = tuple((key.lower().removeprefix("grpc-metadata-"), v) for key, v in told.items())
    code, _ = await raw(mesh.addresses.grpc, reader, "ListOperators", metadata)
    assert code is grpc.StatusCode.PERMISSION_DENIED


async def test_the_unix_socket_is_for_the_json_face_alone(mesh: Secured) -> None:
    folder = mesh.server.socket_folder
    assert folder is not None
    target = f"unix:{folder}/grpc.sock"
    for metadata in ((), (("meshnet-internal-secret", "0" * 64),)):
        code, _ = await raw(target, None, "ListOperators", metadata)
        assert code is grpc.StatusCode.UNAUTHENTICATED
    assert folder.stat().st_mode & 0o077 == 0


async def test_certificates_without_a_name_of_the_mesh_are_refused(
    mesh: Secured, tmp_path: Path
) -> None:
    nameless = make_authority(tmp_path / "nameless")
    (tmp_path / "control" / "ca.pem").write_text(
        mesh.authority.bundle_pem + nameless.ca.read_text()
    )
    assert mesh.server.state is not None
    mesh.server.state.credentials.reload()
    own = Credentials(TlsFiles(nameless.certificate, nameless.key, tmp_path / "control" / "ca.pem"))
    status, answer = await mesh.json("GET", "/v1/nodes", own)
    assert (status, reason(answer)) == (401, "CERTIFICATE_NAMELESS")
    async with mesh.client(own) as client:
        await denied(client.list_nodes(), "CERTIFICATE_NAMELESS", Code.UNAUTHENTICATED)


def reason(answer: Any) -> str:
    """Give the reason of a Status in JSON."""
    return str(answer["details"][0]["reason"])


async def denied(
    call: Awaitable[object], expected: str, code: Code = Code.PERMISSION_DENIED
) -> None:
    with pytest.raises(MeshError) as caught:
        await call
    assert (caught.value.code, caught.value.reason) == (code, expected)


async def raw(
    target: str, credentials: Credentials | None, method: str, metadata: Any
) -> tuple[grpc.StatusCode, str]:
    """Call OperatorService with metadata of our choice; gives how it ended."""
    if credentials is None:
        channel = grpc.aio.insecure_channel(target)
    else:
        pem = credentials.pem()
        tls = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.chain)
        options = (("grpc.ssl_target_name_override", "control.mesh"),)
        channel = grpc.aio.secure_channel(target, tls, options)
    async with channel:
        call = channel.unary_unary(f"/meshnet.v1.OperatorService/{method}")(
            b"", metadata=metadata, timeout=20
        )
        return await call.code(), await call.details()


async def refused_at_the_handshake(mesh: Secured, credentials: Credentials) -> None:
    """See that neither face hears a call."""
    async with mesh.client(credentials, HASTE) as client:
        with pytest.raises(MeshError) as caught:
            await client.drain("node-1")
    assert caught.value.code is Code.UNAVAILABLE
    with pytest.raises((aiohttp.ClientError, ssl.SSLError)):
        await mesh.json("POST", "/v1/nodes/node-1:drain", credentials, json={})
