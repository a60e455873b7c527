"""Who has joined the mesh: names, and the key that holds each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from meshnet.certificates import CLOCK_SKEW_S
from meshnet.control.documents import Document, Documents, put_if_unchanged
from meshnet.control.removed_keys import RemovedKeys
from meshnet.errors import Code, MeshError
from meshnet.identity import Identity, Role

__all__ = ["Member", "Members"]

MAX_MEMBERS: Final = 10_000
_KIND: Final = "members"


@dataclass(frozen=True, slots=True)
class Member:
    """Somebody who has joined.

    Attributes:
        identity: role and name.
        key_sha256: of the public key, in hexadecimal.
        token: public part of the join token.
        joined_s: seconds since 1970.
        expire_s: when the last certificate ends, seconds since 1970.
        revision: of the record; 0 of one that is not kept yet.
    """

    identity: Identity
    key_sha256: str
    token: str
    joined_s: float
    expire_s: float
    revision: int = 0


class Members:
    """Keeps members; all replicas the same.

    Args:
        documents: where they are kept; they are open.
        removed: told of the keys of members that are removed.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        documents: Documents,
        removed: RemovedKeys,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._documents = documents
        self._removed = removed
        self._wall_clock = wall_clock

    async def get(self, identity: Identity) -> Member | None:
        """Give a member."""
        found = await self._documents.get(_KIND, _key(identity))
        return None if found is None else _read(found)

    async def list(self) -> list[Member]:
        """Give all members, in order of role and name."""
        return [_read(document) for document in await self._documents.list(_KIND)]

    async def make_room(self) -> None:
        """Forget members whose certificates have ended, where there are too many.

        Raises:
            MeshError: RESOURCE_EXHAUSTED, there still are.
        """
        members = await self.list()
        if len(members) < MAX_MEMBERS:
            return
        ended = [member for member in members if member.expire_s <= self._wall_clock()]
        for member in ended:
            await self._documents.delete(_KIND, _key(member.identity))
        if len(members) - len(ended) >= MAX_MEMBERS:
            raise MeshError(
                Code.RESOURCE_EXHAUSTED,
                f"the mesh has {MAX_MEMBERS} members: remove some first",
                reason="TOO_MANY_MEMBERS",
            )

    async def keep(self, member: Member) -> bool:
        """Keep a member, new or as changed since it was read.

        False, and nothing is kept, where somebody else changed it meanwhile.
        """
        kept = {
            "key_sha256": member.key_sha256,
            "token": member.token,
            "joined_s": member.joined_s,
            "expire_s": member.expire_s,
        }
        value, key = json.dumps(kept).encode(), _key(member.identity)
        return await put_if_unchanged(self._documents, _KIND, key, value, member.revision)

    async def remove(self, identity: Identity) -> bool:
        """Remove a member, whose certificates are refused then; tells whether there was one."""
        member = await self.get(identity)
        if member is None:
            return False
        await self._removed.add(member.key_sha256, member.expire_s + CLOCK_SKEW_S)
        return await self._documents.delete(_KIND, _key(identity))


def _key(identity: Identity) -> str:
    return f"{identity.role.value}.{identity.name}"


def _read(document: Document) -> Member:
    """Read what `Members.keep` wrote.

    Raises:
        MeshError: DATA_LOSS, it is something else.
    """
    try:
        role, _, name = document.key.partition(".")
        kept: Any = json.loads(document.value)
        return Member(
            Identity(Role(role), name),
            str(kept["key_sha256"]),
            str(kept["token"]),
            float(kept["joined_s"]),
            float(kept["expire_s"]),
            document.revision,
        )
    except (ValueError, TypeError, KeyError):
        raise MeshError(
            Code.DATA_LOSS, f"the record of member {document.key!r} cannot be read"
        ) from None
