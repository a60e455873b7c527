"""Operators' bearer tokens, of which only hashes are kept, and who is no operator any more."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from meshnet.control.documents import Document, Documents, put_if_unchanged
from meshnet.control.hashed import hash_secret, is_secret
from meshnet.errors import Code, MeshError
from meshnet.identity import Identity, Role, parse_identity

__all__ = ["Operator", "Operators"]

_KIND: Final = "operators"
_SECRET_BYTES: Final = 32
_MAX_TOKEN: Final = 256


@dataclass(frozen=True, slots=True)
class Operator:
    """One operator.

    Attributes:
        name: unique.
        role: what the token is good for.
        created_s: seconds since 1970.
        hashed: SHA-256 of the token's secret, in hexadecimal; empty for none.
        is_revoked: whether token and certificates of this name are refused.
    """

    name: str
    role: Role
    created_s: float
    hashed: str = ""
    is_revoked: bool = False


class Operators:
    """Creates, knows and revokes operators; all replicas the same.

    A token is ``NAME.SECRET``.

    Args:
        documents: where they are kept; they are open.
        wall_clock: seconds since 1970.
    """

    def __init__(self, documents: Documents, wall_clock: Callable[[], float] = time.time) -> None:
        self._documents = documents
        self._wall_clock = wall_clock

    async def create(self, identity: Identity) -> tuple[Operator, str]:
        """Create an operator; gives the token too, which cannot be given again.

        Raises:
            MeshError: ALREADY_EXISTS, there is or was one of this name.
        """
        secret = secrets.token_urlsafe(_SECRET_BYTES)
        operator = Operator(identity.name, identity.role, self._wall_clock(), hash_secret(secret))
        if not await put_if_unchanged(
            self._documents, _KIND, operator.name, _to_bytes(operator), 0
        ):
            raise MeshError(
                Code.ALREADY_EXISTS,
                f"operator {operator.name!r} exists, or was revoked: choose another name",
                field="operator.name",
                reason="OPERATOR_EXISTS",
            )
        return operator, f"{operator.name}.{secret}"

    async def list(self) -> list[Operator]:
        """Give all operators, in order of name."""
        return [_read(document) for document in await self._documents.list(_KIND)]

    async def revoke(self, name: str) -> Operator:
        """Refuse an operator from now on, also one that was not created here."""
        while True:
            found = await self._documents.get(_KIND, name)
            before = (
                Operator(name, Role.READ, self._wall_clock()) if found is None else _read(found)
            )
            revoked = replace(before, hashed="", is_revoked=True)
            revision = 0 if found is None else found.revision
            kept = _to_bytes(revoked)
            if await put_if_unchanged(self._documents, _KIND, name, kept, revision):
                return revoked

    async def identify(self, token: str) -> Identity:
        """Tell whose token it is.

        Raises:
            MeshError: UNAUTHENTICATED (TOKEN_INVALID), nobody's; (OPERATOR_REVOKED).
        """
        name, _, secret = token.rpartition(".")
        found = await self._get(name) if len(token) <= _MAX_TOKEN else None
        if found is not None and found.is_revoked:
            raise _revoked(name)
        kept = "" if found is None else found.hashed
        if found is None or not is_secret(secret, kept):
            raise MeshError(
                Code.UNAUTHENTICATED,
                "Authorization: not an operator's token; one is made with: meshnet operator create",
                field="Authorization",
                reason="TOKEN_INVALID",
            )
        return Identity(found.role, found.name)

    async def check(self, name: str) -> None:
        """Refuse an operator who is none any more.

        Raises:
            MeshError: UNAUTHENTICATED (OPERATOR_REVOKED).
        """
        found = await self._get(name)
        if found is not None and found.is_revoked:
            raise _revoked(name)

    async def _get(self, name: str) -> Operator | None:
        try:
            parse_identity(f"spiffe://mesh/{Role.READ.value}/{name}")
        except ValueError:
            return None
        found = await self._documents.get(_KIND, name)
        return None if found is None else _read(found)


def _revoked(name: str) -> MeshError:
    return MeshError(
        Code.UNAUTHENTICATED, f"operator {name!r} was revoked", reason="OPERATOR_REVOKED"
    )


def _to_bytes(operator: Operator) -> bytes:
    kept = {
        "role": operator.role.value,
        "created_s": operator.created_s,
        "sha256": operator.hashed,
        "revoked": operator.is_revoked,
    }
    return json.dumps(kept).encode()


def _read(document: Document) -> Operator:
    """Read what `_to_bytes` wrote.

    Raises:
        MeshError: DATA_LOSS, it is something else.
    """
    try:
        kept = json.loads(document.value)
        return Operator(
            document.key,
            Role(kept["role"]),
            float(kept["created_s"]),
            str(kept["sha256"]),
            is_revoked=bool(kept["revoked"]),
        )
    except (ValueError, TypeError, KeyError):
        raise MeshError(
            Code.DATA_LOSS, f"the record of operator {document.key!r} cannot be read"
        ) from None
