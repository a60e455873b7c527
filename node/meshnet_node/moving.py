"""Sends a session's KV cache to the nodes that take its layers over, and takes such caches."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from meshnet.cache_wire import CacheHeader, MoveHeader
from meshnet.errors import Code, MeshError, NextHopError, PositionError, WireError
from meshnet.kv import KvLayout, format_kv
from meshnet.plane.caller import Caller
from meshnet.plane.hop_client import HopClient
from meshnet.topology import Hop, LayerRange, Route, SessionId
from meshnet_node.backend import ShardBackend
from meshnet_node.granted import GrantGate
from meshnet_node.session import Session
from meshnet_node.session_table import SessionTable

__all__ = ["ArrivingCache", "CacheMoves", "MoveCounts"]

_log = logging.getLogger(__name__)

_WITHDRAW_S: Final = 1.0
"""What a hop that may be away gets to hear that a cache is not to be kept."""


@dataclass(slots=True)
class MoveCounts:
    """What was moved so far, for metrics.

    Attributes:
        sent: sessions whose cache went to other nodes.
        sent_bytes: of their caches.
        taken: sessions whose cache came from another node.
        taken_bytes: of their caches.
    """

    sent: int = 0
    sent_bytes: int = 0
    taken: int = 0
    taken_bytes: int = 0


class CacheMoves:
    """Moves sessions between this node and others; called by many threads.

    Other sessions go on meanwhile: what is sent is read where the session keeps it, and only
    that session waits.

    Args:
        backend: whose caches are moved.
        sessions: that hold them.
        client: for the nodes that take a cache over.
        grants: which these may be, and what this node may take over.
        hop_timeout_s: seconds that such a node may take.
    """

    def __init__(
        self,
        backend: ShardBackend,
        sessions: SessionTable,
        client: HopClient,
        grants: GrantGate,
        *,
        hop_timeout_s: float,
    ) -> None:
        self.counts = MoveCounts()
        self._backend = backend
        self._sessions = sessions
        self._client = client
        self._grants = grants
        self._hop_timeout_s = hop_timeout_s

    def send(self, asked: MoveHeader, caller: Caller) -> None:
        """Send a session's cache to the hops asked, each its layers, and forget the session here.

        Nothing is changed where this fails: hops that took their part are told to free it.

        Raises:
            UnknownSessionError: the session is not held here.
            WireError: the hops are not for the layers that the session uses here.
            PositionError: fewer tokens are held than are to be moved.
            MeshError: FAILED_PRECONDITION, reason ``CACHE_NOT_MOVABLE``; PERMISSION_DENIED, the
                hops are not granted; or what a hop answered.
            CallerGoneError: `caller` left meanwhile.
        """
        known = self._sessions.find(asked.session)
        granted = known.granted if known else None
        self._grants.check_move(granted, asked.session, asked.route, asked.grant)
        with self._sessions.hold(asked.session, caller) as (session, held):
            kv = self._movable()
            tokens = held if asked.position is None else asked.position
            if tokens > held:
                raise PositionError(
                    f"X-Meshnet-Position: {tokens} tokens of session {session.id} are to be"
                    f" moved; expected at most the {held} that are held",
                    expected=held,
                )
            used = _covered(asked.route, session.cache.layers)
            started = time.monotonic()
            sent: list[Hop] = []
            num_bytes = 0
            try:
                for hop in asked.route:
                    header = CacheHeader(
                        session=session.id,
                        layers=hop.layers,
                        tokens=tokens,
                        kv=self._cut(kv, hop.layers),
                        max_tokens=session.reserved_tokens or None,
                        digest=self._backend.spec.digest or None,
                        epoch=session.epoch,
                        owner=session.owner,
                        grant=asked.grant,
                    )
                    num_bytes += header.num_bytes
                    self._client.send_cache(
                        hop.address,
                        hop.node,
                        header,
                        session.cache.view_kv(hop.layers, tokens),
                        timeout_s=self._hop_timeout_s,
                        caller=caller,
                    )
                    sent.append(hop)
            except BaseException as error:
                # A hop that refused holds nothing of this; one that did not answer may.
                refused = isinstance(error, MeshError) and not isinstance(error, NextHopError)
                self._withdraw(session.id, sent if refused else asked.route[: len(sent) + 1])
                raise
            self._sessions.release(session.id)
        self.counts.sent += 1
        self.counts.sent_bytes += num_bytes
        _log.info(
            "session %s: layers %s of %d tokens, %d bytes, went to %s in %.3f s",
            session.id,
            used,
            tokens,
            num_bytes,
            ", ".join(hop.node for hop in sent),
            time.monotonic() - started,
        )

    def take(self, header: CacheHeader, caller: Caller) -> ArrivingCache:
        """Make room for a cache that comes from another node.

        Raises:
            WireError: it is not one of this shard's, naming the field at fault; nothing is
                allocated or reserved then.
            CacheFullError: there is no room.
            MeshError: FAILED_PRECONDITION, reason ``CACHE_NOT_MOVABLE``; or of the session table.
        """
        kv, spec = self._movable(), self._backend.spec
        if not spec.layers.contains(header.layers):
            raise WireError(
                f"X-Meshnet-Layers: {header.layers}; expected a part of this node's {spec.layers}",
                field="X-Meshnet-Layers",
            )
        if header.digest not in (None, spec.digest):
            raise WireError(
                f"X-Meshnet-Digest: {header.digest}; expected {spec.digest}, of the model here",
                field="X-Meshnet-Digest",
            )
        expected = self._cut(kv, header.layers)
        if header.kv.dtype != expected.dtype:
            raise WireError(
                f"X-Meshnet-Dtype: {header.kv.dtype}; expected {expected.dtype}, which is what"
                " this node computes in",
                field="X-Meshnet-Dtype",
            )
        if header.kv != expected:
            raise WireError(
                f"X-Meshnet-Kv: {format_kv(header.kv)[:80]}; expected {format_kv(expected)[:200]}",
                field="X-Meshnet-Kv",
            )
        tokens = max(header.tokens, header.max_tokens or 0)
        held = self._sessions.find(header.session)
        granted = self._grants.check_cache(
            held.granted if held else None,
            header.session,
            header.layers,
            header.grant,
            caller.identity,
        )
        session = self._sessions.expect(header.session, header.layers, tokens, granted)
        session.epoch, session.owner = header.epoch, header.owner
        try:
            memory = session.cache.make_room(header.layers, header.kv, header.tokens)
        except BaseException:
            self._sessions.give_up(session)
            raise
        return ArrivingCache(self, self._sessions, session, header, memory)

    def _movable(self) -> KvLayout:
        if self._backend.kv is None:
            raise MeshError(
                Code.FAILED_PRECONDITION,
                f"the state of {self._backend.spec.model} is not keys and values alone"
                " (recurrent layers, or indexes beside), so no other node can take it over",
                reason="CACHE_NOT_MOVABLE",
            )
        return self._backend.kv

    def _cut(self, kv: KvLayout, layers: LayerRange) -> KvLayout:
        start = self._backend.spec.layers.start
        return kv.cut(layers.start - start, layers.end - start)

    def _withdraw(self, session_id: SessionId, hops: Sequence[Hop]) -> None:
        """Free what the hops took, and nothing after them."""
        for hop in hops:
            with suppress(MeshError):
                self._client.release(
                    hop.address,
                    session_id,
                    alone=True,
                    timeout_s=_WITHDRAW_S,
                    node=hop.node,
                )


class ArrivingCache:
    """A cache on its way here: its memory is filled, then it is kept or dropped.

    Attributes:
        memory: to fill, in order.
    """

    def __init__(
        self,
        moves: CacheMoves,
        sessions: SessionTable,
        session: Session,
        header: CacheHeader,
        memory: list[memoryview],
    ) -> None:
        self.memory = memory
        self._counts = moves.counts
        self._sessions = sessions
        self._session = session
        self._header = header

    def keep(self) -> None:
        """Hold the session from now on.

        Raises:
            MeshError: the node drains by now, or computes for such a session.
        """
        self._sessions.admit(self._session)
        self._counts.taken += 1
        self._counts.taken_bytes += self._header.num_bytes

    def drop(self) -> None:
        """Free it: not all of it came."""
        self._sessions.give_up(self._session)


def _covered(route: Route, used: LayerRange | None) -> LayerRange:
    """Check that the hops take over just the layers that a session uses; gives these."""
    if used is None:
        raise MeshError(
            Code.FAILED_PRECONDITION,
            "the session holds no tokens yet: open it elsewhere",
            reason="CACHE_EMPTY",
        )
    end = used.start
    for hop in route:
        if hop.layers.start != end:
            break
        end = hop.layers.end
    else:
        if end == used.end:
            return used
    raise WireError(
        f"X-Meshnet-Route: hops for layers {', '.join(str(hop.layers) for hop in route)};"
        f" expected {used} in order, which the session uses here",
        field="X-Meshnet-Route",
    )
