"""The activation plane's client: chunks to other nodes over kept connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

import numpy.typing as npt

from meshnet.adaptive import EncodingChooser
from meshnet.cache_wire import MoveHeader, pack_move
from meshnet.chunk import Answer
from meshnet.compression import CompressionResult
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
    ColdAnswer,
    check_done,
    check_released,
    cold_failure,
    hop_failure,
    learn,
)
from meshnet.plane.late import LateAnswers
from meshnet.plane.links import LinkSettings
from meshnet.plane.requests import (
    RequestMemo,
    pack_cold,
    pack_request,
    session_path,
)
from meshnet.plane.round_trips import RoundTrips
from meshnet.plane.session_requests import OWNERS
from meshnet.plane.tls import name_node
from meshnet.topology import NodeId, SessionId
from meshnet.wire import ChunkHeader

__all__ = ["PlaneClient"]

_INLINE_BYTES: Final = 256 * 1024
"""Bodies up to this are coded on the event loop: about 0.25 ms, twice a thread's handoff."""

_ATTEND_S: Final = 86_400.0

_T = TypeVar("_T")


class PlaneClient:
    """Sends chunks to nodes and reads their answers.

    Args:
        settings: of the links to the nodes.
        late: asks nodes that are late whether they live; without, only timeouts tell.

    Attributes:
        choosers: what is known of the links, by address; may be read from any thread.
    """

    def __init__(
        self, settings: LinkSettings | None = None, late: LateAnswers | None = None
    ) -> None:
        settings = settings or LinkSettings()
        self.choosers = settings.choosers()
        self._late = late
        self._requests = RequestMemo()
        self._trips = RoundTrips(settings)
        self._answers = self._trips.answers
        self._exchange = self._trips.exchange

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
        await self._ask(address, node, head, Phase.DECODE, timeout_s)

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
        await self._ask(address, node, head, Phase.PREFILL, timeout_s)

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
        await self._ask(address, node, head, Phase.PREFILL, timeout_s)

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
        check_released(await self._cold(address, node, head, timeout_s))

    async def attend(self, address: str, owner: OwnerId, *, node: NodeId | None = None) -> None:
        """Show a node that the owner of sessions lives, until the node or the connection ends.

        Raises:
            MeshError: UNAVAILABLE; or what the node answered, as NOT_FOUND where it does not
                know owners.
        """
        head = pack_cold(address, "POST", f"{OWNERS}{owner}")
        check_done(await self._cold(address, node, head, _ATTEND_S))

    async def get(
        self, address: str, path: str, *, timeout_s: float, node: NodeId | None = None
    ) -> tuple[int, bytes]:
        """Get a cold resource, as ``/healthz``: its status and its body of at most 16 MiB.

        Raises:
            MeshError: UNAVAILABLE or DEADLINE_EXCEEDED.
        """
        answer = await self._cold(address, node, pack_cold(address, "GET", path), timeout_s)
        return answer.head.status, answer.body

    async def close(self) -> None:
        """Close idle connections now, and those in use when their request ends."""
        self._trips.close()

    def _watched(
        self, address: str, node: NodeId, phase: Phase, num_tokens: int
    ) -> AbstractContextManager[None]:
        late = self._late
        if late is None:
            return contextlib.nullcontext()
        return late.waiting(address, node, phase, num_tokens)

    async def _ask(
        self, address: str, node: NodeId, head: bytes, phase: Phase, timeout_s: float
    ) -> None:
        """Have a node do what it works on, as long as a chunk of `phase` may take."""
        try:
            with self._watched(address, node, phase, 0):
                answer = await self._trips.cold(address, node, head, timeout_s)
        except (OSError, WireError) as error:
            raise hop_failure(error, address, node, timeout_s) from error
        check_done(answer)

    async def _cold(
        self, address: str, node: NodeId | None, head: bytes, timeout_s: float
    ) -> ColdAnswer:
        try:
            return await self._trips.cold(address, node, head, timeout_s)
        except (OSError, WireError) as error:
            raise cold_failure(error, address, timeout_s) from error


async def _off_loop(num_bytes: int, work: Callable[[], _T]) -> _T:
    """Run `work` here where it is short, else in a thread (the codecs release the GIL)."""
    return work() if num_bytes <= _INLINE_BYTES else await asyncio.to_thread(work)
