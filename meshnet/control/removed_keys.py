"""Keys of members that were removed: their certificates are good for nothing, whatever they say."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Final

from meshnet.control.documents import Documents
from meshnet.errors import Code, MeshError
from meshnet.tasks import end_task
from meshnet.v1 import types_pb2

__all__ = ["RemovedKeys", "removed_in"]

_KIND: Final = "removed-keys"
_READ_EVERY_S: Final = 1.0
_MAX_PUBLISHED: Final = 1024

_log = logging.getLogger(__name__)


class RemovedKeys:
    """Knows the keys that any replica has removed, a second later at most.

    While the store is away, those known last count: members keep their leases through that.

    Args:
        documents: where they are kept; open from `start` to `close`.
        wall_clock: seconds since 1970.
    """

    def __init__(self, documents: Documents, wall_clock: Callable[[], float] = time.time) -> None:
        self._documents = documents
        self._wall_clock = wall_clock
        self._known: Mapping[str, float] = {}
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read them, and go on to.

        Raises:
            MeshError: UNAVAILABLE.
        """
        await self._read()
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Read no more."""
        await end_task(self._task)

    async def add(self, key_sha256: str, until_s: float) -> None:
        """Refuse a key.

        Args:
            key_sha256: of the public key, in hexadecimal.
            until_s: end of the last certificate for it, after which it need not be known.

        Raises:
            MeshError: UNAVAILABLE.
        """
        await self._documents.put(_KIND, key_sha256, json.dumps({"until_s": until_s}).encode())
        self._known = {**self._known, key_sha256: until_s}

    def check(self, key_sha256: str) -> None:
        """Refuse a key that was removed.

        Raises:
            MeshError: UNAUTHENTICATED (MEMBER_REMOVED).
        """
        if key_sha256 in self._known:
            raise MeshError(
                Code.UNAUTHENTICATED,
                "the member with this certificate's key was removed: join again by a new token",
                reason="MEMBER_REMOVED",
            )

    def publish(self, policy: types_pb2.GrantPolicy) -> None:
        """Say which keys nodes and gateways are to refuse: at most 1,024, those that end last."""
        living = sorted((until_s, key) for key, until_s in self._known.items())
        for until_s, key in living[-_MAX_PUBLISHED:]:
            published = policy.removed_keys.add(key_sha256=bytes.fromhex(key))
            published.expire_time.FromSeconds(math.ceil(until_s))

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_READ_EVERY_S)
            try:
                await self._read()
            except MeshError as error:
                _log.info("removed members are not read: %s", error)

    async def _read(self) -> None:
        known = {}
        for key, value, _ in await self._documents.list(_KIND):
            until_s = float(json.loads(value)["until_s"])
            if until_s > self._wall_clock():
                known[key] = until_s
            else:
                await self._documents.delete(_KIND, key)
        if len(known) > _MAX_PUBLISHED >= len(self._known):
            _log.warning(
                "%d members were removed whose certificates have not ended; nodes and gateways hear"
                " of %d: change the authority's key with meshnet control rotate-ca --overlap 0",
                len(known),
                _MAX_PUBLISHED,
            )
        self._known = known


def removed_in(policy: types_pb2.GrantPolicy) -> dict[str, int]:
    """Read what `RemovedKeys.publish` wrote: seconds until when to know a key, by its hash."""
    return {key.key_sha256.hex(): key.expire_time.ToSeconds() for key in policy.removed_keys}
