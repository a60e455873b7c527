"""Keeps a certificate good: renews it at half of its life, for as long as the process runs."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from meshnet.errors import MeshError
from meshnet.tasks import Background

__all__ = ["Due", "Renewal"]

_log = logging.getLogger(__name__)

_MAX_RETRY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Due:
    """When a certificate is to be renewed, and when it ends; seconds since 1970."""

    renew_s: float
    expire_s: float


class Renewal(Background):
    """Renews in the background: `start`, until `close`.

    What was renewed is in use from the next connection on; open ones stay open.

    Args:
        what: named in the log.
        due: of the certificate in use.
        renew: gets a new one in its place; gives when that is due.
        on_renewed: takes it into use.
        wall_clock: seconds since 1970.
    """

    def __init__(
        self,
        what: str,
        due: Due,
        renew: Callable[[], Awaitable[Due]],
        on_renewed: Callable[[], None],
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self._what = what
        self._due = due
        self._renew = renew
        self._on_renewed = on_renewed
        self._wall_clock = wall_clock

    async def _run(self) -> None:
        while True:
            half_s = max(self._due.expire_s - self._due.renew_s, 0.1)
            # Clocks differ: neither at once again, nor later than half a life from now.
            delay_s = min(max(self._due.renew_s - self._wall_clock(), 0.0), half_s)
            await asyncio.sleep(delay_s * random.uniform(0.9, 1.0))  # noqa: S311 - no secret
            self._due = await self._renew_at_last(half_s)
            await asyncio.sleep(half_s / 10)

    async def _renew_at_last(self, half_s: float) -> Due:
        """Try until it is done, ever more rarely, but often enough while there is time."""
        pause_s = half_s / 50
        while True:
            try:
                due = await self._renew()
                self._on_renewed()
            except MeshError as error:
                left_s = self._due.expire_s - self._wall_clock()
                state = f"ends in {left_s:.0f} s" if left_s > 0 else "has ended"
                _log.warning("%s: the certificate %s: renewal failed: %s", self._what, state, error)
            else:
                _log.info("%s: the certificate is renewed", self._what)
                return due
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # noqa: S311 - no secret
            pause_s = min(2 * pause_s, max(half_s / 10, 0.1), _MAX_RETRY_S)
