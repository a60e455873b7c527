"""Who calls, on both faces, and whether it is theirs to call.

The JSON face answers by calls over a unix socket. It says there who its caller is, in
metadata with a secret of this process; what others send under these keys counts nowhere.
"""

from __future__ import annotations

import hmac
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from secrets import token_hex
from typing import Any, Final

import grpc
from aiohttp import web
from cryptography import x509

from meshnet.certificates import spki_sha256
from meshnet.control.authz import check_caller, check_request
from meshnet.control.http_face import Handler
from meshnet.control.httpmeta import INTERNAL_PREFIX, Metadata
from meshnet.control.operators import Operators
from meshnet.control.removed_keys import RemovedKeys
from meshnet.credentials import identity_of, peer_identity
from meshnet.errors import Code, MeshError
from meshnet.identity import Identity, parse_identity

__all__ = ["Caller", "Guard"]

_SECRET_KEY: Final = f"{INTERNAL_PREFIX}secret"
_CALLER_KEY: Final = f"{INTERNAL_PREFIX}caller"

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls.

    Attributes:
        identity: see there.
        until_s: end of the certificate, seconds since 1970; of a token, None.
        key_sha256: of its public key, in hexadecimal; empty of a token.
    """

    identity: Identity
    until_s: float | None = None
    key_sha256: str = ""


class Guard:
    """Identifies callers and refuses what is not theirs.

    Args:
        operators: whose tokens are good, and who was revoked.
        removed: keys of members that are none any more.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        operators: Operators,
        removed: RemovedKeys,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._operators = operators
        self._removed = removed
        self._wall_clock = wall_clock
        self._secret = token_hex(32)

    async def admit_http(self, request: web.BaseRequest, method: str) -> Metadata:
        """Refuse a request before its body is read; gives what the unix socket is to be told.

        Args:
            request: its connection has TLS.
            method: as in `authz.RULES`.

        Raises:
            MeshError: UNAUTHENTICATED or PERMISSION_DENIED.
        """
        caller = await self._of_request(request)
        check_caller(method, None if caller is None else caller.identity)
        told: list[tuple[str, str | bytes]] = [(_SECRET_KEY, self._secret)]
        if caller is not None:
            facts = [caller.identity.uri, caller.until_s, caller.key_sha256]
            told.append((_CALLER_KEY, json.dumps(facts)))
        return tuple(told)

    def guarding(self, method: str, handler: Handler) -> Handler:
        """Put what `admit_http` refuses before a handler."""

        async def answer(request: web.BaseRequest) -> web.StreamResponse:
            await self.admit_http(request, method)
            return await handler(request)

        return answer

    async def admit_rpc(self, context: Context, method: str, request: object) -> Caller | None:
        """Refuse a call; gives who made it, None for one without credentials.

        Raises:
            MeshError: UNAUTHENTICATED or PERMISSION_DENIED.
        """
        caller = self._of_socket(context) if _is_unix(context) else _of_connection(context)
        await self.check(caller)
        check_request(method, None if caller is None else caller.identity, request)
        return caller

    async def check(self, caller: Caller | None) -> None:
        """Refuse a caller whose certificate has ended, or who was removed or revoked.

        Raises:
            MeshError: UNAUTHENTICATED (CERTIFICATE_EXPIRED, MEMBER_REMOVED, OPERATOR_REVOKED).
        """
        if caller is None:
            return
        if caller.until_s is not None and caller.until_s < self._wall_clock():
            raise MeshError(
                Code.UNAUTHENTICATED,
                f"the certificate of {caller.identity.uri} has expired: connect with a new one",
                reason="CERTIFICATE_EXPIRED",
            )
        self._removed.check(caller.key_sha256)
        if caller.identity.role.is_operator:
            await self._operators.check(caller.identity.name)

    async def _of_request(self, request: web.BaseRequest) -> Caller | None:
        """Tell who sent a request: a token says so before a certificate does."""
        header = request.headers.get("Authorization")
        if header is not None:
            scheme, _, token = header.partition(" ")
            if scheme.lower() != "bearer":
                raise MeshError(
                    Code.UNAUTHENTICATED,
                    f"Authorization {scheme[:20]!r}: expected Bearer and an operator's token",
                    field="Authorization",
                    reason="TOKEN_INVALID",
                )
            return Caller(await self._operators.identify(token.strip()))
        transport = request.transport
        connection = None if transport is None else transport.get_extra_info("ssl_object")
        certificate = None if connection is None else connection.getpeercert(binary_form=True)
        if connection is None or not certificate:
            return None
        caller = _certified(peer_identity(connection), *_facts_of_der(certificate))
        await self.check(caller)
        return caller

    def _of_socket(self, context: Context) -> Caller | None:
        told = dict(context.invocation_metadata() or ())
        secret = told.get(_SECRET_KEY, "")
        if not isinstance(secret, str) or not hmac.compare_digest(secret, self._secret):
            raise MeshError(
                Code.UNAUTHENTICATED,
                "this socket is for the control plane's own JSON face",
                reason="CREDENTIALS_MISSING",
            )
        if _CALLER_KEY not in told:
            return None
        uri, until_s, key_sha256 = json.loads(told[_CALLER_KEY])
        return Caller(parse_identity(uri), until_s, key_sha256)


def _is_unix(context: Context) -> bool:
    return str(context.peer()).startswith("unix:")


def _of_connection(context: Context) -> Caller:
    """Tell who is at the other end of a gRPC connection, which demanded a certificate."""
    found = context.auth_context()
    names = [name.decode("utf-8", "replace") for name in found.get("peer_uri", ())]
    certificates = list(found.get("x509_pem_cert", ()))
    facts = _facts_of_pem(certificates[0]) if certificates else (0.0, "")
    return _certified(identity_of(names), *facts)


def _certified(identity: Identity | None, until_s: float, key_sha256: str) -> Caller:
    if identity is None:
        raise MeshError(
            Code.UNAUTHENTICATED,
            "the certificate names nobody of this mesh: expected spiffe://mesh/ROLE/NAME",
            reason="CERTIFICATE_NAMELESS",
        )
    return Caller(identity, until_s, key_sha256)


@lru_cache(maxsize=1024)
def _facts_of_pem(pem: bytes) -> tuple[float, str]:
    return _facts_of(x509.load_pem_x509_certificate(pem))


@lru_cache(maxsize=1024)
def _facts_of_der(der: bytes) -> tuple[float, str]:
    return _facts_of(x509.load_der_x509_certificate(der))


def _facts_of(certificate: x509.Certificate) -> tuple[float, str]:
    """Give when a verified certificate ends, and SHA-256 of its key."""
    return certificate.not_valid_after_utc.timestamp(), spki_sha256(certificate.public_key())
