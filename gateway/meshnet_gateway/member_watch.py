"""Hears from the control plane which members were removed, so that none of them is spoken to."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

from meshnet.control.client import ControlClient
from meshnet.control.removed_keys import removed_in
from meshnet.errors import MeshError
from meshnet.removals import Removals
from meshnet.tasks import Background

__all__ = ["MemberWatch"]

_log = logging.getLogger(__name__)

_ASK_EVERY_S: Final = 1.0


class MemberWatch(Background):
    """Asks the control plane every second: `start`, until `close`.

    While it is away, what is known goes on.

    Args:
        control: to ask.
        removals: of this gateway's credentials.
    """

    def __init__(self, control: ControlClient, removals: Removals) -> None:
        super().__init__()
        self._control = control
        self._removals = removals

    async def _run(self) -> None:
        while True:
            try:
                policy = await self._control.get_grant_policy()
            except MeshError as error:
                _log.debug("the control plane does not say who was removed: %s", error)
            else:
                now = policy.time.ToNanoseconds() / 1e9
                if self._removals.learn(removed_in(policy), now):
                    _log.info("members were removed from the mesh; their nodes are not used")
            await asyncio.sleep(_ASK_EVERY_S)
