"""The client for threads behind the asyncio client's calls, so that one test drives both."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from meshnet.chunk import Answer
from meshnet.errors import MeshError
from meshnet.plane.caller import Caller, CallerGoneError
from meshnet.plane.hop_client import HopClient
from meshnet.plane.links import LinkSettings
from meshnet.topology import SessionId


class ThreadedClient:
    """Calls `HopClient` on a thread for each request; cancelling is its caller's leaving."""

    def __init__(self, settings: LinkSettings | None = None) -> None:
        self._client = HopClient(settings)
        self._trips = self._client._trips
        self.choosers = self._client.choosers

    async def forward(self, *arguments: Any, timeout_s: float) -> Answer:
        caller = Caller()
        request = asyncio.create_task(
            asyncio.to_thread(self._client.forward, *arguments, timeout_s=timeout_s, caller=caller)
        )
        try:
            return await asyncio.shield(request)
        except asyncio.CancelledError:
            caller.leave()
            with contextlib.suppress(CallerGoneError, MeshError):
                await request
            raise

    async def reserve(self, *arguments: Any, timeout_s: float) -> None:
        await asyncio.to_thread(self._client.reserve, *arguments, timeout_s=timeout_s)

    async def release(self, address: str, session: SessionId, *, alone: bool = False) -> None:
        await asyncio.to_thread(self._client.release, address, session, alone=alone)

    async def close(self) -> None:
        self._client.close()
