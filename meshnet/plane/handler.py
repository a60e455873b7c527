"""What the activation plane's server asks of a node, and what it lets callers do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from meshnet.cache_wire import CacheHeader, MoveHeader
from meshnet.chunk import Answer, Chunk
from meshnet.operations import OwnerId, Rebuild, Release, Reservation
from meshnet.plane.caller import Caller
from meshnet.wire import DEFAULT_LIMITS, WireLimits

__all__ = ["ArrivingCache", "PlaneHandler", "PlaneLimits"]

_MAX_HEADER_BYTES = 32 * 1024


class ArrivingCache(Protocol):
    """A session's KV cache on its way to a node; one of `keep` and `drop` is called."""

    @property
    def memory(self) -> list[memoryview]:
        """What to fill with its bytes, in order; as long as its header says in all."""
        ...

    def keep(self) -> None:
        """Hold it: all of it is there."""
        ...

    def drop(self) -> None:
        """Free it: not all of it came."""
        ...


class PlaneHandler(Protocol):
    """A node's side of the plane. Errors for the caller are raised as MeshError.

    Every method is called on the thread of its connection, many at the same time; what
    waits there ends, with CallerGoneError, when `Caller` says that the caller has left.
    """

    def forward(self, chunk: Chunk, caller: Caller) -> Answer:
        """Run one chunk.

        ``chunk.tensor`` is the handler's to keep. ``Answer.header.encoding`` is not read:
        the server encodes, by policy and by what the caller accepts. The answer's tensor
        must not change until it is sent.
        """
        ...

    def reserve(self, asked: Reservation, caller: Caller) -> None:
        """Open a session here and at the hops after, with its cache; all of them or none."""
        ...

    def move(self, asked: MoveHeader, caller: Caller) -> None:
        """Send a session's cache to the hops asked and forget it here; or change nothing."""
        ...

    def take_cache(self, header: CacheHeader, caller: Caller) -> ArrivingCache:
        """Make room for a cache that is this node's to hold."""
        ...

    def rebuild(self, asked: Rebuild, caller: Caller) -> None:
        """Feed what was sent on of a session to the hops that replace those after."""
        ...

    def release(self, asked: Release, caller: Caller) -> None:
        """Free what a session holds; a session not held is fine."""
        ...

    def attend(self, owner: OwnerId, caller: Caller) -> None:
        """Stay until `caller` has left for good, and end the owner's sessions then."""
        ...

    def get(self, path: str) -> tuple[int, str, bytes] | None:
        """Answer a cold GET with (status, content type, body); None where no such path exists."""
        ...


@dataclass(frozen=True, slots=True)
class PlaneLimits:
    """What a server grants its callers.

    Attributes:
        wire: limits on a chunk's tensor.
        max_header_bytes: longest head of a request, at most 32 KiB.
        max_header_count: most header fields of a request.
        idle_timeout_s: how long a connection may rest between requests.
        read_timeout_s: how long a head may take to arrive, and a body to begin with.
        write_timeout_s: the same for an answer.
        min_bytes_per_s: a body or answer gets its size over this on top of its timeout.
        max_connections: open at once; one more is answered with 503, or takes the place of
            one whose caller owes a head for longest.
        spare_idle_s: for which a caller may owe a head before it can lose its place so.
        crowded_bytes_per_s: while more than half of the connections are open, a body is due at
            this rate, with `spare_idle_s` on top: each that comes ends the one that is overdue
            for longest.
    """

    wire: WireLimits = DEFAULT_LIMITS
    max_header_bytes: int = 16 * 1024
    max_header_count: int = 64
    idle_timeout_s: float = 75.0
    read_timeout_s: float = 30.0
    write_timeout_s: float = 30.0
    min_bytes_per_s: float = 64 * 1024
    max_connections: int = 1024
    spare_idle_s: float = 5.0
    crowded_bytes_per_s: float = 1024 * 1024

    def __post_init__(self) -> None:
        if not 0 < self.max_header_bytes <= _MAX_HEADER_BYTES:
            raise ValueError(
                f"max_header_bytes {self.max_header_bytes}: expected 1 to {_MAX_HEADER_BYTES}"
            )
