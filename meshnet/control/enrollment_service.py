"""EnrollmentService: join tokens, certificates, members."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from cryptography.hazmat.primitives.asymmetric import ec

from meshnet.authority import Authority
from meshnet.certificates import spki_sha256
from meshnet.control.caller import current_caller
from meshnet.control.documents import Documents
from meshnet.control.enrollment_shape import (
    ROLE_NUMBERS,
    id_of,
    identity_named,
    key_of,
    layers_message,
    member_message,
    timestamp,
    token_message,
    token_spec,
)
from meshnet.control.join_tokens import JoinToken, JoinTokens
from meshnet.control.members import Member, Members
from meshnet.control.paging import page_of
from meshnet.control.removed_keys import RemovedKeys
from meshnet.control.replicas import Reached
from meshnet.control.validate import check_node_id, check_required
from meshnet.errors import Code, MeshError
from meshnet.identity import Identity, Role
from meshnet.v1 import enrollment_service_pb2 as pb

__all__ = ["EnrollmentService", "Enrolment"]

_TRIES: Final = 5


@dataclass(frozen=True, slots=True)
class Enrolment:
    """What a control plane needs to admit members.

    Attributes:
        authority: certifies them.
        documents: keeps tokens and members.
        reached: gives where replicas are reached: for join tokens, and those who joined.
        removed: keys of members that were removed.
        follow: has the control plane's own certificate be one of the authority as it is now.
        wall_clock: seconds since 1970.
    """

    authority: Authority
    documents: Documents
    reached: Callable[[], Awaitable[Sequence[Reached]]]
    removed: RemovedKeys
    follow: Callable[[], None]
    wall_clock: Callable[[], float] = time.time


class EnrollmentService:
    """Servicer of meshnet.v1.EnrollmentService, for both faces.

    Args:
        enrolment: None on a control plane that is open, which admits nobody.
    """

    def __init__(self, enrolment: Enrolment | None) -> None:
        self._enrolment = enrolment
        if enrolment is not None:
            self._tokens = JoinTokens(enrolment.documents, enrolment.wall_clock)
            self._members = Members(enrolment.documents, enrolment.removed, enrolment.wall_clock)

    async def Enroll(  # noqa: N802 - the schema's name
        self, request: pb.EnrollRequest, _context: object
    ) -> pb.EnrollResponse:
        """Trade a join token for a certificate."""
        enrolment = self._known()
        check_required(request)
        token = await self._tokens.check(request.join_token)
        identity = _admitted(token, request.member_name, request.role)
        key = key_of(request.csr_pem)
        enrolment.removed.check(spki_sha256(key))
        for _ in range(_TRIES):
            issued = enrolment.authority.issue(identity, key)
            member = await self._member(token, identity, key, request.join_token)
            if not await self._members.keep(replace(member, expire_s=issued.expire_s)):
                continue
            answer = pb.EnrollResponse(
                certificate_chain_pem=issued.chain_pem,
                trust_bundle_pem=issued.bundle_pem,
                renew_time=timestamp(issued.renew_s),
                role=ROLE_NUMBERS[token.spec.role],
                model=token.spec.model,
                grpc_addresses=[replica.grpc for replica in await enrolment.reached()],
            )
            if token.spec.layers is not None:
                answer.layers.CopyFrom(layers_message(token.spec.layers))
            return answer
        raise _busy()

    async def RenewCertificate(  # noqa: N802
        self, request: pb.RenewCertificateRequest, _context: object
    ) -> pb.RenewCertificateResponse:
        """Issue a new certificate to a member."""
        enrolment = self._known()
        caller = current_caller()
        if caller is None:
            raise MeshError(
                Code.UNAUTHENTICATED,
                "a renewal needs the certificate that is to be renewed",
                reason="CREDENTIALS_MISSING",
            )
        check_required(request)
        key = key_of(request.csr_pem)
        for _ in range(_TRIES):
            member = await self._members.get(caller)
            if member is None or member.key_sha256 != spki_sha256(key):
                why = "is not, or no more, a member" if member is None else "joined by another key"
                raise MeshError(
                    Code.PERMISSION_DENIED,
                    f"{caller.role.value} {caller.name!r} {why}: join again by a new token",
                    reason="MEMBER_REMOVED",
                )
            issued = enrolment.authority.issue(caller, key)
            if not await self._members.keep(replace(member, expire_s=issued.expire_s)):
                continue
            return pb.RenewCertificateResponse(
                certificate_chain_pem=issued.chain_pem,
                trust_bundle_pem=issued.bundle_pem,
                renew_time=timestamp(issued.renew_s),
            )
        raise _busy()

    async def GetTrustBundle(  # noqa: N802
        self, _request: pb.GetTrustBundleRequest, _context: object
    ) -> pb.GetTrustBundleResponse:
        """Give the roots to trust now."""
        return pb.GetTrustBundleResponse(trust_bundle_pem=self._known().authority.bundle_pem)

    async def CreateJoinToken(  # noqa: N802
        self, request: pb.CreateJoinTokenRequest, _context: object
    ) -> pb.CreateJoinTokenResponse:
        """Create a join token."""
        enrolment = self._known()
        check_required(request)
        spec, ttl_s = token_spec(request.join_token)
        token, secret = await self._tokens.create(spec, ttl_s)
        enrolment.follow()  # whoever comes by this token believes the newest authority alone
        return pb.CreateJoinTokenResponse(
            join_token=token_message(token),
            token=f"{token.public}.{secret}",
            ca_spki_sha256=enrolment.authority.spki_sha256,
            http_addresses=[replica.http for replica in await enrolment.reached()],
        )

    async def ListJoinTokens(  # noqa: N802
        self, request: pb.ListJoinTokensRequest, _context: object
    ) -> pb.ListJoinTokensResponse:
        """Give a page of the join tokens."""
        self._known()
        keyed = [(token.public, token_message(token)) for token in await self._tokens.list()]
        page, following = page_of(request, keyed)
        return pb.ListJoinTokensResponse(join_tokens=page, next_page_token=following)

    async def DeleteJoinToken(  # noqa: N802
        self, request: pb.DeleteJoinTokenRequest, _context: object
    ) -> pb.DeleteJoinTokenResponse:
        """Delete a join token."""
        self._known()
        check_required(request)
        public = id_of(request.name, "joinTokens")
        if not await self._tokens.delete(public):
            raise MeshError(Code.NOT_FOUND, f"there is no join token {public!r}", field="name")
        return pb.DeleteJoinTokenResponse()

    async def ListMembers(  # noqa: N802
        self, request: pb.ListMembersRequest, _context: object
    ) -> pb.ListMembersResponse:
        """Give a page of the members."""
        self._known()
        keyed = [(found.name, found) for found in map(member_message, await self._members.list())]
        page, following = page_of(request, keyed)
        return pb.ListMembersResponse(members=page, next_page_token=following)

    async def DeleteMember(  # noqa: N802
        self, request: pb.DeleteMemberRequest, _context: object
    ) -> pb.DeleteMemberResponse:
        """Remove a member."""
        self._known()
        check_required(request)
        role, _, name = id_of(request.name, "members").partition(".")
        identity = identity_named(role, name, "name")
        if not await self._members.remove(identity):
            raise MeshError(
                Code.NOT_FOUND, f"there is no member {request.name[:200]!r}", field="name"
            )
        return pb.DeleteMemberResponse()

    def _known(self) -> Enrolment:
        if self._enrolment is None:
            raise MeshError(
                Code.FAILED_PRECONDITION,
                "this control plane is open to everybody and has no authority; one that knows "
                "its callers is started with: meshnet control --state DIR",
                reason="NO_AUTHORITY",
            )
        return self._enrolment

    async def _member(
        self,
        token: JoinToken,
        identity: Identity,
        key: ec.EllipticCurvePublicKey,
        credential: str,
    ) -> Member:
        """Give the record of who joins; a new one takes a use of the token.

        Raises:
            MeshError: ALREADY_EXISTS (NAME_TAKEN), another key holds the name; or as
                `JoinTokens.use`.
        """
        now_s = self._known().wall_clock()
        found = await self._members.get(identity)
        hashed = spki_sha256(key)
        if found is not None and found.key_sha256 == hashed and found.token == token.public:
            return found
        if found is not None and found.key_sha256 != hashed and found.expire_s > now_s:
            raise MeshError(
                Code.ALREADY_EXISTS,
                f"{identity.role.value} {identity.name!r} has joined by another key: choose "
                "another name, or remove it first with: meshnet member remove",
                field="member_name",
                reason="NAME_TAKEN",
            )
        await self._members.make_room()
        await self._tokens.use(credential)
        revision = 0 if found is None else found.revision
        return Member(identity, hashed, token.public, now_s, now_s, revision)


def _admitted(token: JoinToken, name: str, expected: pb.Role) -> Identity:
    """Give who would join.

    Raises:
        MeshError: INVALID_ARGUMENT, the name cannot be one of this role; PERMISSION_DENIED
            (NAME_NOT_ADMITTED, ROLE_NOT_ADMITTED), the token is for others.
    """
    role = token.spec.role
    if expected not in (pb.ROLE_UNSPECIFIED, ROLE_NUMBERS[role]):
        raise MeshError(
            Code.PERMISSION_DENIED,
            f"join token {token.public} is for the role {role.value}",
            field="role",
            reason="ROLE_NOT_ADMITTED",
        )
    if role is Role.NODE:
        check_node_id(name, "member_name")
    identity = identity_named(role.value, name, "member_name")
    if not token.spec.admits(name):
        raise MeshError(
            Code.PERMISSION_DENIED,
            f"{name!r} may not join by token {token.public}: expected a name like "
            f"{token.spec.name_pattern}",
            field="member_name",
            reason="NAME_NOT_ADMITTED",
        )
    return identity


def _busy() -> MeshError:
    return MeshError(
        Code.UNAVAILABLE, "too many join at once: try again", reason="BUSY", retry_after_s=1.0
    )
