"""How somebody joins a mesh by a token, and renews the certificate: HTTPS to the JSON face.

The token names the authority by the hash of its key. So the roots that a server shows are
looked through for that one before anything is sent, and what is sent goes over a connection
whose certificate that root vouches for.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import aiohttp
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric import ec
from google.protobuf import json_format
from google.protobuf.message import Message
from google.rpc import status_pb2  # type: ignore[import-untyped]

from meshnet.certificates import make_csr, pem_of, spki_sha256
from meshnet.control.enrollment_shape import ROLE_NUMBERS
from meshnet.control.status import from_status
from meshnet.errors import Code, ConfigError, MeshError
from meshnet.identity import CONTROL_DNS_NAME, Role
from meshnet.join import JoinText
from meshnet.membership import Membership, MembershipFolder
from meshnet.tls import client_context
from meshnet.topology import LayerRange
from meshnet.v1 import enrollment_service_pb2 as pb

__all__ = ["join", "renew", "renew_if_due"]

_log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 10.0
_MAX_BYTES: Final = 1 << 20
_ENDS_SOON_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class _Server:
    """One replica's JSON face, and whom to believe there."""

    address: str
    context: ssl.SSLContext


async def join(
    token: JoinText,
    name: str,
    folder: MembershipFolder,
    role: Role | None = None,
    *,
    wall_clock: Callable[[], float] = time.time,
) -> Membership:
    """Become a member, or go on as one where the folder holds a certificate that is good.

    Args:
        token: from an operator.
        name: wished; of a node its id.
        folder: keeps what joining gives.
        role: that the token is to be for; None for any.
        wall_clock: seconds since 1970.

    Raises:
        MeshError: UNAVAILABLE, no replica answers; UNAUTHENTICATED (CONTROL_NOT_TRUSTED), what
            answers is not of the mesh that the token names, and was told nothing of it; or
            as EnrollmentService.Enroll.
        ConfigError: a file of the folder cannot be used, naming it.
    """
    before = folder.load()
    if before is not None and folder.expire_s() > wall_clock() + _ENDS_SOON_S:
        return before
    request = pb.EnrollRequest(
        join_token=token.credential,
        member_name=name,
        csr_pem=make_csr(folder.key()),
        role=pb.ROLE_UNSPECIFIED if role is None else ROLE_NUMBERS[role],
    )
    problem: MeshError | None = None
    for address in token.addresses:
        try:
            root = await _pinned_root(address, token.ca_spki_sha256)
            server = _Server(address, _trusting(root))
            path = "/v1/members:enroll"
            answer = await _call(server, "POST", path, request, pb.EnrollResponse())
        except MeshError as error:
            if not _is_of_this_replica(error):
                raise
            problem = error
            continue
        layers = answer.layers
        membership = Membership(
            token.addresses,
            tuple(answer.grpc_addresses),
            answer.renew_time.ToNanoseconds() / 1e9,
            answer.model,
            LayerRange(layers.start, layers.end) if answer.HasField("layers") else None,
        )
        folder.keep(membership, answer.certificate_chain_pem, answer.trust_bundle_pem)
        return membership
    raise problem or MeshError(Code.INTERNAL, "the join token names no address")


async def renew(folder: MembershipFolder) -> Membership:
    """Renew the certificate that the folder holds, and with it the roots to trust.

    Raises:
        MeshError: no replica answers, or as EnrollmentService.RenewCertificate.
        ConfigError: a file of the folder cannot be used, naming it.
    """
    before = folder.load()
    if before is None:
        raise MeshError(Code.FAILED_PRECONDITION, f"{folder.path}: nobody has joined")
    request = pb.RenewCertificateRequest(csr_pem=make_csr(folder.key()))
    problem: MeshError | None = None
    for address in before.http_addresses:
        context = client_context(folder.files)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        server = _Server(address, context)
        path = "/v1/members:renewCertificate"
        try:
            answer = await _call(server, "POST", path, request, pb.RenewCertificateResponse())
        except MeshError as error:
            if not _is_of_this_replica(error):
                raise
            problem = error
            continue
        membership = replace(before, renew_s=answer.renew_time.ToNanoseconds() / 1e9)
        folder.keep(membership, answer.certificate_chain_pem, answer.trust_bundle_pem)
        return membership
    raise problem or MeshError(Code.INTERNAL, f"{folder.path} names no control plane")


async def renew_if_due(
    folder: MembershipFolder, *, wall_clock: Callable[[], float] = time.time
) -> Membership | None:
    """Renew what is past half of its life; gives what the folder keeps, None where nobody joined.

    A renewal that fails is left for the next time, for as long as the certificate is good.

    Raises:
        MeshError: UNAUTHENTICATED (CERTIFICATE_ENDED), it is good no more.
        ConfigError: a file of the folder cannot be used, naming it.
    """
    membership = folder.load()
    if membership is None or wall_clock() < membership.renew_s:
        return membership
    if folder.expire_s() <= wall_clock():
        raise MeshError(
            Code.UNAUTHENTICATED,
            f"the certificate in {folder.path} has ended: meshnet login with a new token",
            reason="CERTIFICATE_ENDED",
        )
    try:
        return await renew(folder)
    except ConfigError:
        raise
    except MeshError as error:
        _log.warning("the certificate in %s was not renewed: %s", folder.path, error)
        return membership


def _is_of_this_replica(error: MeshError) -> bool:
    """Whether another replica may do better."""
    return error.code is Code.UNAVAILABLE or error.reason == "CONTROL_NOT_TRUSTED"


async def _pinned_root(address: str, pin: str) -> x509.Certificate:
    """Find the root of which the token knows the key's hash; nothing else is believed yet.

    Raises:
        MeshError: UNAUTHENTICATED (CONTROL_NOT_TRUSTED), the server does not know it.
    """
    anybody = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    anybody.check_hostname = False
    anybody.verify_mode = ssl.CERT_NONE
    server = _Server(address, anybody)
    request, empty = pb.GetTrustBundleRequest(), pb.GetTrustBundleResponse()
    answer = await _call(server, "GET", "/v1/trustBundle", request, empty)
    try:
        roots = x509.load_pem_x509_certificates(answer.trust_bundle_pem.encode())
    except ValueError:
        roots = []
    for root in roots:
        key = root.public_key()
        if isinstance(key, ec.EllipticCurvePublicKey) and spki_sha256(key) == pin:
            try:
                root.verify_directly_issued_by(root)
            except (ValueError, TypeError, InvalidSignature):
                continue
            return root
    raise _not_trusted(
        address, "its authority is not the one that the join token names; nothing was sent"
    )


def _trusting(root: x509.Certificate) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata=pem_of(root))
    return context


_M = TypeVar("_M", bound=Message)


async def _call(server: _Server, method: str, path: str, request: Message, response: _M) -> _M:
    """Call a method of the JSON face; fills and gives `response`.

    Raises:
        MeshError: the answer; UNAVAILABLE, there was none; UNAUTHENTICATED
            (CONTROL_NOT_TRUSTED), the certificate is not one that `server.context` accepts.
    """
    url = f"https://{server.address}{path}"
    body = None if method == "GET" else json_format.MessageToDict(request)
    try:
        async with (
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S)) as session,
            session.request(
                method,
                url,
                json=body,
                ssl=server.context,
                server_hostname=CONTROL_DNS_NAME,
                allow_redirects=False,
            ) as answer,
        ):
            status, data = answer.status, await _read(answer)
    except aiohttp.ClientConnectorCertificateError as error:
        why = getattr(error.certificate_error, "verify_message", "") or "certificate refused"
        hint = "; is this machine's clock right?" if "valid" in why or "expired" in why else ""
        raise _not_trusted(server.address, f"{why}{hint}") from None
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        why = str(error) or type(error).__name__
        raise MeshError(
            Code.UNAVAILABLE, f"control plane at {server.address}: no answer: {why}"[:500]
        ) from None
    try:
        if status == 200:
            return json_format.Parse(data, response, ignore_unknown_fields=True)
        said: Any = json_format.Parse(data, status_pb2.Status(), ignore_unknown_fields=True)
    except (json_format.ParseError, UnicodeDecodeError):
        raise MeshError(
            Code.UNAVAILABLE,
            f"what answers at {server.address} with status {status} is no control plane",
        ) from None
    raise from_status(said)


async def _read(answer: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for piece in answer.content.iter_chunked(1 << 16):
        data += piece
        if len(data) > _MAX_BYTES:
            raise aiohttp.ClientPayloadError(f"an answer of over {_MAX_BYTES} bytes")
    return bytes(data)


def _not_trusted(address: str, why: str) -> MeshError:
    return MeshError(
        Code.UNAUTHENTICATED,
        f"control plane at {address}: {why}"[:500],
        reason="CONTROL_NOT_TRUSTED",
    )
