"""Who was somebody in the mesh and is not any more, or may only look."""

from __future__ import annotations

import asyncio
import time
import uuid
from pathlib import Path

import pytest

from meshnet.authority import Authority
from meshnet.certificates import make_csr
from meshnet.control.joining import join
from meshnet.credentials import Credentials
from meshnet.errors import MeshError
from meshnet.identity import Identity, Role
from meshnet.join import parse_join_text
from meshnet.membership import MembershipFolder
from tests.adversary.calls import CALLS, GRPC_CODES
from tests.adversary.mesh import BOUND_S, FACES, UNHEARD, Call, Mesh, Said, end_of, reason_of
from tests.control.secured import make_credentials

WRITES = [name for name in CALLS if not name.startswith("list") and name != "renew"]
DAY_S = 24 * 3600


def refusal(face: str, status: int, reason: str) -> Said:
    return Said(GRPC_CODES[status] if face == "grpc" else status, reason)


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("what", WRITES)
async def test_who_may_read_changes_nothing(mesh: Mesh, what: str, face: str) -> None:
    async with mesh.unharmed():
        said = await CALLS[what].on(face, mesh, mesh.certified(Role.READ))
        assert said == refusal(face, 403, "ROLE_NOT_ALLOWED")


@pytest.fixture(scope="module")
def revoked() -> list[tuple[str, Credentials]]:
    """Token and certificate of an operator who was revoked; made once."""
    return []


async def revoke(mesh: Mesh, kept: list[tuple[str, Credentials]]) -> tuple[str, Credentials]:
    if not kept:
        admin, name = mesh.admin, "former"
        body = {"name": f"operators/{name}", "role": "ROLE_ADMIN"}
        status, made = await mesh.ask_json("POST", "/v1/operators", admin, body)
        assert status == 200, made
        own = mesh.certified(Role.ADMIN, name)
        assert (await mesh.ask_json("GET", "/v1/members", own))[0] == 200
        status, _ = await mesh.ask_json("POST", f"/v1/operators/{name}:revoke", admin, {})
        assert status == 200
        kept.append((made["token"], own))
    return kept[0]


async def test_a_revoked_token_opens_nothing(
    mesh: Mesh, revoked: list[tuple[str, Credentials]]
) -> None:
    token, _ = await revoke(mesh, revoked)
    async with mesh.unharmed():
        for call in CALLS.values():
            bearer = {"Authorization": f"Bearer {token}"}
            status, answer = await mesh.ask_json(*call.http, None, call.body, bearer)
            assert Said(status, reason_of(answer)) == Said(401, "OPERATOR_REVOKED"), call.method


@pytest.mark.parametrize("face", FACES)
async def test_a_certificate_of_a_revoked_operator_opens_nothing(
    mesh: Mesh, revoked: list[tuple[str, Credentials]], face: str
) -> None:
    _, own = await revoke(mesh, revoked)
    async with mesh.unharmed():
        for call in CALLS.values():
            said = await call.on(face, mesh, own)
            assert said == refusal(face, 401, "OPERATOR_REVOKED"), call.method


async def test_at_nodes_a_revoked_operator_sees_figures_until_the_certificate_ends(
    mesh: Mesh, revoked: list[tuple[str, Credentials]]
) -> None:
    """Nodes do not ask who was revoked: that is what holds, and until when."""
    _, own = await revoke(mesh, revoked)
    async with mesh.unharmed():
        assert (await mesh.ask_plane("alpha", "GET", "/metrics", own))[0] == 200
        for method, path in (("POST", "/forward"), ("DELETE", "/sessions/x"), ("PUT", "/owners/x")):
            status, answer = await mesh.ask_plane("alpha", method, path, own)
            assert Said(status, reason_of(answer)) == Said(403, "ROLE_NOT_ALLOWED")
    assert end_of(own) < time.time() + DAY_S + 60


@pytest.mark.parametrize("face", FACES)
async def test_an_expired_certificate_is_not_heard(mesh: Mesh, tmp_path: Path, face: str) -> None:
    past = Authority(mesh.folder / "state", wall_clock=lambda: time.time() - DAY_S - 3600)
    own = make_credentials(past, Identity(Role.ADMIN, "late"), tmp_path / "late")
    async with mesh.unharmed():
        assert await CALLS["drain"].on(face, mesh, own) == UNHEARD
        with pytest.raises(OSError, match=r"SSL|reset|disconnected|alert"):
            await mesh.ask_plane("alpha", "GET", "/metrics", own)


async def test_a_removed_member_is_none_to_the_control_plane_at_once_and_soon_to_nodes(
    mesh: Mesh, tmp_path: Path
) -> None:
    """Nodes hear of it with their next heartbeat."""
    folder = MembershipFolder(tmp_path / "gone")
    await join(parse_join_text(mesh.node_token), "gone", folder, Role.NODE)
    own = Credentials(folder.files)
    status, _ = await mesh.ask_json("DELETE", "/v1/members/node.gone", mesh.admin)
    assert status == 200
    csr = {"csrPem": make_csr(folder.key())}
    renew = Call(
        "EnrollmentService/RenewCertificate", csr, ("POST", "/v1/members:renewCertificate"), csr
    )
    async with mesh.unharmed():
        for face in FACES:
            for call in (renew, *CALLS.values()):
                said = await call.on(face, mesh, own)
                assert said == refusal(face, 401, "MEMBER_REMOVED"), call.method
        for node in mesh.nodes:
            await refused_by(mesh, node, own)
        for method, path in (
            ("POST", "/forward"),
            ("DELETE", f"/sessions/{uuid.uuid4()}"),
            ("POST", f"/owners/{uuid.uuid4()}"),
        ):
            status, answer = await mesh.ask_plane("alpha", method, path, own)
            assert Said(status, reason_of(answer)) == Said(403, "MEMBER_REMOVED")


async def refused_by(mesh: Mesh, node: str, own: Credentials) -> None:
    """Wait until a node has heard that a member was removed."""
    async with asyncio.timeout(BOUND_S):
        while True:
            status, answer = await mesh.ask_plane(node, "GET", "/metrics", own)
            if status == 403:
                assert reason_of(answer) == "MEMBER_REMOVED"
                return
            assert status == 200, answer
            await asyncio.sleep(0.1)


async def test_a_join_token_gives_no_name_that_another_holds(mesh: Mesh, tmp_path: Path) -> None:
    token = parse_join_text(mesh.node_token)
    for name, role, reason in (
        ("beta", None, "NAME_TAKEN"),
        ("beta", Role.ADMIN, "ROLE_NOT_ADMITTED"),
    ):
        async with mesh.unharmed():
            with pytest.raises(MeshError) as caught:
                await join(token, name, MembershipFolder(tmp_path / name), role)
            assert caught.value.reason == reason
