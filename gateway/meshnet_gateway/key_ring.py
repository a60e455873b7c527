"""The API keys that a gateway accepts, with what each of them has in use here.

Keys are read again every second. So a key that is revoked opens nothing a second later, and what
it had in progress is cut off. While the store is away, keys go on for `MAX_AGE_S`, then none does.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from meshnet.control.api_keys import ApiKey, list_api_keys, matches, public_id
from meshnet.control.documents import Documents
from meshnet.errors import Code, MeshError
from meshnet_gateway.rate_limit import TokenBucket

__all__ = ["MAX_AGE_S", "REFRESH_S", "KeyRing", "KeyUse"]

REFRESH_S: Final = 1.0
MAX_AGE_S: Final = 30.0
"""How long keys are believed that could not be read again."""

_MIN_AGE_S: Final = 0.1
"""Keys are not read again sooner for an id that is not among them."""

_SCHEME: Final = "bearer"
_log = logging.getLogger(__name__)


class KeyUse:
    """A key, and what it has in use at this gateway.

    Attributes:
        key: see there.
        bucket: of its requests; None without a limit.
        running: tasks that answer its completions.
    """

    def __init__(self, key: ApiKey, now_s: float) -> None:
        self.key = key
        limit = key.requests_per_minute
        self.bucket = None if limit is None else TokenBucket(limit, now_s)
        self.running: set[asyncio.Task[object]] = set()

    def begin(self, task: asyncio.Task[object], now_s: float) -> None:
        """Count a completion that `task` answers; `end` it.

        Raises:
            MeshError: RESOURCE_EXHAUSTED, it is one too many.
        """
        key = self.key
        if key.streams is not None and len(self.running) >= key.streams:
            raise _too_many(
                f"API key {key.name}: {len(self.running)} completions are in progress; expected at"
                f" most {key.streams} at a time",
                1.0,
            )
        wait_s = 0.0 if self.bucket is None else self.bucket.take(now_s)
        if wait_s:
            raise _too_many(
                f"API key {key.name}: rate limit of {key.requests_per_minute} requests a minute"
                f" reached; try again in {wait_s:.1f} s",
                wait_s,
            )
        self.running.add(task)

    def end(self, task: asyncio.Task[object]) -> None:
        """Count a completion no more."""
        self.running.discard(task)

    def headers(self, now_s: float) -> dict[str, str]:
        """Give the header fields of an answer that tell the rate limit."""
        return {} if self.bucket is None else self.bucket.headers(now_s)


class KeyRing:
    """Checks keys, from `open` until `close`.

    Args:
        documents: where keys are kept; closed with this.
        clock: monotonic seconds.
    """

    def __init__(
        self, documents: Documents, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._documents = documents
        self._clock = clock
        self._uses: dict[str, KeyUse] = {}
        self._read_s = -MAX_AGE_S
        self._reading: asyncio.Task[None] | None = None
        self._following: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Read the keys, and follow them from now on.

        Raises:
            MeshError: UNAVAILABLE, or the store cannot be used.
        """
        await self._documents.open()
        await self._refresh()
        self._following = asyncio.create_task(self._follow())

    async def close(self) -> None:
        """Follow them no more."""
        tasks = [task for task in (self._following, self._reading) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._documents.close()

    async def check(self, authorization: str | None) -> KeyUse:
        """Give the key that an ``Authorization`` field holds.

        Raises:
            MeshError: UNAUTHENTICATED, it holds none that is valid; UNAVAILABLE, the store is
                away for longer than keys are believed.
        """
        if authorization is None:
            raise _refused("no API key was given; expected Authorization: Bearer and a key")
        scheme, _, text = authorization.partition(" ")
        text = text.strip()
        key_id = public_id(text) if scheme.lower() == _SCHEME else None
        if key_id is None:
            raise _refused("Incorrect API key provided: expected Bearer and a text that begins mk-")
        await self._look_for(key_id)
        if self._clock() - self._read_s > MAX_AGE_S:
            await self._try_refresh()
        if self._clock() - self._read_s > MAX_AGE_S:
            raise MeshError(
                Code.UNAVAILABLE,
                "API keys cannot be checked now: their store is away",
                reason="KEYS_UNAVAILABLE",
                retry_after_s=1.0,
            )
        use = self._uses.get(key_id)
        if use is None or not matches(use.key, text):
            raise _refused("Incorrect API key provided: it is unknown or was revoked")
        return use

    async def _look_for(self, key_id: str) -> None:
        """Read the keys until `key_id` is among them, or was not after now."""
        asked_s = self._clock()
        while key_id not in self._uses and self._read_s < asked_s:
            too_young_s = self._read_s + _MIN_AGE_S - self._clock()
            if too_young_s > 0:
                await asyncio.sleep(too_young_s)
            elif not await self._try_refresh():
                return

    async def _follow(self) -> None:
        was_away = False
        while True:
            await asyncio.sleep(REFRESH_S)
            is_away = not await self._try_refresh()
            if is_away != was_away:
                _log.warning("the store of API keys is %s", "away" if is_away else "there again")
            was_away = is_away

    async def _try_refresh(self) -> bool:
        try:
            await self._refresh()
        except MeshError as error:
            _log.debug("API keys cannot be read: %s", error.message)
            return False
        return True

    async def _refresh(self) -> None:
        """Read the keys; those who ask meanwhile share one reading."""
        reading = self._reading
        if reading is None:
            reading = self._reading = asyncio.create_task(self._read())
            reading.add_done_callback(self._done_reading)
        await asyncio.shield(reading)

    def _done_reading(self, task: asyncio.Task[None]) -> None:
        self._reading = None
        if not task.cancelled():
            task.exception()  # seen by those who wait, if any still do

    async def _read(self) -> None:
        began_s = self._clock()
        keys = await list_api_keys(self._documents)
        uses = {}
        for key in keys:
            known = self._uses.get(key.id)
            uses[key.id] = known if known and known.key == key else KeyUse(key, began_s)
        for use in self._uses.values():
            if uses.get(use.key.id) is not use:
                _log.info("API key %s was revoked", use.key.name)
                for task in use.running:
                    task.cancel()
        self._uses, self._read_s = uses, began_s


def _refused(message: str) -> MeshError:
    return MeshError(Code.UNAUTHENTICATED, message, reason="INVALID_API_KEY")


def _too_many(message: str, retry_after_s: float) -> MeshError:
    return MeshError(
        Code.RESOURCE_EXHAUSTED,
        message,
        reason="RATE_LIMIT_EXCEEDED",
        retry_after_s=retry_after_s,
    )
