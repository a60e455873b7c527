"""The service that admits members: who may join by which token, who may renew, what is kept."""

from __future__ import annotations

import asyncio

import pytest
from cryptography import x509

from meshnet.authority import Authority
from meshnet.certificates import make_csr, make_key, spki_sha256
from meshnet.control.caller import acting
from meshnet.control.documents import MemoryDocuments
from meshnet.control.enrollment_service import EnrollmentService, Enrolment
from meshnet.control.join_tokens import TokenSpec
from meshnet.control.removed_keys import RemovedKeys
from meshnet.control.replicas import Reached
from meshnet.errors import Code, MeshError
from meshnet.identity import Identity, Role
from meshnet.v1 import enrollment_service_pb2 as pb
from meshnet.v1 import types_pb2


class Mesh:
    """A service on a store and a clock that the test moves."""

    def __init__(self, folder) -> None:
        self.now_s = 1_800_000_000.0
        self.documents = MemoryDocuments()
        self.authority = Authority(folder, wall_clock=self.clock)
        self.service = EnrollmentService(
            Enrolment(
                self.authority,
                self.documents,
                self.reached,
                RemovedKeys(self.documents, self.clock),
                lambda: None,
                self.clock,
            )
        )

    def clock(self) -> float:
        return self.now_s

    async def reached(self) -> list[Reached]:
        return [Reached("h:1", "g:2")]

    async def token(self, **fields) -> str:
        fields.setdefault("role", pb.ROLE_NODE)
        request = pb.CreateJoinTokenRequest(join_token=pb.JoinToken(**fields))
        return (await self.service.CreateJoinToken(request, None)).token

    async def join(self, token, name="gpu-1", key=None):
        request = pb.EnrollRequest(
            join_token=token, member_name=name, csr_pem=make_csr(key or make_key())
        )
        return await self.service.Enroll(request, None)

    async def renew(self, key, name="gpu-1", role=Role.NODE):
        with acting(Identity(role, name)):
            request = pb.RenewCertificateRequest(csr_pem=make_csr(key))
            return await self.service.RenewCertificate(request, None)

    async def used(self) -> list[int]:
        answer = await self.service.ListJoinTokens(pb.ListJoinTokensRequest(), None)
        return [token.used for token in answer.join_tokens]

    async def members(self) -> list[str]:
        answer = await self.service.ListMembers(pb.ListMembersRequest(), None)
        return [member.name for member in answer.members]


@pytest.fixture
def mesh(tmp_path):
    return Mesh(tmp_path / "state")


async def refused(call, code, reason=None):
    with pytest.raises(MeshError) as caught:
        await call
    assert (caught.value.code, caught.value.reason) == (code, reason)
    return caught.value


async def test_a_token_gives_a_certificate_and_what_to_serve(mesh):
    key = make_key()
    token = await mesh.token(
        model="org/name", layers=types_pb2.LayerRange(start=0, end=10), max_uses=1
    )
    answer = await mesh.join(token, key=key)
    (leaf,) = x509.load_pem_x509_certificates(answer.certificate_chain_pem.encode())
    assert leaf.public_key() == key.public_key()
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == ["spiffe://mesh/node/gpu-1"]
    assert (answer.role, answer.model, answer.layers.end) == (pb.ROLE_NODE, "org/name", 10)
    assert list(answer.grpc_addresses) == ["g:2"]
    assert answer.trust_bundle_pem == mesh.authority.bundle_pem
    listed = await mesh.service.ListMembers(pb.ListMembersRequest(), None)
    assert listed.members[0].name == "members/node.gpu-1"
    assert listed.members[0].key_sha256 == spki_sha256(key.public_key())
    assert listed.members[0].join_token == f"joinTokens/{token.split('.')[0]}"


async def test_only_a_hash_of_the_secret_is_kept(mesh):
    token = await mesh.token()
    secret = token.split(".")[1]
    (kept,) = await mesh.documents.list("join-tokens")
    assert secret.encode() not in kept.value
    listed = await mesh.service.ListJoinTokens(pb.ListJoinTokensRequest(), None)
    assert secret not in str(listed)


async def test_a_token_ends_with_its_uses_its_time_and_its_deletion(mesh):
    once = await mesh.token(max_uses=1)
    await mesh.join(once, "gpu-1")
    error = await refused(mesh.join(once, "gpu-2"), Code.UNAUTHENTICATED, "JOIN_TOKEN_REFUSED")
    assert "used up" in error.message
    always = await mesh.token(max_uses=0)
    for number in range(3):
        await mesh.join(always, f"other-{number}")
    mesh.now_s += 3601
    error = await refused(mesh.join(always, "gpu-3"), Code.UNAUTHENTICATED, "JOIN_TOKEN_REFUSED")
    assert "has ended" in error.message
    fresh = await mesh.token()
    name = f"joinTokens/{fresh.split('.')[0]}"
    await mesh.service.DeleteJoinToken(pb.DeleteJoinTokenRequest(name=name), None)
    await refused(mesh.join(fresh, "gpu-4"), Code.UNAUTHENTICATED, "JOIN_TOKEN_REFUSED")
    again = mesh.service.DeleteJoinToken(pb.DeleteJoinTokenRequest(name=name), None)
    await refused(again, Code.NOT_FOUND)
    assert "members/node.gpu-4" not in await mesh.members()


async def test_nobody_joins_by_a_guess(mesh):
    public, _, secret = (await mesh.token()).partition(".")
    for guess in (
        f"{public}.{'A' * 22}",
        f"{public}.{secret[:-1]}",
        f"{public}.",
        public,
        f"zzzzzzzzzz.{secret}",
        f"../{public}.{secret}",
        "\ud800".encode("utf-8", "surrogatepass").decode("utf-8", "replace"),
        "x" * 100_000,
    ):
        error = await refused(mesh.join(guess), Code.UNAUTHENTICATED, "JOIN_TOKEN_REFUSED")
        assert secret not in error.message
    assert await mesh.used() == [0]


async def test_the_same_key_may_ask_again_and_takes_no_other_use(mesh):
    key = make_key()
    token = await mesh.token(max_uses=1)
    await mesh.join(token, key=key)
    mesh.now_s += 60
    await mesh.join(token, key=key)
    assert await mesh.used() == [1]


async def test_a_name_is_its_keys_until_its_certificate_ends(mesh):
    token = await mesh.token(max_uses=0, ttl={"seconds": 7 * 24 * 3600})
    first = make_key()
    await mesh.join(token, key=first)
    await refused(mesh.join(token), Code.ALREADY_EXISTS, "NAME_TAKEN")
    assert await mesh.used() == [1]
    mesh.now_s += 20 * 3600
    await mesh.renew(first)
    mesh.now_s += 20 * 3600
    await refused(mesh.join(token), Code.ALREADY_EXISTS, "NAME_TAKEN")
    mesh.now_s += 5 * 3600
    await mesh.join(token)
    await refused(mesh.renew(first), Code.PERMISSION_DENIED, "MEMBER_REMOVED")


async def test_a_removed_member_renews_no_more_and_its_name_is_free(mesh):
    key = make_key()
    token = await mesh.token(max_uses=2)
    await mesh.join(token, key=key)
    await mesh.renew(key)
    request = pb.DeleteMemberRequest(name="members/node.gpu-1")
    await mesh.service.DeleteMember(request, None)
    await refused(mesh.renew(key), Code.PERMISSION_DENIED, "MEMBER_REMOVED")
    await refused(mesh.service.DeleteMember(request, None), Code.NOT_FOUND)
    await refused(mesh.join(token, key=key), Code.UNAUTHENTICATED, "MEMBER_REMOVED")
    await mesh.join(token)
    assert await mesh.members() == ["members/node.gpu-1"]


async def test_a_renewal_is_for_the_key_that_joined_and_for_the_callers_name(mesh):
    key = make_key()
    await mesh.join(await mesh.token(), key=key)
    await refused(mesh.renew(make_key()), Code.PERMISSION_DENIED, "MEMBER_REMOVED")
    await refused(mesh.renew(key, "gpu-2"), Code.PERMISSION_DENIED, "MEMBER_REMOVED")
    await refused(mesh.renew(key, role=Role.ADMIN), Code.PERMISSION_DENIED, "MEMBER_REMOVED")
    request = pb.RenewCertificateRequest(csr_pem=make_csr(key))
    nobody = mesh.service.RenewCertificate(request, None)
    await refused(nobody, Code.UNAUTHENTICATED, "CREDENTIALS_MISSING")


async def test_many_at_once_take_no_more_uses_than_there_are(mesh):
    token = await mesh.token(max_uses=5)
    joining = [mesh.join(token, f"gpu-{number}") for number in range(12)]
    answers = await asyncio.gather(*joining, return_exceptions=True)
    assert sum(isinstance(answer, pb.EnrollResponse) for answer in answers) == 5
    assert len(await mesh.members()) == 5


@pytest.mark.parametrize(
    ("pattern", "admitted", "others"),
    [
        ("", "any-name", ()),
        ("gpu-*", "gpu-1", ("cpu-1", "a-gpu-1", "gpu")),
        ("*-eu", "a-eu", ("a-us", "eu")),
        ("a*b*c", "axbxc", ("ac", "abx", "acb")),
        ("only", "only", ("only1", "onl")),
        ("ab*ba", "abba", ("aba",)),
        ("*" * 63, "a" * 63, ()),
    ],
)
async def test_a_pattern_admits_names(mesh, pattern, admitted, others):
    token = await mesh.token(name_pattern=pattern)
    await mesh.join(token, admitted)
    for name in others:
        await refused(mesh.join(token, name), Code.PERMISSION_DENIED, "NAME_NOT_ADMITTED")


def test_a_pattern_of_stars_takes_no_time():
    spec = TokenSpec(Role.NODE, "*a" * 31)
    assert not spec.admits("a" * 30)
    assert spec.admits("a" * 63)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"role": 0}, "join_token.role"),
        ({"role": 9}, "join_token.role"),
        ({"name_pattern": "A"}, "join_token.name_pattern"),
        ({"name_pattern": "a" * 64}, "join_token.name_pattern"),
        ({"max_uses": 100_001}, "join_token.max_uses"),
        ({"ttl": {"seconds": 0}}, "join_token.ttl"),
        ({"ttl": {"seconds": -5}}, "join_token.ttl"),
        ({"ttl": {"seconds": 7 * 24 * 3600 + 1}}, "join_token.ttl"),
        ({"layers": {"start": 2, "end": 2}}, "join_token.layers"),
        ({"layers": {"start": 0, "end": 10_001}}, "join_token.layers"),
        ({"model": "a//b"}, "join_token.model"),
        ({"role": pb.ROLE_GATEWAY, "model": "a/b"}, "join_token.model"),
    ],
)
async def test_a_token_that_cannot_be_is_refused(mesh, fields, field):
    error = await refused(mesh.token(**fields), Code.INVALID_ARGUMENT)
    assert error.field == field
    assert await mesh.used() == []


@pytest.mark.parametrize("name", ["", "A", "-a", "1gpu", "a.b", "a/b", "a" * 64, "gpu\n"])
async def test_a_name_that_is_no_nodes_is_refused(mesh, name):
    error = await refused(mesh.join(await mesh.token(), name), Code.INVALID_ARGUMENT)
    assert error.field == "member_name"


async def test_a_request_that_is_none_takes_no_use(mesh):
    token = await mesh.token(max_uses=1)
    request = pb.EnrollRequest(join_token=token, member_name="a", csr_pem="-----BEGIN")
    error = await refused(mesh.service.Enroll(request, None), Code.INVALID_ARGUMENT)
    assert error.field == "csr_pem"
    assert await mesh.used() == [0]


async def test_there_are_no_more_tokens_than_fit(mesh, monkeypatch):
    monkeypatch.setattr("meshnet.control.join_tokens.MAX_TOKENS", 2)
    await mesh.token()
    await mesh.token()
    await refused(mesh.token(), Code.RESOURCE_EXHAUSTED, "TOO_MANY_JOIN_TOKENS")
    mesh.now_s += 26 * 3600
    await mesh.token()
    assert len(await mesh.used()) == 1


async def test_there_are_no_more_members_than_fit(mesh, monkeypatch):
    monkeypatch.setattr("meshnet.control.members.MAX_MEMBERS", 2)
    token = await mesh.token(max_uses=0, ttl={"seconds": 7 * 24 * 3600})
    await mesh.join(token, "a")
    await mesh.join(token, "b")
    await refused(mesh.join(token, "c"), Code.RESOURCE_EXHAUSTED, "TOO_MANY_MEMBERS")
    mesh.now_s += 25 * 3600
    await mesh.join(token, "c")
    assert await mesh.members() == ["members/node.c"]


async def test_an_open_mesh_admits_nobody():
    service = EnrollmentService(None)
    for method, request in (
        (service.Enroll, pb.EnrollRequest()),
        (service.GetTrustBundle, pb.GetTrustBundleRequest()),
        (service.CreateJoinToken, pb.CreateJoinTokenRequest()),
        (service.ListMembers, pb.ListMembersRequest()),
    ):
        await refused(method(request, None), Code.FAILED_PRECONDITION, "NO_AUTHORITY")
