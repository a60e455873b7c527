"""The activation plane's client: chunks to other nodes over kept connections."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

import numpy.typing as npt

from meshnet.adaptive import EncodingChooser
from meshnet.cache_wire import MoveHeader, pack_move
from meshnet.choosers import LinkChoosers
from meshnet.chunk import Answer
from meshnet.compression import CompressionPolicies, CompressionResult
from meshnet.credentials import Credentials
from meshnet.dtypes import Body, view_bytes
from meshnet.errors import WireError
from meshnet.grammar import Phase
from meshnet.operations import (
    OwnerId,
    Rebuild,
    Release,
    Reservation,
    pack_rebuild,
    pack_release,
    pack_reservation,
)
from meshnet.plane.answers import (
    MAX_COLD_BYTES,
    AnswerReader,
    ColdAnswer,
    Received,
    check_done,
    check_released,
    cold_failure,
    hop_failure,
    learn,
)
from meshnet.plane.connection import Connection
from meshnet.plane.inbox import Inbox, Reading
from meshnet.plane.late import LateAnswers
from meshnet.plane.pool import ConnectionPool
from meshnet.plane.requests import (
    RequestMemo,
    pack_cold,
    pack_request,
    session_path,
)
from meshnet.plane.session_requests import OWNERS
from meshnet.plane.tls import name_node
from meshnet.topology import NodeId, SessionId
from meshnet.wire import DEFAULT_LIMITS, ChunkHeader, WireLimits

__all__ = ["PlaneClient"]

_SEND_ASIDE_BYTES: Final = 64 * 1024
"""A longer body is sent while an early answer is listened for."""
_INLINE_BYTES: Final = 256 * 1024
"""Bodies up to this are coded on the event loop: about 0.25 ms, twice a thread's handoff."""

_ATTEND_S: Final = 86_400.0

_T = TypeVar("_T")
_R = TypeVar("_R", Received, ColdAnswer)


class PlaneClient:
    """Sends chunks to nodes and reads their answers.

    Args:
        policies: decide which bodies are compressed.
        route_condition: the policies' name for the links that lead to the nodes.
        limits: on answers, checked before anything is allocated for them.
        connect_timeout_s: for one attempt to connect.
        max_connections: to one address at a time; a further request waits its turn.
        max_idle_connections: to one address, kept for the next request.
        tls: credentials, where connections are to be encrypted.
        late: asks nodes that are late whether they live; without, only timeouts tell.

    Attributes:
        choosers: what is known of the links, by address; may be read from any thread.

    Raises:
        ValueError: the policies know no such `route_condition`.
    """

    def __init__(
        self,
        *,
        policies: CompressionPolicies,
        route_condition: str = "lan",
        limits: WireLimits = DEFAULT_LIMITS,
        connect_timeout_s: float = 5.0,
        max_connections: int = 256,
        max_idle_connections: int = 32,
        tls: Credentials | None = None,
        late: LateAnswers | None = None,
    ) -> None:
        for phase in Phase:
            policies.for_condition(route_condition, phase.value)
        # Long bodies are coded in threads, whose times are recorded there.
        self.choosers = LinkChoosers(policies, route_condition, lock=threading.Lock())
        self._late = late
        self._answers = AnswerReader(limits)
        self._requests = RequestMemo()
        self._pool = ConnectionPool(
            connect_timeout_s=connect_timeout_s,
            max_open=max_connections,
            max_idle=max_idle_connections,
            tls=tls,
        )

    async def forward(
        self,
        address: str,
        node: NodeId,
        header: ChunkHeader,
        tensor: npt.NDArray[Any],
        *,
        timeout_s: float,
    ) -> Answer:
        """Send one chunk and give its answer, whose tensor is the caller's to keep.

        A request that fails on a kept connection before any byte of an answer is sent once
        more on a new one, if its header states a position: that makes it harmless, where a
        chunk that is appended could be appended twice.

        Args:
            address: ``host:port`` of the node's plane.
            node: named in errors.
            header: its encoding is set here, as the link and policy have it.
            tensor: of the header's shape and dtype; must not change until this returns.
            timeout_s: for everything, connecting included.

        Raises:
            NextHopError: the node could not be reached, did not answer in time or when
                asked whether it lives, or answered what is no answer.
            MeshError: what the node, or one after it, answered instead.
        """
        clock = asyncio.get_running_loop().time
        deadline = clock() + timeout_s
        try:
            raw = view_bytes(tensor)
            repeated = self._requests.repeat(address, header, raw)
            if repeated is not None:
                chooser, head, sent = repeated
            else:
                chooser, head, sent = await self._pack(address, header, raw)
            started = clock()
            with self._watched(address, node, header.phase, header.num_tokens):
                received = await self._exchange(
                    address,
                    node,
                    head,
                    sent.body,
                    lambda inbox: self._answers.read(inbox, header),
                    deadline,
                    repeatable=header.position is not None,
                )
            learn(chooser, sent, clock() - started, received)
            if received.error is None:
                return await _off_loop(
                    received.coded_bytes, lambda: received.decode(sent.output_bytes)
                )
        except (OSError, WireError) as error:
            raise hop_failure(error, address, node, timeout_s) from error
        raise name_node(received.error, address, node)

    async def _pack(
        self, address: str, header: ChunkHeader, raw: Body
    ) -> tuple[EncodingChooser, bytes, CompressionResult]:
        chooser = self.choosers.of(address)
        plan = chooser.choose(raw, header.phase, width=header.width)
        coded_bytes = 0 if plan.encoding is None else len(raw)
        head, sent = await _off_loop(
            coded_bytes, lambda: pack_request(address, header, raw, plan, chooser)
        )
        self._requests.keep(address, header, head, len(raw), plan, chooser)
        return chooser, head, sent

    async def reserve(
        self, address: str, node: NodeId, asked: Reservation, *, timeout_s: float
    ) -> None:
        """Open a session at a node and at the hops after it.

        Raises:
            NextHopError: as `forward`.
            MeshError: what the node, or one after it, answered instead; nothing is held then.
        """
        head = pack_cold(address, "PUT", session_path(asked.session), pack_reservation(asked))
        try:
            with self._watched(address, node, Phase.DECODE, 0):
                answer = await self._cold(address, node, head, timeout_s)
        except (OSError, WireError) as error:
            raise hop_failure(error, address, node, timeout_s) from error
        check_done(answer)

    async def move(
        self, address: str, node: NodeId, asked: MoveHeader, *, timeout_s: float
    ) -> None:
        """Have a node hand a session's cache to other nodes and forget the session.

        Raises:
            NextHopError: as `forward`; the cache may have moved.
            MeshError: what the node, or one that was to take the cache, answered instead.
        """
        path = f"{session_path(asked.session)}/move"
        head = pack_cold(address, "POST", path, pack_move(asked))
        try:
            with self._watched(address, node, Phase.PREFILL, 0):
                answer = await self._cold(address, node, head, timeout_s)
        except (OSError, WireError) as error:
            raise hop_failure(error, address, node, timeout_s) from error
        check_done(answer)

    async def rebuild(
        self, address: str, node: NodeId, asked: Rebuild, *, timeout_s: float
    ) -> None:
        """Have a node feed its journal of a session to the hops that replace those after it.

        Raises:
            NextHopError: as `forward`; a replacement that failed is named too.
            MeshError: what the node, or a replacement, answered instead.
        """
        path = session_path(asked.session, "/rebuild")
        head = pack_cold(address, "POST", path, pack_rebuild(asked))
        try:
            with self._watched(address, node, Phase.PREFILL, 0):
                answer = await self._cold(address, node, head, timeout_s)
        except (OSError, WireError) as error:
            raise hop_failure(error, address, node, timeout_s) from error
        check_done(answer)

    async def release(
        self,
        address: str,
        session: SessionId,
        *,
        alone: bool = False,
        timeout_s: float = 5.0,
        node: NodeId | None = None,
    ) -> None:
        """Free what a session holds at a node, and along its route unless `alone`.

        `node` is the one that is to be reached, where that is known.

        Raises:
            MeshError: UNAVAILABLE or DEADLINE_EXCEEDED, or what the node answered.
        """
        fields = pack_release(Release(session, alone))
        head = pack_cold(address, "DELETE", session_path(session), fields)
        try:
            answer = await self._cold(address, node, head, timeout_s)
        except (OSError, WireError) as error:
            raise cold_failure(error, address, timeout_s) from error
        check_released(answer)

    async def attend(self, address: str, owner: OwnerId, *, node: NodeId | None = None) -> None:
        """Show a node that the owner of sessions lives, until the node or the connection ends.

        Raises:
            MeshError: UNAVAILABLE; or what the node answered, as NOT_FOUND where it does not
                know owners.
        """
        head = pack_cold(address, "POST", f"{OWNERS}{owner}")
        try:
            answer = await self._cold(address, node, head, _ATTEND_S)
        except (OSError, WireError) as error:
            raise cold_failure(error, address, _ATTEND_S) from error
        check_done(answer)

    async def get(
        self, address: str, path: str, *, timeout_s: float, node: NodeId | None = None
    ) -> tuple[int, bytes]:
        """Get a cold resource, as ``/healthz``: its status and its body of at most 16 MiB.

        Raises:
            MeshError: UNAVAILABLE or DEADLINE_EXCEEDED.
        """
        try:
            answer = await self._cold(address, node, pack_cold(address, "GET", path), timeout_s)
        except (OSError, WireError) as error:
            raise cold_failure(error, address, timeout_s) from error
        return answer.head.status, answer.body

    async def close(self) -> None:
        """Close idle connections now, and those in use when their request ends."""
        self._pool.close()

    def _watched(
        self, address: str, node: NodeId, phase: Phase, num_tokens: int
    ) -> AbstractContextManager[None]:
        late = self._late
        if late is None:
            return contextlib.nullcontext()
        return late.waiting(address, node, phase, num_tokens)

    async def _cold(
        self, address: str, node: NodeId | None, head: bytes, timeout_s: float
    ) -> ColdAnswer:
        """Send a request without a body, which may be repeated, and read its answer."""
        return await self._exchange(
            address,
            node,
            head,
            b"",
            lambda inbox: self._answers.read_cold(inbox, MAX_COLD_BYTES),
            asyncio.get_running_loop().time() + timeout_s,
            repeatable=True,
        )

    async def _exchange(
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


async def _off_loop(num_bytes: int, work: Callable[[], _T]) -> _T:
    """Run `work` here where it is short, else in a thread (the codecs release the GIL)."""
    return work() if num_bytes <= _INLINE_BYTES else await asyncio.to_thread(work)
