"""What the KV caches of a node may take: tokens and places, counted before they are allocated.

A budget belongs to one session table, which calls it under its own lock.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from meshnet.errors import CacheFullError, Code, MeshError
from meshnet.operations import OwnerId
from meshnet_node.session import Session

__all__ = ["CacheBudget", "SessionLimits"]


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """What a node holds at most.

    Attributes:
        cache_tokens: tokens of KV cache over all sessions, reserved or used.
        max_sessions: sessions held at once.
        max_sessions_per_owner: of these, reserved by one caller.
        max_session_tokens: that one session reserves or uses.
        idle_ttl_s: seconds without a chunk after which a session is forgotten.
        reorder_wait_s: seconds that an early chunk waits for the one before it.
    """

    cache_tokens: int = 1 << 20
    max_sessions: int = 4096
    max_sessions_per_owner: int = 1024
    max_session_tokens: int = 1 << 20
    idle_ttl_s: float = 600.0
    reorder_wait_s: float = 5.0


class CacheBudget:
    """Tokens of cache over all sessions of a node, and how many sessions there may be.

    Attributes:
        reserved_tokens: what is taken.

    Args:
        limits: see there.
    """

    def __init__(self, limits: SessionLimits) -> None:
        self.reserved_tokens = 0
        self._limits = limits

    @property
    def capacity_tokens(self) -> int:
        """Tokens of the whole budget."""
        return self._limits.cache_tokens

    def check_place(self, num_sessions: int) -> None:
        """Check that one more session may be held beside those there are.

        Raises:
            CacheFullError: it may not.
        """
        if num_sessions >= self._limits.max_sessions:
            raise CacheFullError(f"{num_sessions} sessions are held, the most allowed here")

    def check_owner(self, owner: OwnerId | None, sessions: Collection[Session]) -> None:
        """Check that an owner may reserve one more session beside those held.

        Raises:
            CacheFullError: it may not.
        """
        most = self._limits.max_sessions_per_owner
        if owner is not None and len(sessions) >= most:
            held = sum(session.owner == owner for session in sessions)
            if held >= most:
                raise CacheFullError(
                    f"X-Meshnet-Owner: {held} sessions are held for {owner}, the most allowed"
                )

    def reserve(self, session: Session, tokens: int) -> None:
        """Raise a session's share to `tokens`; never lowers it.

        Raises:
            MeshError: OUT_OF_RANGE, reason ``SESSION_TOO_LONG``.
            CacheFullError: fewer are free.
        """
        most = self._limits.max_session_tokens
        if tokens > most:
            raise MeshError(
                Code.OUT_OF_RANGE,
                f"X-Meshnet-Max-Tokens: {tokens} tokens for session {session.id}; expected at most"
                f" {most}",
                field="X-Meshnet-Max-Tokens",
                reason="SESSION_TOO_LONG",
            )
        more = tokens - session.reserved_tokens
        if more <= 0 or session.closed:
            return
        free = self._limits.cache_tokens - self.reserved_tokens
        if more > free:
            raise CacheFullError(
                f"session {session.id} needs {more} more tokens of KV cache and {free} of"
                f" {self._limits.cache_tokens} are free"
            )
        session.reserved_tokens = tokens
        self.reserved_tokens += more

    def lower(self, session: Session, tokens: int) -> None:
        """Set a session's share back to `tokens`, or to what it uses where that is more."""
        more = session.reserved_tokens - max(tokens, session.cache.length)
        if more > 0 and not session.closed:
            session.reserved_tokens -= more
            self.reserved_tokens -= more

    def free(self, session: Session) -> None:
        """Give back what a session has."""
        self.reserved_tokens -= session.reserved_tokens
        session.reserved_tokens = 0
