"""Requests of the plane and their answers over kept connections, on the event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final, TypeVar

from meshnet.dtypes import Body
from meshnet.plane.answers import MAX_COLD_BYTES, AnswerReader, ColdAnswer, Received
from meshnet.plane.connection import Connection
from meshnet.plane.inbox import Inbox, Reading
from meshnet.plane.links import LinkSettings
from meshnet.plane.pool import ConnectionPool
from meshnet.topology import NodeId

__all__ = ["RoundTrips"]

_SEND_ASIDE_BYTES: Final = 64 * 1024
"""A longer body is sent while an early answer is listened for."""

_R = TypeVar("_R", Received, ColdAnswer)


class RoundTrips:
    """The round trips of one client.

    Args:
        settings: of the client.

    Attributes:
        answers: reads them.
    """

    def __init__(self, settings: LinkSettings) -> None:
        self.answers = AnswerReader(settings.limits)
        self._pool = ConnectionPool(settings)

    def close(self) -> None:
        """Close idle connections now, and those in use when their request ends."""
        self._pool.close()

    async def cold(
        self, address: str, node: NodeId | None, head: bytes, timeout_s: float
    ) -> ColdAnswer:
        """Send a request without a body, which may be repeated, and read its answer."""
        return await self.exchange(
            address,
            node,
            head,
            b"",
            lambda inbox: self.answers.read_cold(inbox, MAX_COLD_BYTES),
            asyncio.get_running_loop().time() + timeout_s,
            repeatable=True,
        )

    async def exchange(
        self,
        address: str,
        node: NodeId | None,
        head: bytes,
        body: Body,
        read: Callable[[Inbox], Reading[_R]],
        deadline: float,
        *,
        repeatable: bool,
    ) -> _R:
        """Send one request and read its answer by `read`; any failure closes the connection."""
        connection, reused = await self._pool.acquire(address, node, deadline)
        received = connection.inbox.received
        try:
            return await self._exchange_on(address, connection, head, body, read)
        except TimeoutError:
            raise
        except OSError:
            if not (repeatable and reused) or connection.inbox.received != received:
                raise
        # The node closed the kept connection, perhaps as this request was under way.
        connection, _ = await self._pool.acquire(address, node, deadline, fresh=True)
        return await self._exchange_on(address, connection, head, body, read)

    async def _exchange_on(
        self,
        address: str,
        connection: Connection,
        head: bytes,
        body: Body,
        read: Callable[[Inbox], Reading[_R]],
    ) -> _R:
        sending: asyncio.Task[None] | None = None
        reusable = False
        try:
            if len(body) > _SEND_ASIDE_BYTES:
                sending = asyncio.create_task(connection.send(head, body))
                sending.add_done_callback(_mark_retrieved)
            else:
                # A node that answers early and closes breaks the sending; its answer counts.
                with contextlib.suppress(OSError):
                    await connection.send(head, body)
            received = await connection.run(read(connection.inbox))
            reusable = received.reusable and (sending is None or sending.done())
            return received
        finally:
            if sending is not None:
                sending.cancel()
            self._pool.release(address, connection, reusable=reusable)


def _mark_retrieved(sending: asyncio.Task[None]) -> None:
    """Look at a sending's failure, which the reading side reports."""
    if not sending.cancelled():
        sending.exception()
