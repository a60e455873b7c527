"""Requests of the plane and their answers over kept connections, on the threads that ask."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Final, TypeVar

from meshnet.dtypes import Body
from meshnet.plane.answers import AnswerReader, ColdAnswer, Received
from meshnet.plane.caller import Caller
from meshnet.plane.hop_pool import HopPool
from meshnet.plane.links import LinkSettings
from meshnet.plane.stream import Stream
from meshnet.topology import NodeId

__all__ = ["HopRoundTrips"]

_LISTEN_ASIDE_BYTES: Final = 64 * 1024
"""While a longer body is sent, an early answer is listened for."""
_MAX_COLD_BYTES: Final = 64 * 1024

_R = TypeVar("_R", Received, ColdAnswer)


class HopRoundTrips:
    """The round trips of one client.

    Args:
        settings: of the client.

    Attributes:
        answers: reads them.
    """

    def __init__(self, settings: LinkSettings) -> None:
        self.answers = AnswerReader(settings.limits)
        self._pool = HopPool(settings)

    def prune(self) -> None:
        """Close kept connections that rested for long or that their node has closed."""
        self._pool.prune()

    def close(self) -> None:
        """Close idle connections now, and those in use when their request ends."""
        self._pool.close()

    def cold(
        self,
        address: str,
        node: NodeId | None,
        head: bytes,
        timeout_s: float,
        caller: Caller | None = None,
        body: Body | list[memoryview] = b"",
    ) -> ColdAnswer:
        """Send a request that may be repeated, and read its answer."""
        return self.exchange(
            address,
            node,
            head,
            body,
            lambda stream: stream.run(self.answers.read_cold(stream.inbox, _MAX_COLD_BYTES)),
            monotonic() + timeout_s,
            repeatable=True,
            caller=caller,
        )

    def exchange(
        self,
        address: str,
        node: NodeId | None,
        head: bytes,
        body: Body | list[memoryview],
        read: Callable[[Stream], _R],
        deadline: float,
        *,
        repeatable: bool,
        caller: Caller | None,
    ) -> _R:
        """Send one request and read its answer by `read`; any failure closes the connection."""
        stream, reused = self._pool.acquire(address, node, deadline)
        received = stream.inbox.received
        try:
            return self._exchange_on(address, stream, head, body, read, caller)
        except TimeoutError:
            raise
        except OSError:
            if not (repeatable and reused) or stream.inbox.received != received:
                raise
        # The node closed the kept connection, perhaps as this request was under way.
        stream, _ = self._pool.acquire(address, node, deadline, fresh=True)
        return self._exchange_on(address, stream, head, body, read, caller)

    def _exchange_on(
        self,
        address: str,
        stream: Stream,
        head: bytes,
        body: Body | list[memoryview],
        read: Callable[[Stream], _R],
        caller: Caller | None,
    ) -> _R:
        reusable = False
        try:
            if caller is None:
                sent, received = _send(stream, head, body), read(stream)
            else:
                with caller.waking(stream.abort):
                    sent, received = _send(stream, head, body), read(stream)
            reusable = received.reusable and sent
            return received
        except OSError:
            if caller is not None:
                caller.check()
            raise
        finally:
            self._pool.release(address, stream, reusable=reusable)


def _send(stream: Stream, head: bytes, body: Body | list[memoryview]) -> bool:
    """Send a request; False where the node answers early, or closes: its answer counts."""
    try:
        if isinstance(body, list):
            return stream.send_unless_answered(head, *body)
        if len(body) > _LISTEN_ASIDE_BYTES:
            return stream.send_unless_answered(head, body)
        stream.send(head, body)
    except TimeoutError:
        raise
    except OSError:
        return False
    return True
