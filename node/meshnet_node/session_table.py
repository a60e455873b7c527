"""The KV caches of a node: who holds how much, in what order chunks come, and what ends.

Called by many threads; one lock guards all of it, and nothing is computed under it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType

from meshnet.errors import Code, MeshError, UnknownSessionError
from meshnet.operations import OwnerId
from meshnet.plane.caller import Caller
from meshnet.topology import LayerRange, NodeId, SessionId
from meshnet.wire import ChunkHeader
from meshnet_node.backend import Cache
from meshnet_node.budget import CacheBudget, SessionLimits
from meshnet_node.granted import GrantGate
from meshnet_node.held import Held
from meshnet_node.journals import Journals
from meshnet_node.session import Session, was_released
from meshnet_node.waiting import await_free, await_position

__all__ = ["SessionTable", "Turn"]


class Turn:
    """A chunk's turn in its session: ends with the ``with`` block."""

    __slots__ = ("_position", "_session", "_table")

    def __init__(self, table: SessionTable, session: Session, position: int) -> None:
        self._table = table
        self._session = session
        self._position = position

    def __enter__(self) -> tuple[Session, int]:
        return self._session, self._position

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._table.end_turn(self._session, went_well=error is None)


class SessionTable:
    """Sessions by id, under one budget of cache tokens.

    A chunk takes its turn when no other chunk of its session computes and its position is
    not past the cache's end. Reserved is what ``X-Meshnet-Max-Tokens`` asked, or what is
    used where that is more.

    Args:
        open_cache: of the backend.
        limits: see there.
        clock: seconds, monotonic.
        journals: of what sessions sent on.
        grants: which sessions may be opened; without, all.
    """

    def __init__(
        self,
        open_cache: Callable[[], Cache],
        limits: SessionLimits,
        clock: Callable[[], float],
        journals: Journals | None = None,
        grants: GrantGate | None = None,
    ) -> None:
        self.journals = journals or Journals()
        self._grants = grants or GrantGate(NodeId("node"))
        self._open_cache = open_cache
        self._limits = limits
        self._budget = CacheBudget(limits)
        self._clock = clock
        self._sessions: dict[SessionId, Session] = {}
        self._lock = threading.Lock()
        self._opened = threading.Condition(self._lock)
        self._ended = threading.Condition(self._lock)
        self.draining = False
        self.refusal = ""

    def __len__(self) -> int:
        """Give the number of sessions held."""
        return len(self._sessions)

    @property
    def reserved_tokens(self) -> int:
        """Tokens that the budget counts as taken."""
        return self._budget.reserved_tokens

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the whole budget."""
        return self._budget.capacity_tokens

    def turn(self, header: ChunkHeader, caller: Caller) -> Turn:
        """Wait for a chunk's turn; as a context manager gives its session and position.

        The position is at most the cache's length; below it, the user truncates first.
        The turn ends with the block.

        Raises:
            UnknownSessionError: a position above 0 of a session not held here.
            PositionError: a gap that the chunk before did not fill in time.
            CacheFullError: no cache tokens or no session place are left.
            MeshError: UNAVAILABLE while draining, for a new session; ABORTED when the
                session is released meanwhile; PERMISSION_DENIED, a new session has no grant,
                or `caller` may not act for this one.
            CallerGoneError: `caller` left while this waited.
        """
        with self._lock:
            session = self._sessions.get(header.session)
            if session is not None and session.takes(header):
                held = session.granted
                if held is None or caller.uri in held.actors:
                    return self._begin_turn(session, header)
        granted, may_follow = None, False
        if session is None and not header.position:
            granted = self._grants.admit(
                header.session, header.layers, header.route, header.grant, caller.identity
            )
        elif session is not None and not (header.chunk_index and header.epoch > session.epoch):
            may_follow = self._grants.may_follow(
                session.granted, header.session, caller.identity, header.grant
            )
        with caller.waking(self._wake_all), self._lock:
            session = self._find(header, caller, granted)
            await_position(session, header, caller, self._limits.reorder_wait_s)
            if not may_follow:
                self._grants.check_actor(session.granted, session.id, caller.identity)
            return self._begin_turn(session, header)

    def end_turn(self, session: Session, *, went_well: bool) -> None:
        """Let the next chunk of `session` have its turn.

        A chunk that failed leaves nothing behind: what it reserved is given back, and a
        session that it opened is forgotten.
        """
        with self._lock:
            session.last_used = self._clock()
            session.busy = False
            if went_well:
                session.settled_tokens = session.reserved_tokens
            elif session.settled_tokens or session.cache.length:
                self._budget.lower(session, session.settled_tokens)
            elif self._sessions.get(session.id) is session:
                self._forget(session.id)
            if session.num_waiting:
                session.changed.notify_all()

    def find(self, session_id: SessionId) -> Session | None:
        """Give a session that is held, or None."""
        return self._sessions.get(session_id)

    def reserve(
        self,
        session_id: SessionId,
        tokens: int,
        owner: OwnerId | None = None,
        granted: Held | None = None,
    ) -> tuple[Session, int]:
        """Hold `tokens` of cache for a session, opening it where it is new; never lowers.

        Gives the session, and what it held before: 0 where this opened it.

        Raises:
            CacheFullError: no cache tokens or no session place are left.
            MeshError: UNAVAILABLE while draining, for a new session; PERMISSION_DENIED, its
                grant is spent, or it was opened meanwhile by others.
        """
        with self._lock:
            session = self._sessions.get(session_id)
            before = 0
            if session is None:
                self._budget.check_owner(owner, self._sessions.values())
                session = self._open(session_id, tokens, granted)
            else:
                held = session.granted
                if held is not None and granted is not None:
                    held.check_gateway(granted.grant)
                before = session.reserved_tokens
                self._budget.reserve(session, tokens)
                session.last_used = self._clock()
            session.settled_tokens = max(session.settled_tokens, tokens)
            session.owner = owner or session.owner
            session.granted = granted or session.granted
            return session, before

    def lower(self, session: Session, tokens: int) -> None:
        """Set a session's reservation back to `tokens`, or to what it uses where that is more."""
        with self._lock:
            self._budget.lower(session, tokens)
            session.settled_tokens = session.reserved_tokens

    def hold(self, session_id: SessionId, caller: Caller) -> Turn:
        """Wait until no chunk of a session computes, and let none begin while its turn lasts.

        Gives, as a context manager, the session and the length of its cache.

        Raises:
            UnknownSessionError: it is not held here.
            MeshError: ABORTED, it is released meanwhile; PERMISSION_DENIED, `caller` may not
                act for it.
            CallerGoneError: `caller` left while this waited.
        """
        with caller.waking(self._wake_all), self._lock:
            session = self._sessions.get(session_id)
            if session is None:
                raise UnknownSessionError(f"session {session_id} is not held here")
            self._grants.check_actor(session.granted, session_id, caller.identity)
            await_free(session, caller)
            session.busy = True
            return Turn(self, session, session.cache.length)

    def expect(
        self, session_id: SessionId, layers: LayerRange, tokens: int, granted: Held | None = None
    ) -> Session:
        """Reserve for a session whose cache is on its way here; `admit` or `give_up` follows.

        One with its id that is held stays until then, and is replaced: a repeated request.

        Raises:
            CacheFullError: no cache tokens or no session place are left.
            MeshError: UNAVAILABLE while draining; ABORTED, reason ``SESSION_HELD``, where
                the session computes here, or uses other layers; as `reserve`.
        """
        with self._lock:
            self._check_replaceable(session_id, layers)
            return self._new(session_id, tokens, granted)

    def admit(self, session: Session) -> None:
        """Hold a session that was expected, instead of one with its id that may be held.

        Raises:
            MeshError: as `expect`; the session is given up then.
        """
        with self._lock:
            try:
                self._check_place()
                self._check_replaceable(session.id, session.cache.layers)
            except MeshError:
                self._free(session)
                raise
            held = self._forget(session.id)
            if held is not None:
                held.changed.notify_all()
            session.last_used = self._clock()
            session.settled_tokens = session.reserved_tokens
            self._sessions[session.id] = session
            self._opened.notify_all()

    def give_up(self, session: Session) -> None:
        """Give back what an expected session reserved."""
        with self._lock:
            self._free(session)

    def release(
        self, session_id: SessionId, *, withdrawn: bool = False, caller: Caller | None = None
    ) -> Session | None:
        """Forget a session, give back its cache, end its waiting chunks; None if not held.

        Its grants are spent then, unless it is `withdrawn`: as if it had not been opened.

        Raises:
            MeshError: PERMISSION_DENIED, `caller` may not act for it.
        """
        with self._lock:
            held = self._sessions.get(session_id)
            if held is not None and held.granted is not None and caller is not None:
                self._grants.check_release(held.granted, session_id, caller.identity)
            session = self._forget(session_id)
            if session is not None:
                if session.granted is not None and not withdrawn:
                    self._grants.spend(session.granted)
                session.changed.notify_all()
            return session

    def owned_by(self, owner: OwnerId, uri: str) -> list[SessionId]:
        """List the sessions that an owner has reserved, of those that a caller may act for."""
        with self._lock:
            return [
                session.id
                for session in self._sessions.values()
                if session.owner == owner
                and (session.granted is None or uri in session.granted.actors)
            ]

    def release_all(self) -> int:
        """Forget every session, as `release` does; gives how many there were."""
        return sum(self.release(session_id) is not None for session_id in list(self._sessions))

    def await_none(self, timeout_s: float) -> bool:
        """Wait until no session is held; False where some are after `timeout_s`."""
        with self._lock:
            return self._ended.wait_for(lambda: not self._sessions, timeout_s)

    def idle(self) -> list[SessionId]:
        """List the sessions that no chunk has used for the idle time, the longest idle first."""
        oldest = self._clock() - self._limits.idle_ttl_s
        with self._lock:
            found = [s for s in self._sessions.values() if not s.busy and s.last_used < oldest]
        return [session.id for session in sorted(found, key=lambda item: item.last_used)]

    def _wake_all(self) -> None:
        """Let every chunk that waits look whether its caller has left: rare, so all of them."""
        with self._lock:
            self._opened.notify_all()
            for session in self._sessions.values():
                session.changed.notify_all()

    def _begin_turn(self, session: Session, header: ChunkHeader) -> Turn:
        if header.epoch != session.epoch:
            self._take_epoch(session, header.epoch)
        position = session.cache.length if header.position is None else header.position
        self._budget.reserve(session, max(header.max_tokens or 0, position + header.num_tokens))
        session.busy = True
        return Turn(self, session, position)

    def _check_replaceable(self, session_id: SessionId, layers: LayerRange | None) -> None:
        held = self._sessions.get(session_id)
        if held is not None and (held.busy or held.cache.layers not in (None, layers)):
            raise MeshError(
                Code.ABORTED,
                f"session {session_id} is held here, for layers {held.cache.layers}",
                reason="SESSION_HELD",
            )

    def _take_epoch(self, session: Session, epoch: int) -> None:
        """Refuse a chunk that was sent before the session's route changed."""
        if epoch < session.epoch:
            raise MeshError(
                Code.ABORTED,
                f"X-Meshnet-Epoch: {epoch}; the route of session {session.id} has changed since,"
                f" expected at least {session.epoch}",
                field="X-Meshnet-Epoch",
                reason="EPOCH_STALE",
            )
        session.epoch = epoch

    def _forget(self, session_id: SessionId) -> Session | None:
        session = self._sessions.pop(session_id, None)
        if session is not None:
            self._free(session)
            self._ended.notify_all()
        return session

    def _free(self, session: Session) -> None:
        session.closed = True
        session.journal.close()
        self._budget.free(session)

    def _find(self, header: ChunkHeader, caller: Caller, granted: Held | None) -> Session:
        """Give the chunk's session, opening it for a first chunk."""
        session = self._sessions.get(header.session)
        if session is None and header.position and header.chunk_index > 0:
            session = self._await_opened(header.session, caller)
        if session is not None:
            return session
        if header.position:
            raise UnknownSessionError(
                f"session {header.session} is not held here, so position {header.position}"
                " cannot continue it; expected position 0"
            )
        if granted is None and self._grants.required:
            raise was_released(header.session)  # it was here when the chunk came
        return self._open(header.session, max(header.max_tokens or 0, header.num_tokens), granted)

    def _open(self, session_id: SessionId, tokens: int, granted: Held | None) -> Session:
        session = self._sessions[session_id] = self._new(session_id, tokens, granted)
        self._opened.notify_all()
        return session

    def _new(self, session_id: SessionId, tokens: int, granted: Held | None) -> Session:
        """Make a session that is not held yet."""
        if granted is not None:
            self._grants.confirm(granted)
        self._check_place()
        cache, journal = self._open_cache(), self.journals.open()
        session = Session(session_id, cache, journal, self._clock(), self._lock)
        session.granted = granted
        try:
            self._budget.reserve(session, tokens)
        except MeshError:
            journal.close()
            raise
        return session

    def _check_place(self) -> None:
        if self.draining:
            raise MeshError(
                Code.UNAVAILABLE,
                "this node is draining and takes no new sessions",
                reason="DRAINING",
                retry_after_s=5.0,
            )
        if self.refusal:
            raise MeshError(
                Code.UNAVAILABLE,
                f"this node takes no new sessions, since its probes failed: {self.refusal}",
                reason="QUARANTINED",
                retry_after_s=5.0,
            )
        self._budget.check_place(len(self._sessions))

    def _await_opened(self, session_id: SessionId, caller: Caller) -> Session | None:
        """Wait for the first chunk of a prompt whose later chunk came here before it."""
        until = time.monotonic() + self._limits.reorder_wait_s
        while (session := self._sessions.get(session_id)) is None:
            remaining = until - time.monotonic()
            if remaining <= 0:
                return None
            self._opened.wait(remaining)
            caller.check()
        return session
