"""Joining and renewing over real HTTPS: what is checked before the token is sent, what is kept."""

from __future__ import annotations

import asyncio
import stat
import time
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from cryptography import x509
from google.protobuf import json_format

from meshnet.certificates import spki_sha256
from meshnet.control.caller import acting
from meshnet.control.documents import MemoryDocuments
from meshnet.control.enrolled import Enrolled
from meshnet.control.enrollment_service import EnrollmentService, Enrolment
from meshnet.control.httpmeta import mesh_error_answer
from meshnet.control.joining import join, renew
from meshnet.control.removed_keys import RemovedKeys
from meshnet.control.renewal import Due, Renewal
from meshnet.control.replicas import Reached
from meshnet.control.state import ControlState
from meshnet.credentials import Credentials, peer_identity
from meshnet.errors import Code, ConfigError, MeshError
from meshnet.identity import Identity, Role
from meshnet.join import JoinText
from meshnet.membership import Membership, MembershipFolder
from meshnet.topology import LayerRange
from meshnet.v1 import enrollment_service_pb2 as pb

METHODS = {
    ("POST", "/v1/members:enroll"): ("Enroll", pb.EnrollRequest),
    ("POST", "/v1/members:renewCertificate"): ("RenewCertificate", pb.RenewCertificateRequest),
    ("GET", "/v1/trustBundle"): ("GetTrustBundle", pb.GetTrustBundleRequest),
}


@asynccontextmanager
async def listening(answer, context):
    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    try:
        yield f"127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


class Mesh:
    """EnrollmentService behind HTTPS, as a secured JSON face serves it."""

    def __init__(self, folder, life_s=3600.0) -> None:
        self.state = ControlState(folder, life_s=life_s)
        self.address = ""
        self.asked: list[tuple[str, Identity | None]] = []
        documents = MemoryDocuments()
        enrolment = Enrolment(
            self.state.authority,
            documents,
            self.reached,
            RemovedKeys(documents),
            self.state.follow,
        )
        self.service = EnrollmentService(enrolment)

    async def reached(self):
        return [Reached(self.address, "g:7071")]

    @asynccontextmanager
    async def serving(self):
        context = self.state.credentials.listening(optional=True)
        async with listening(self._answer, context) as self.address:
            self.state.start()
            try:
                yield self
            finally:
                await self.state.close()

    async def token(self, **fields) -> JoinText:
        fields.setdefault("role", pb.ROLE_NODE)
        request = pb.CreateJoinTokenRequest(join_token=pb.JoinToken(**fields))
        answer = await self.service.CreateJoinToken(request, None)
        public, _, secret = answer.token.partition(".")
        return JoinText(public, secret, answer.ca_spki_sha256, tuple(answer.http_addresses))

    async def _answer(self, request):
        caller = peer_identity(request.transport.get_extra_info("ssl_object"))
        self.asked.append((request.path, caller))
        name, kind = METHODS[request.method, request.path]
        body = await request.read()
        try:
            with acting(caller):
                message = json_format.Parse(body or b"{}", kind())
                answer = await getattr(self.service, name)(message, None)
        except MeshError as error:
            number, headers, data = mesh_error_answer(error)
            return web.Response(status=number, headers=headers, body=data)
        return web.json_response(json_format.MessageToDict(answer))


@pytest.fixture
async def mesh(tmp_path):
    async with Mesh(tmp_path / "state").serving() as served:
        yield served


@pytest.fixture
def folder(tmp_path):
    return MembershipFolder(tmp_path / "member")


async def refused(call, code, reason):
    with pytest.raises(MeshError) as caught:
        await call
    assert (caught.value.code, caught.value.reason) == (code, reason), caught.value
    return caught.value


async def test_joining_gives_credentials_and_what_to_serve(mesh, folder):
    token = await mesh.token(model="org/name", layers={"start": 2, "end": 5}, max_uses=1)
    membership = await join(token, "gpu-1", folder)
    assert membership == folder.load()
    assert (membership.model, membership.layers) == ("org/name", LayerRange(2, 5))
    assert membership.control_url == "grpcs://g:7071"
    credentials = Credentials(folder.files)
    assert credentials.identity == Identity(Role.NODE, "gpu-1")
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.path.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    kept = b"".join(path.read_bytes() for path in folder.path.iterdir())
    assert token.secret.encode() not in kept


async def test_a_restart_with_the_same_token_asks_nothing(mesh, folder):
    token = await mesh.token(max_uses=1)
    first = await join(token, "gpu-1", folder)
    asked = len(mesh.asked)
    assert await join(token, "gpu-1", folder) == first
    assert len(mesh.asked) == asked


async def test_after_its_certificate_has_ended_it_joins_again_with_the_same_key(mesh, folder):
    token = await mesh.token(max_uses=1)
    await join(token, "gpu-1", folder)
    key = folder.key().private_numbers()
    later_s = time.time() + 2 * 3600
    await join(token, "gpu-1", folder, wall_clock=lambda: later_s)
    assert folder.key().private_numbers() == key


async def test_what_is_not_of_the_tokens_mesh_is_told_nothing(mesh, folder, tmp_path):
    async with Mesh(tmp_path / "intruder").serving() as intruder:
        token = await mesh.token()
        lured = JoinText(token.public, token.secret, token.ca_spki_sha256, (intruder.address,))
        await refused(join(lured, "gpu-1", folder), Code.UNAUTHENTICATED, "CONTROL_NOT_TRUSTED")
        assert [path for path, _ in intruder.asked] == ["/v1/trustBundle"]
        assert folder.load() is None
        # Another replica is asked then.
        both = JoinText(
            token.public, token.secret, token.ca_spki_sha256, (intruder.address, mesh.address)
        )
        await join(both, "gpu-1", folder)
        assert [path for path, _ in intruder.asked] == ["/v1/trustBundle"] * 2


async def test_who_shows_the_right_root_without_its_key_is_told_nothing(mesh, folder, tmp_path):
    async with Mesh(tmp_path / "intruder").serving() as intruder:

        async def show(_request, _context):
            return pb.GetTrustBundleResponse(trust_bundle_pem=mesh.state.authority.bundle_pem)

        intruder.service.GetTrustBundle = show
        token = await mesh.token()
        lured = JoinText(token.public, token.secret, token.ca_spki_sha256, (intruder.address,))
        await refused(join(lured, "gpu-1", folder), Code.UNAUTHENTICATED, "CONTROL_NOT_TRUSTED")
        assert [path for path, _ in intruder.asked] == ["/v1/trustBundle"]


async def test_a_member_does_not_pass_for_the_control_plane(mesh, folder, tmp_path):
    """An enrolled node that answers at the address gets no tokens of others."""
    token = await mesh.token(max_uses=0)
    await join(token, "hostile", folder)
    disguise = Credentials(folder.files).listening(optional=True)
    async with listening(mesh._answer, disguise) as address:
        lured = JoinText(token.public, token.secret, token.ca_spki_sha256, (address,))
        before = [path for path, _ in mesh.asked]
        victim = MembershipFolder(tmp_path / "victim")
        await refused(join(lured, "victim", victim), Code.UNAUTHENTICATED, "CONTROL_NOT_TRUSTED")
        assert [path for path, _ in mesh.asked] == [*before, "/v1/trustBundle"]


async def test_no_answer_and_no_control_plane_are_said(mesh, folder):
    token = await mesh.token()
    nobody = JoinText(token.public, token.secret, token.ca_spki_sha256, ("127.0.0.1:1",))
    error = await refused(join(nobody, "gpu-1", folder), Code.UNAVAILABLE, None)
    assert "127.0.0.1:1" in error.message
    assert token.secret not in error.message


async def test_a_refusal_is_told_as_the_control_plane_says_it(mesh, folder):
    token = await mesh.token(name_pattern="eu-*")
    error = await refused(join(token, "gpu-1", folder), Code.PERMISSION_DENIED, "NAME_NOT_ADMITTED")
    assert error.field == "member_name"


async def test_a_renewal_keeps_the_key_and_takes_the_new_roots(mesh, folder):
    await join(await mesh.token(), "gpu-1", folder)
    before = Credentials(folder.files).pem()
    mesh.state.authority.rotate()
    await renew(folder)
    after = Credentials(folder.files).pem()
    assert after.key == before.key
    assert after.chain != before.chain
    assert len(x509.load_pem_x509_certificates(after.ca)) == 2
    assert mesh.asked[-1] == ("/v1/members:renewCertificate", Identity(Role.NODE, "gpu-1"))


async def test_the_token_of_before_a_rotation_and_of_after_it_both_admit(mesh, tmp_path):
    before = await mesh.token()
    mesh.state.authority.rotate()
    after = await mesh.token()
    assert before.ca_spki_sha256 != after.ca_spki_sha256
    await join(before, "gpu-1", MembershipFolder(tmp_path / "a"))
    await join(after, "gpu-2", MembershipFolder(tmp_path / "b"))


async def test_a_removed_member_is_told_so(mesh, folder):
    await join(await mesh.token(), "gpu-1", folder)
    request = pb.DeleteMemberRequest(name="members/node.gpu-1")
    await mesh.service.DeleteMember(request, None)
    await refused(renew(folder), Code.PERMISSION_DENIED, "MEMBER_REMOVED")


async def test_renewal_goes_on_by_itself(tmp_path):
    async with Mesh(tmp_path / "state", life_s=3.0).serving() as mesh:
        folder = MembershipFolder(tmp_path / "member")
        enrolled = await Enrolled.enroll(await mesh.token(), "gpu-1", folder)
        enrolled.start()
        async with asyncio.timeout(100):
            while enrolled.credentials.generation < 2:
                await asyncio.sleep(0.05)
        await enrolled.close()
        assert folder.expire_s() > time.time() - 1


async def test_what_fails_is_tried_again_and_one_that_has_ended_joins_anew(tmp_path):
    outcomes: list[str] = []
    done = asyncio.Event()

    async def again() -> Due:
        outcomes.append("failed" if len(outcomes) < 2 else "renewed")
        if outcomes[-1] == "failed":
            raise MeshError(Code.UNAVAILABLE, "away")
        return Due(time.time() + 1000, time.time() + 2000)

    renewal = Renewal("gpu-1", Due(time.time(), time.time() + 1), again, done.set)
    renewal.start()
    await asyncio.wait_for(done.wait(), 60)
    await renewal.close()
    assert outcomes == ["failed", "failed", "renewed"]

    async with Mesh(tmp_path / "state").serving() as mesh:
        folder = MembershipFolder(tmp_path / "member")
        token = await mesh.token(max_uses=1)
        enrolled = await Enrolled.enroll(token, "gpu-1", folder)
        later_s = time.time() + 2 * 3600
        away = Enrolled(token, "gpu-1", folder, enrolled.membership, wall_clock=lambda: later_s)
        mesh.asked.clear()
        away.start()
        async with asyncio.timeout(60):
            while away.credentials.generation < 1:
                await asyncio.sleep(0.05)
        await away.close()
        assert ("/v1/members:enroll", None) in mesh.asked


async def test_the_state_outlives_the_process_and_its_admin_is_known(tmp_path):
    async with Mesh(tmp_path / "state").serving() as mesh:
        pin = mesh.state.authority.spki_sha256
    again = ControlState(tmp_path / "state")
    assert again.authority.spki_sha256 == pin
    assert again.credentials.identity == Identity(Role.CONTROL, "local")
    admin = Credentials(MembershipFolder(tmp_path / "state" / "admin").files)
    assert admin.identity == Identity(Role.ADMIN, "local")
    secret = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in secret} == {0o600}


@pytest.mark.parametrize(
    ("name", "content"),
    [("key.pem", b"x"), ("member.json", b"{"), ("member.json", b"[]"), ("cert.pem", b"x")],
)
async def test_a_file_that_cannot_be_read_is_named(mesh, folder, name, content):
    token = await mesh.token(max_uses=0)
    await join(token, "gpu-1", folder)
    (folder.path / name).write_bytes(content)
    if name == "key.pem":
        (folder.path / "member.json").unlink()
    with pytest.raises(ConfigError, match=name):
        await join(token, "gpu-1", folder)


def test_a_member_without_grpc_addresses_asks_the_json_face():
    membership = Membership(("a:1", "b:2"), (), 0.0)
    assert membership.control_url == "https://a:1,https://b:2"


async def test_the_pin_is_of_the_key_that_the_state_holds(mesh):
    token = await mesh.token()
    (root,) = x509.load_pem_x509_certificates(mesh.state.authority.bundle_pem.encode())
    assert spki_sha256(root.public_key()) == token.ca_spki_sha256
