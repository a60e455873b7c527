"""The activation plane's client for threads: a node's chunks to the hop after."""

from __future__ import annotations

from time import monotonic
from typing import Any

import numpy.typing as npt

from meshnet.cache_wire import CacheHeader
from meshnet.chunk import Answer
from meshnet.dtypes import Body, view_bytes
from meshnet.errors import WireError
from meshnet.grammar import Phase
from meshnet.operations import Release, Reservation, pack_release, pack_reservation
from meshnet.patience import Flight
from meshnet.plane.answers import (
    Received,
    check_done,
    check_released,
    cold_failure,
    hop_failure,
    learn,
)
from meshnet.plane.caller import Caller
from meshnet.plane.hop_round_trips import HopRoundTrips
from meshnet.plane.late import LateAnswers
from meshnet.plane.links import LinkSettings
from meshnet.plane.requests import (
    RequestMemo,
    pack_cache_request,
    pack_cold,
    pack_request,
    session_path,
)
from meshnet.plane.stream import Stream
from meshnet.plane.tls import name_node
from meshnet.topology import NodeId, SessionId
from meshnet.wire import ChunkHeader

__all__ = ["HopClient"]


class HopClient:
    """Sends chunks to nodes and reads their answers, on the threads that call it.

    What crosses the plane, and which errors are raised, is as of `PlaneClient`.

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
        self._trips = HopRoundTrips(settings)
        self._answers = self._trips.answers
        self._exchange = self._trips.exchange

    def forward(
        self,
        address: str,
        node: NodeId,
        header: ChunkHeader,
        tensor: npt.NDArray[Any],
        *,
        timeout_s: float,
        caller: Caller | None = None,
    ) -> Answer:
        """Send one chunk and give its answer, whose tensor is the caller's to keep.

        Args:
            address: ``host:port`` of the node's plane.
            node: named in errors.
            header: its encoding is set here, as the link and policy have it.
            tensor: of the header's shape and dtype; must not change until this returns.
            timeout_s: for everything, connecting included.
            caller: who waits for the answer; the request ends when it leaves.

        Raises:
            NextHopError: the node could not be reached, did not answer in time or when
                asked whether it lives, or answered what is no answer.
            MeshError: what the node, or one after it, answered instead.
            CallerGoneError: `caller` left.
        """
        deadline = monotonic() + timeout_s
        try:
            raw = view_bytes(tensor)
            repeated = self._requests.repeat(address, header, raw)
            if repeated is not None:
                chooser, head, sent = repeated
            else:
                chooser = self.choosers.of(address)
                plan = chooser.choose(raw, header.phase, width=header.width)
                head, sent = pack_request(address, header, raw, plan, chooser)
                self._requests.keep(address, header, head, len(raw), plan, chooser)
            started = monotonic()
            flight = self._begin(address, node, header.phase, header.num_tokens, caller)
            received = None
            try:
                received = self._exchange(
                    address,
                    node,
                    head,
                    sent.body,
                    lambda stream: self._read_answer(stream, header),
                    deadline,
                    repeatable=header.position is not None,
                    caller=caller,
                )
            finally:
                self._end(flight, answered=received is not None)
            learn(chooser, sent, monotonic() - started, received)
            if received.error is None:
                return received.decode(sent.output_bytes)
        except (OSError, WireError) as error:
            raise hop_failure(error, address, node, timeout_s) from error
        raise name_node(received.error, address, node)

    def reserve(
        self,
        address: str,
        node: NodeId,
        asked: Reservation,
        *,
        timeout_s: float,
        caller: Caller | None = None,
    ) -> None:
        """Open a session at a node and at the hops after it.

        Raises:
            NextHopError: as `forward`.
            MeshError: what the node, or one after it, answered instead; nothing is held then.
            CallerGoneError: `caller` left.
        """
        head = pack_cold(address, "PUT", session_path(asked.session), pack_reservation(asked))
        self._ask(address, node, head, Phase.DECODE, timeout_s, caller)

    def send_cache(
        self,
        address: str,
        node: NodeId,
        header: CacheHeader,
        views: list[memoryview],
        *,
        timeout_s: float,
        caller: Caller | None = None,
    ) -> None:
        """Hand a session's KV cache to a node, straight from where it is kept.

        Args:
            address: as `forward`.
            node: as `forward`.
            header: says what follows.
            views: its bytes, in order; must not change until this returns.
            timeout_s: as `forward`.
            caller: as `forward`.

        Raises:
            NextHopError: as `forward`; the node may hold the cache.
            MeshError: what the node answered instead of holding it.
            CallerGoneError: `caller` left.
        """
        caller = caller or Caller()
        head = pack_cache_request(address, header)
        self._ask(address, node, head, Phase.PREFILL, timeout_s, caller, views)

    def release(
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
            answer = self._trips.cold(address, node, head, timeout_s)
        except (OSError, WireError) as error:
            raise cold_failure(error, address, timeout_s) from error
        check_released(answer)

    def prune(self) -> None:
        """Close kept connections that rested for long or that their node has closed."""
        self._trips.prune()

    def close(self) -> None:
        """Close idle connections now, and those in use when their request ends."""
        self._trips.close()

    def _ask(
        self,
        address: str,
        node: NodeId,
        head: bytes,
        phase: Phase,
        timeout_s: float,
        caller: Caller | None,
        body: Body | list[memoryview] = b"",
    ) -> None:
        """Have a node do what it works on, as long as a chunk of `phase` may take."""
        flight = self._begin(address, node, phase, 0, caller)
        answer = None
        try:
            answer = self._trips.cold(address, node, head, timeout_s, caller, body)
        except (OSError, WireError) as error:
            raise hop_failure(error, address, node, timeout_s) from error
        finally:
            self._end(flight, answered=answer is not None)
        check_done(answer)

    def _begin(
        self, address: str, node: NodeId, phase: Phase, num_tokens: int, caller: Caller | None
    ) -> Flight | None:
        if self._late is None or caller is None:
            return None
        return self._late.begin(address, node, phase, num_tokens, caller.interrupt)

    def _end(self, flight: Flight | None, *, answered: bool) -> None:
        if self._late is not None and flight is not None:
            self._late.end(flight, answered=answered)

    def _read_answer(self, stream: Stream, asked: ChunkHeader) -> Received:
        if not stream.inbox.buffered:
            stream.receive()
        received = self._answers.take_again(stream.inbox, asked)
        if received is None:
            received = stream.run(self._answers.read(stream.inbox, asked))
        if received.body is not None:
            stream.expect(received.head_bytes, len(received.body))
        return received
