"""One chunk in, one answer out: a shard's place in a pipeline."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Final

import numpy.typing as npt

from meshnet.chunk import Answer, Chunk
from meshnet.dtypes import BFLOAT16, FLOAT32, numpy_dtype
from meshnet.errors import Code, MeshError, NextHopError, PositionError
from meshnet.grammar import Phase, Want
from meshnet.operations import Rebuild, Release
from meshnet.plane.caller import Caller
from meshnet.plane.hop_client import HopClient
from meshnet.timing import HopTiming, format_timing
from meshnet.topology import Hop, LayerRange, NodeId
from meshnet.wire import AnswerHeader, ChunkHeader
from meshnet_node.backend import ShardBackend
from meshnet_node.granted import GrantGate
from meshnet_node.moving import CacheMoves
from meshnet_node.plan import check_route, plan
from meshnet_node.rebuild import feed
from meshnet_node.reserving import RouteReservations
from meshnet_node.running import RunningStep
from meshnet_node.scheduler import Scheduler
from meshnet_node.session import Session
from meshnet_node.session_table import SessionTable

__all__ = ["Stage"]

_FLOAT32: Final = numpy_dtype(FLOAT32)
"""Compared with, since comparing with a name makes a dtype of it each time: 5 microseconds."""

_log = logging.getLogger(__name__)


class Stage:
    """Runs chunks through a backend and sends them on along their route.

    Its methods may be called by many threads: each brings one chunk, and waits, computes
    and sends on itself. What one receives and decodes overlaps what another computes.

    Attributes:
        on_failure: called when a computation fails, by the thread that computed.

    Args:
        node: this node's id, for timings.
        backend: what computes.
        sessions: the caches.
        client: for the hop after.
        scheduler: whose turn it is to compute.
        hop_timeout_s: seconds that the hop after may take for a chunk.
        clock: seconds, monotonic.
        grants: over which routes sessions may run; without, over all.
    """

    def __init__(
        self,
        node: NodeId,
        backend: ShardBackend,
        sessions: SessionTable,
        client: HopClient,
        scheduler: Scheduler,
        *,
        hop_timeout_s: float = 120.0,
        clock: Callable[[], float] = time.perf_counter,
        grants: GrantGate | None = None,
    ) -> None:
        self.node = node
        self._grants = grants or GrantGate(node)
        self.backend = backend
        self.sessions = sessions
        self._client = client
        self._scheduler = scheduler
        self._hop_timeout_s = hop_timeout_s
        self._clock = clock
        self.moves = CacheMoves(
            backend, sessions, client, self._grants, hop_timeout_s=hop_timeout_s
        )
        self.reservations = RouteReservations(
            backend, sessions, client, self._grants, hop_timeout_s=hop_timeout_s
        )
        self._present: set[Caller] = set()
        self.on_failure: Callable[[], None] = lambda: None
        self.num_chunks = 0
        self.num_tokens = 0
        self.num_rebuilt_tokens = 0
        self.compute_s = 0.0
        self.last_forward = clock()
        self.running = RunningStep(hop_timeout_s)

    @property
    def queue_depth(self) -> int:
        """Chunks that wait or compute."""
        return len(self._present)

    def forward(self, chunk: Chunk, caller: Caller) -> Answer:
        """Compute a chunk, and send it on if its route goes on.

        Raises:
            WireError: the shard cannot take this chunk.
            MeshError: of the session table, the scheduler, the backend or the hops after.
            CallerGoneError: `caller` left while this waited.
        """
        arrived = self._clock()
        header = chunk.header
        layers, want = plan(self.backend.spec, header, chunk.tensor)
        self._present.add(caller)  # whose connection brings one chunk at a time
        try:
            with self.sessions.turn(header, caller) as (session, position):
                if header.route is not session.route or not position or header.grant:
                    self._follow(session, header, layers, caller)
                output, started, ended = self._scheduler.run(
                    lambda: self._compute(
                        session, position, chunk.tensor, layers, want, header.phase
                    ),
                    caller,
                    urgent=header.phase is Phase.DECODE,
                )
                if output is not None and (header.route or header.journal):
                    session.journal.add(position, output)
        finally:
            self._present.discard(caller)
        answer = self._send_on(header, position, output, caller) if header.route else None
        now = self._clock()
        timing = HopTiming(
            self.node,
            (started - arrived) * 1e3,
            (ended - started) * 1e3,
            (chunk.codec_s + (answer.codec_s if answer else 0.0)) * 1e3,
            (now - ended) * 1e3 if answer else 0.0,
            (now - arrived) * 1e3,
            chunk.wire_bytes,
            answer.sent_bytes if answer else 0 if output is None else output.nbytes,
        )
        tensor = answer.tensor if answer else None if header.journal else output
        return Answer(
            AnswerHeader(
                None if tensor is None else tensor.shape,
                None if tensor is None else _wire_dtype(tensor),
                header.session,
                header.chunk_index,
                header.chunk_total,
                None,
                format_timing(timing, answer.header.server_timing if answer else ""),
            ),
            tensor,
        )

    def rebuild(self, asked: Rebuild, caller: Caller) -> None:
        """Feed what was sent on of a session to the hops that replace those after it.

        Raises:
            WireError: the route does not begin where the session's layers end here.
            UnknownSessionError: the session is not held here.
            MeshError: ABORTED, reason ``JOURNAL_LOST``; or what a replacement answered.
            CallerGoneError: `caller` left meanwhile.
        """
        with self.sessions.hold(asked.session, caller) as (session, length):
            held = session.cache.layers
            if held is None or asked.position > length:
                raise PositionError(
                    f"X-Meshnet-Position: {asked.position}; session {asked.session} holds"
                    f" {length} tokens here",
                    expected=length,
                )
            check_route(held, asked.route)
            session.granted = self._grants.check(
                session.granted, session.id, held, asked.route, asked.grant, caller.identity
            )
            began, timeout_s = self._clock(), self._hop_timeout_s
            feed(session.journal, asked, self._client, timeout_s=timeout_s, caller=caller)
            session.route, session.next_hop = None, asked.route[0]
        self.num_rebuilt_tokens += asked.position
        _log.info(
            "session %s: %d tokens were computed again at %s in %.3f s, in mode %s",
            asked.session,
            asked.position,
            ", ".join(hop.node for hop in asked.route),
            self._clock() - began,
            asked.mode,
        )

    def release(self, asked: Release, caller: Caller) -> None:
        """Forget a session here and along its route; a hop that fails is left to its idle time.

        Raises:
            MeshError: PERMISSION_DENIED, `caller` may not act for it.
        """
        session_id = asked.session
        session = self.sessions.release(session_id, caller=caller)
        if session is None or session.next_hop is None or asked.alone:
            return
        try:
            hop = session.next_hop
            self._client.release(hop.address, session_id, node=hop.node)
        except MeshError as error:
            _log.warning("session %s: release at the next hop failed: %s", session_id, error)

    def release_idle(self) -> None:
        """Forget the sessions that no chunk has used for the idle time, the longest idle first.

        Here alone: the other hops see the same chunks, and a node that a session has left
        for another must not end it where it goes on.
        """
        for session_id in self.sessions.idle():
            _log.info("session %s was idle for too long and is released", session_id)
            self.sessions.release(session_id)

    def _follow(
        self, session: Session, header: ChunkHeader, layers: LayerRange, caller: Caller
    ) -> None:
        """Take the route that a chunk names, where the session may run over it."""
        route = header.route
        session.granted = self._grants.check(
            session.granted, session.id, layers, route, header.grant, caller.identity
        )
        session.route, session.next_hop = route, route[0] if route else None

    def _compute(
        self,
        session: Session,
        position: int,
        tensor: npt.NDArray[Any],
        layers: LayerRange,
        want: Want,
        phase: Phase,
    ) -> tuple[npt.NDArray[Any] | None, float, float]:
        """Run the backend and count it; gives its output, when it began and when it ended."""
        started = self._clock()
        if position < session.cache.length:
            session.cache.truncate(position)
        went_well = False
        self.running.begin(phase, tensor.shape[1], started)
        try:
            output = self.backend.forward(session.cache, tensor, layers=layers, want=want)
            went_well = True
        except MeshError as error:
            if error.code is Code.INTERNAL:
                self.on_failure()
            raise
        finally:
            ended = self._clock()
            self.running.end(ended, went_well=went_well)
        self.num_chunks += 1
        self.num_tokens += tensor.shape[1]
        self.compute_s += ended - started
        self.last_forward = ended
        return output, started, ended

    def _send_on(
        self,
        header: ChunkHeader,
        position: int,
        output: npt.NDArray[Any] | None,
        caller: Caller,
    ) -> Answer:
        hop: Hop = header.route[0]
        if output is None:
            raise NextHopError(f"no output for node {hop.node}", failed_node=self.node)
        onward = header._replace(
            shape=output.shape,
            dtype=BFLOAT16,
            encoding=None,
            position=position,
            layers=hop.layers,
            route=header.route[1:],
        )
        return self._client.forward(
            hop.address,
            hop.node,
            onward,
            output,
            timeout_s=self._hop_timeout_s,
            caller=caller,
        )


def _wire_dtype(tensor: npt.NDArray[Any]) -> str:
    return FLOAT32 if tensor.dtype == _FLOAT32 else BFLOAT16
