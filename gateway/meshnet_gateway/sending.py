"""Chunks of one session on their way over a route: in order, several in flight."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt

from meshnet.chunk import Answer
from meshnet.grammar import Want
from meshnet.plane.client import PlaneClient
from meshnet.timing import parse_timings
from meshnet.topology import Hop, Route
from meshnet.wire import ChunkHeader
from meshnet_gateway.window import Window

__all__ = ["ChunkSender"]


class ChunkSender:
    """Sends the chunks of one session.

    Args:
        client: the activation plane's.
        window: how many are in flight; learns from their answers.
        max_tokens: tokens that the session will need in all, told with the first chunk.
        timeout_s: for one chunk through the whole route.
    """

    def __init__(
        self, client: PlaneClient, window: Window, *, max_tokens: int | None, timeout_s: float
    ) -> None:
        self._client = client
        self._window = window
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s

    async def send(
        self,
        route: Route,
        first: ChunkHeader,
        chunks: Sequence[npt.NDArray[Any]],
        wants: tuple[Want, Want],
        answers: list[Answer],
    ) -> None:
        """Send chunks in order, several in flight; puts their answers into `answers`.

        Args:
            route: over which.
            first: header of the first; what differs between them is set here.
            chunks: along the token axis.
            wants: of all but the last, and of the last.
            answers: also where this fails: those that came, without a gap.
        """
        in_flight: deque[asyncio.Task[Answer]] = deque()
        total, start = len(chunks), first.position or 0
        try:
            for index, chunk in enumerate(chunks):
                while len(in_flight) >= self._window.size:
                    answers.append(await self._take(in_flight))
                header = first._replace(
                    shape=chunk.shape,
                    chunk_index=index,
                    chunk_total=total,
                    position=start,
                    want=wants[index == total - 1],
                    max_tokens=self._max_tokens if start == 0 else None,
                )
                start += chunk.shape[1]
                in_flight.append(asyncio.create_task(self._forward(route[0], header, chunk)))
            while in_flight:
                answers.append(await self._take(in_flight))
        finally:
            for task in in_flight:
                task.cancel()
            await asyncio.gather(*in_flight, return_exceptions=True)

    async def _take(self, in_flight: deque[asyncio.Task[Answer]]) -> Answer:
        """Wait for the oldest chunk's answer, and learn of the stages from it."""
        answer = await in_flight.popleft()
        self._window.observe(parse_timings(answer.header.server_timing))
        return answer

    async def _forward(self, first: Hop, header: ChunkHeader, chunk: npt.NDArray[Any]) -> Answer:
        return await self._client.forward(
            first.address, first.node, header, chunk, timeout_s=self._timeout_s
        )
