"""Join tokens as the control plane keeps them: the secret only as a hash."""

from __future__ import annotations

import json
import secrets
import string
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from meshnet.control.documents import Document, Documents, put_if_unchanged
from meshnet.control.hashed import hash_secret, is_secret
from meshnet.errors import Code, MeshError
from meshnet.identity import Role
from meshnet.join import PUBLIC_PART, SECRET_PART
from meshnet.topology import LayerRange

__all__ = ["JoinToken", "JoinTokens", "TokenSpec"]

MAX_TOKENS: Final = 1000
_KIND: Final = "join-tokens"
_PUBLIC_CHARS: Final = 10
_SECRET_BYTES: Final = 16
_ALPHABET: Final = string.ascii_lowercase + string.digits
_KEEP_ENDED_S: Final = 24 * 3600.0
_TRIES: Final = 20


@dataclass(frozen=True, slots=True)
class TokenSpec:
    """What a token admits.

    Attributes:
        role: of those who join by it.
        name_pattern: as the schema says; empty for any name.
        max_uses: how many may join; 0 for no limit.
        model: for a node; empty for none.
        layers: for a node.
    """

    role: Role
    name_pattern: str = ""
    max_uses: int = 1
    model: str = ""
    layers: LayerRange | None = None

    def admits(self, name: str) -> bool:
        """Whether somebody of this name may join."""
        if not self.name_pattern:
            return True
        first, *others = self.name_pattern.split("*")
        if not others:
            return name == first
        *between, last = others
        at = len(first)
        if not name.startswith(first) or len(name) - at < len(last) or not name.endswith(last):
            return False
        end = len(name) - len(last)
        for part in between:
            found = name.find(part, at, end)
            if found < 0:
                return False
            at = found + len(part)
        return True


@dataclass(frozen=True, slots=True)
class JoinToken:
    """One token.

    Attributes:
        public: names it.
        spec: what it admits.
        hashed: SHA-256 of the secret, in hexadecimal.
        expire_s: when it ends, seconds since 1970.
        used: how many have joined by it.
    """

    public: str
    spec: TokenSpec
    hashed: str
    expire_s: float
    used: int = 0


class JoinTokens:
    """Creates, checks, counts and deletes join tokens; all replicas the same.

    Args:
        documents: where they are kept; they are open.
        wall_clock: seconds since 1970.
    """

    def __init__(self, documents: Documents, wall_clock: Callable[[], float] = time.time) -> None:
        self._documents = documents
        self._wall_clock = wall_clock

    async def create(self, spec: TokenSpec, ttl_s: float) -> tuple[JoinToken, str]:
        """Create a token; gives its secret too, which cannot be given again.

        Raises:
            MeshError: RESOURCE_EXHAUSTED, there are too many.
        """
        now_s = self._wall_clock()
        alive = 0
        for token in await self.list():
            if token.expire_s + _KEEP_ENDED_S < now_s:
                await self.delete(token.public)
            else:
                alive += 1
        if alive >= MAX_TOKENS:
            raise MeshError(
                Code.RESOURCE_EXHAUSTED,
                f"there are {alive} join tokens: delete some first",
                reason="TOO_MANY_JOIN_TOKENS",
            )
        public = "".join(secrets.choice(_ALPHABET) for _ in range(_PUBLIC_CHARS))
        secret = secrets.token_urlsafe(_SECRET_BYTES)
        token = JoinToken(public, spec, hash_secret(secret), now_s + ttl_s)
        await self._documents.put(_KIND, public, _to_bytes(token), expected=0)
        return token, secret

    async def list(self) -> list[JoinToken]:
        """Give all tokens, in order of their public part; also those that ended a while ago."""
        return [_read(document) for document in await self._documents.list(_KIND)]

    async def delete(self, public: str) -> bool:
        """Delete a token; tells whether there was one."""
        return await self._documents.delete(_KIND, public)

    async def check(self, credential: str) -> JoinToken:
        """Find the token whose secret the caller has shown; it may be used up.

        Args:
            credential: ``PUBLIC.SECRET``.

        Raises:
            MeshError: UNAUTHENTICATED (JOIN_TOKEN_REFUSED), there is none, or it has ended.
        """
        return (await self._find(credential))[0]

    async def use(self, credential: str) -> JoinToken:
        """Count one who joins; gives the token as it is then.

        Raises:
            MeshError: as `check`; also, it is used up.
        """
        for _ in range(_TRIES):
            token, revision = await self._find(credential)
            if 0 < token.spec.max_uses <= token.used:
                raise _refused(f"join token {token.public} is used up")
            used = replace(token, used=token.used + 1)
            kept = _to_bytes(used)
            if await put_if_unchanged(self._documents, _KIND, token.public, kept, revision):
                return used
            # Else somebody else joined meanwhile.
        raise MeshError(
            Code.UNAVAILABLE, "too many join at once: try again", reason="BUSY", retry_after_s=1.0
        )

    async def _find(self, credential: str) -> tuple[JoinToken, int]:
        public, _, secret = credential.partition(".")
        is_token = PUBLIC_PART.fullmatch(public) and SECRET_PART.fullmatch(secret)
        found = await self._documents.get(_KIND, public) if is_token else None
        token = None if found is None else _read(found)
        kept = "" if token is None else token.hashed
        if not is_secret(secret, kept) or found is None or token is None:
            raise _refused("not a join token of this mesh: it is wrong, or was deleted")
        if token.expire_s <= self._wall_clock():
            raise _refused(f"join token {public} has ended")
        return token, found.revision


def _refused(message: str) -> MeshError:
    return MeshError(
        Code.UNAUTHENTICATED,
        f"{message}; an operator makes one with: meshnet token create",
        field="join_token",
        reason="JOIN_TOKEN_REFUSED",
    )


def _to_bytes(token: JoinToken) -> bytes:
    spec = token.spec
    kept = {
        "sha256": token.hashed,
        "role": spec.role.value,
        "name_pattern": spec.name_pattern,
        "max_uses": spec.max_uses,
        "used": token.used,
        "expire_s": token.expire_s,
        "model": spec.model,
        "layers": None if spec.layers is None else [spec.layers.start, spec.layers.end],
    }
    return json.dumps(kept).encode()


def _read(document: Document) -> JoinToken:
    """Read what `_to_bytes` wrote.

    Raises:
        MeshError: DATA_LOSS, it is something else.
    """
    try:
        kept: Any = json.loads(document.value)
        layers = kept["layers"]
        spec = TokenSpec(
            Role(kept["role"]),
            str(kept["name_pattern"]),
            int(kept["max_uses"]),
            str(kept["model"]),
            None if layers is None else LayerRange(int(layers[0]), int(layers[1])),
        )
        return JoinToken(
            document.key, spec, str(kept["sha256"]), float(kept["expire_s"]), int(kept["used"])
        )
    except (ValueError, TypeError, KeyError, IndexError):
        raise MeshError(
            Code.DATA_LOSS, f"the record of join token {document.key!r} cannot be read"
        ) from None
