"""One session's state in a shard, and what is said of one that cannot go on."""

from __future__ import annotations

import threading

from meshnet.errors import Code, MeshError, PositionError
from meshnet.operations import OwnerId
from meshnet.topology import Hop, Route, SessionId
from meshnet.wire import ChunkHeader
from meshnet_node.backend import Cache
from meshnet_node.held import Held
from meshnet_node.journal import Journal

__all__ = ["Session", "came_early", "was_released"]


class Session:
    """One generation's state in this shard.

    Attributes:
        cache: the backend's.
        reserved_tokens: what the budget counts for it.
        settled_tokens: the same without a chunk under way; 0 while none has gone well and
            nobody has reserved.
        last_used: of the table's clock.
        owner: whose end is the session's; None for nobody's.
        route: what its last chunk named, found granted; None where that is to be looked at.
        next_hop: where its chunks went on, for the release along the route.
        granted: what the control plane let it do, and who may act for it; None where nobody
            asked.
        epoch: the highest that its chunks had.
        journal: of what was sent on.
    """

    def __init__(
        self,
        session_id: SessionId,
        cache: Cache,
        journal: Journal,
        now: float,
        lock: threading.Lock,
    ) -> None:
        self.id = session_id
        self.cache = cache
        self.journal = journal
        self.epoch = 0
        self.reserved_tokens = 0
        self.settled_tokens = 0
        self.last_used = now
        self.route: Route | None = None
        self.next_hop: Hop | None = None
        self.granted: Held | None = None
        self.owner: OwnerId | None = None
        self.busy = False
        self.num_waiting = 0
        self.closed = False
        self.changed = threading.Condition(lock)

    def takes(self, header: ChunkHeader) -> bool:
        """Tell whether a chunk may be computed now.

        What is sent again after a change of route may lie within the cache, all of it: only
        the first of it may cut the cache back, so that the rest waits for that.
        """
        if self.busy or self.closed or (header.epoch > self.epoch and header.chunk_index > 0):
            return False
        return header.position is None or header.position <= self.cache.length


def came_early(session: Session, header: ChunkHeader) -> PositionError:
    """Give the error of a chunk whose predecessor never came."""
    length = session.cache.length
    if header.epoch > session.epoch and header.chunk_index > 0:
        return PositionError(
            f"X-Meshnet-Epoch: {header.epoch}; chunk {header.chunk_index} of it came to session"
            f" {session.id} without its chunk 0",
            expected=length,
        )
    return PositionError(
        f"X-Meshnet-Position: {header.position} is past the end of session"
        f" {session.id}; expected at most {length}",
        expected=length,
    )


def was_released(session_id: SessionId) -> MeshError:
    """Give the error of what waited for a session, or came for it, and found it gone."""
    return MeshError(Code.ABORTED, f"session {session_id} was released", reason="SESSION_RELEASED")
