"""Signs route grants, and publishes the keys that they are checked with.

Each process makes its own key pairs. The private halves never leave it; the public ones are
documents, which all replicas read and pass on to nodes.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import secrets
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from meshnet.control.documents import Document, Documents
from meshnet.control.fresh import Fresh
from meshnet.control.removed_keys import RemovedKeys
from meshnet.errors import Code, MeshError
from meshnet.grants import Grant, GrantKey, sign
from meshnet.topology import Route, SessionId
from meshnet.v1 import types_pb2

__all__ = ["GrantIssuer", "GrantTimes", "Issued"]

KIND: Final = "grant-keys"
_MAX_KEYS: Final = 64
_READ_EVERY_S: Final = 0.25

_log = logging.getLogger(__name__)


class GrantTimes(NamedTuple):
    """How long grants and keys last, in seconds.

    Attributes:
        ttl_s: of a grant.
        key_life_s: how long a key signs; it checks grants for twice `ttl_s` longer, or
            `lead_s` if that is more.
        lead_s: how long before it signs a key is published, so that nodes know it.
        refresh_s: how often other replicas' keys are read.
    """

    ttl_s: float = 60.0
    key_life_s: float = 3600.0
    lead_s: float = 120.0
    refresh_s: float = 5.0


class Issued(NamedTuple):
    """A grant as text, and the seconds for which it can be shown to nodes."""

    grant: str
    ttl_s: float


class _Pair(NamedTuple):
    private: Ed25519PrivateKey
    key: GrantKey
    key_id: str
    signs_until: float


class GrantIssuer:
    """Issues grants: `start`, until `close`.

    Args:
        documents: where keys are published.
        times: see there.
        clock: Unix seconds.
        removed: keys of removed members, which are published beside these.
    """

    def __init__(
        self,
        documents: Documents,
        times: GrantTimes | None = None,
        *,
        clock: Callable[[], float] = time.time,
        removed: RemovedKeys | None = None,
    ) -> None:
        self._documents = documents
        self._removed = removed
        self._times = times or GrantTimes()
        self._clock = clock
        self._keys: dict[str, GrantKey] = {}
        self._signing: _Pair | None = None
        self._coming: _Pair | None = None
        self._fresh = Fresh(self._read, _READ_EVERY_S)
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Publish a key to sign with.

        Raises:
            MeshError: the documents are away.
        """
        self._signing = await self._make(self._clock())
        await self._read()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Issue no more; the keys go when what they have signed has expired."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait({self._task})
        self._task = None
        until = int(self._clock() + 2 * self._times.ttl_s)
        try:
            for pair in filter(None, (self._signing, self._coming)):
                await self._publish(GrantKey(pair.key.public, until))
        except MeshError as error:
            _log.warning("this process's grant keys stay published until they expire: %s", error)

    def issue(
        self, session: SessionId, route: Route, incarnations: tuple[int, ...], gateway: str = ""
    ) -> Issued:
        """Sign a grant, for a gateway where it is known who asks.

        Raises:
            MeshError: UNAVAILABLE, there is no key to sign with; or of `sign`.
        """
        pair, now = self._signing, self._clock()
        expires_s = int(now + self._times.ttl_s)
        if pair is None or expires_s > pair.key.expires_s:
            raise MeshError(
                Code.UNAVAILABLE,
                "no key to sign route grants with: its successor could not be published",
                reason="GRANT_KEY_MISSING",
                retry_after_s=self._times.refresh_s,
            )
        grant = Grant(secrets.token_urlsafe(9), session, route, incarnations, expires_s, gateway)
        return Issued(sign(grant, pair.private, pair.key_id), self._times.ttl_s)

    async def policy(self, key_id: str = "") -> types_pb2.GrantPolicy:
        """Say how nodes are to check grants, and who is a member no more.

        Args:
            key_id: a key that a node has met; looked for anew where it is not known.

        Raises:
            MeshError: it was looked for, and the documents are away.
        """
        if key_id and key_id not in self._keys:
            await self._fresh.read()
        now = self._clock()
        living = [(key.expires_s, name) for name, key in self._keys.items() if key.expires_s > now]
        policy = types_pb2.GrantPolicy(required=True)
        policy.time.FromNanoseconds(int(now * 1e9))
        for expires_s, name in sorted(living, reverse=True)[:_MAX_KEYS]:
            key = policy.keys.add(key_id=name, public_key=self._keys[name].public_bytes)
            key.expire_time.FromSeconds(expires_s)
        if self._removed is not None:
            self._removed.publish(policy)
        return policy

    async def turn(self) -> None:
        """Change keys where it is time to; read those of others, and remove what has expired.

        Raises:
            MeshError: the documents are away.
        """
        now, signing = self._clock(), self._signing
        if signing is not None and now >= signing.signs_until - self._times.lead_s:
            if self._coming is None:
                self._coming = await self._make(max(now, signing.signs_until))
            if now >= signing.signs_until:
                self._signing, self._coming = self._coming, None
        for name in await self._read():
            await self._documents.delete(KIND, name)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._times.refresh_s)
            try:
                await self.turn()
            except MeshError as error:
                _log.warning("keys of route grants: %s", error)

    async def _make(self, signs_from: float) -> _Pair:
        times = self._times
        signs_until = signs_from + times.key_life_s
        private = Ed25519PrivateKey.generate()
        expires_s = int(signs_until + max(2 * times.ttl_s, times.lead_s))
        key = GrantKey(private.public_key(), expires_s)
        await self._publish(key)
        self._keys[key.key_id] = key
        return _Pair(private, key, key.key_id, signs_until)

    async def _publish(self, key: GrantKey) -> None:
        value = {
            "public_key": base64.b64encode(key.public_bytes).decode(),
            "expires_s": key.expires_s,
        }
        await self._documents.put(KIND, key.key_id, json.dumps(value).encode())

    async def _read(self) -> list[str]:
        """Take in the keys that are published; gives those that expired long ago."""
        now, keys, old = self._clock(), {}, []
        for document in await self._documents.list(KIND):
            key = _key_of(document)
            if key is None or key.expires_s + self._times.ttl_s < now:
                old.append(document.key)
            else:
                keys[document.key] = key
        for pair in filter(None, (self._signing, self._coming)):
            keys[pair.key_id] = pair.key
        self._keys = keys
        return old


def _key_of(document: Document) -> GrantKey | None:
    """Read a published key; None where it is not one, or not under its own name."""
    try:
        value = json.loads(document.value)
        public_key = base64.b64decode(value["public_key"], validate=True)
        key = GrantKey.of(public_key, int(value["expires_s"]))
    except (ValueError, KeyError, TypeError):
        _log.warning("document %s/%s is no key and is removed", KIND, document.key)
        return None
    return key if key.key_id == document.key else None
