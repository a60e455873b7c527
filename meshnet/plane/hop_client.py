"""The activation plane's client for threads: a node's chunks to the hop after."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any, Final, TypeVar

import numpy.typing as npt

from meshnet.cache_wire import CacheHeader
from meshnet.choosers import LinkChoosers
from meshnet.chunk import Answer
from meshnet.compression import CompressionPolicies
from meshnet.credentials import Credentials
from meshnet.dtypes import Body, view_bytes
from meshnet.errors import WireError
from meshnet.grammar import Phase
from meshnet.operations import Release, Reservation, pack_release, pack_reservation
from meshnet.patience import Flight
from meshnet.plane.answers import (
    AnswerReader,
    ColdAnswer,
    Received,
    check_done,
    check_released,
    cold_failure,
    hop_failure,
    learn,
)
from meshnet.plane.caller import Caller
from meshnet.plane.hop_pool import HopPool
from meshnet.plane.late import LateAnswers
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
from meshnet.wire import DEFAULT_LIMITS, ChunkHeader, WireLimits

__all__ = ["HopClient"]

_LISTEN_ASIDE_BYTES: Final = 64 * 1024
"""While a longer body is sent, an early answer is listened for."""
_MAX_COLD_BYTES: Final = 64 * 1024

_R = TypeVar("_R", Received, ColdAnswer)


class HopClient:
    """Sends chunks to nodes and reads their answers, on the threads that call it.

    What crosses the plane, and which errors are raised, is as of `PlaneClient`.

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
        self.choosers = LinkChoosers(policies, route_condition, lock=threading.Lock())
        self._late = late
        self._answers = AnswerReader(limits)
        self._requests = RequestMemo()
        self._pool = HopPool(
            connect_timeout_s=connect_timeout_s,
            max_open=max_connections,
            max_idle=max_idle_connections,
            tls=tls,
        )

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
        flight = self._begin(address, node, Phase.DECODE, 0, caller)
        answer = None
        try:
            answer = self._cold(address, node, head, timeout_s, caller)
        except (OSError, WireError) as error:
            raise hop_failure(error, address, node, timeout_s) from error
        finally:
            self._end(flight, answered=answer is not None)
        check_done(answer)

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
        flight = self._begin(address, node, Phase.PREFILL, 0, caller)
        answer = None
        try:
            answer = self._cold(address, node, head, timeout_s, caller, views)
        except (OSError, WireError) as error:
            raise hop_failure(error, address, node, timeout_s) from error
        finally:
            self._end(flight, answered=answer is not None)
        check_done(answer)

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
            answer = self._cold(address, node, head, timeout_s, None)
        except (OSError, WireError) as error:
            raise cold_failure(error, address, timeout_s) from error
        check_released(answer)

    def prune(self) -> None:
        """Close kept connections that rested for long or that their node has closed."""
        self._pool.prune()

    def close(self) -> None:
        """Close idle connections now, and those in use when their request ends."""
        self._pool.close()

    def _begin(
        self, address: str, node: NodeId, phase: Phase, num_tokens: int, caller: Caller | None
    ) -> Flight | None:
        if self._late is None or caller is None:
            return None
        return self._late.begin(address, node, phase, num_tokens, caller.interrupt)

    def _end(self, flight: Flight | None, *, answered: bool) -> None:
        if self._late is not None and flight is not None:
            self._late.end(flight, answered=answered)

    def _cold(
        self,
        address: str,
        node: NodeId | None,
        head: bytes,
        timeout_s: float,
        caller: Caller | None,
        body: Body | list[memoryview] = b"",
    ) -> ColdAnswer:
        """Send a request that may be repeated, and read its answer."""
        return self._exchange(
            address,
            node,
            head,
            body,
            lambda stream: stream.run(self._answers.read_cold(stream.inbox, _MAX_COLD_BYTES)),
            monotonic() + timeout_s,
            repeatable=True,
            caller=caller,
        )

    def _exchange(
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

    def _read_answer(self, stream: Stream, asked: ChunkHeader) -> Received:
        if not stream.inbox.buffered:
            stream.receive()
        received = self._answers.take_again(stream.inbox, asked)
        if received is None:
            received = stream.run(self._answers.read(stream.inbox, asked))
        if received.body is not None:
            stream.expect(received.head_bytes, len(received.body))
        return received


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
