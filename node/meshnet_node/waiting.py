"""How a request waits for its turn in its session, under the lock of the session's table."""

from __future__ import annotations

import time

from meshnet.plane.caller import Caller
from meshnet.wire import ChunkHeader
from meshnet_node.session import Session, came_early, was_released

__all__ = ["await_free", "await_position"]


def await_free(session: Session, caller: Caller) -> None:
    """Wait until no chunk of a session computes.

    Raises:
        MeshError: ABORTED, it is released meanwhile.
        CallerGoneError: `caller` left.
    """
    session.num_waiting += 1
    try:
        while session.busy and not session.closed:
            session.changed.wait()
            caller.check()
    finally:
        session.num_waiting -= 1
    if session.closed:
        raise was_released(session.id)


def await_position(
    session: Session, header: ChunkHeader, caller: Caller, patience_s: float
) -> None:
    """Wait until no chunk computes and this one's position is not past the cache's end.

    A chunk before it that does not come is waited for `patience_s` seconds.

    Raises:
        PositionError: it did not come.
        MeshError: ABORTED, the session is released meanwhile.
        CallerGoneError: `caller` left.
    """
    session.num_waiting += 1
    try:
        _await_turn(session, header, caller, patience_s)
    finally:
        session.num_waiting -= 1


def _await_turn(session: Session, header: ChunkHeader, caller: Caller, patience_s: float) -> None:
    until: float | None = None
    while not session.takes(header):
        if session.closed:
            raise was_released(session.id)
        if session.busy:
            # A chunk that computes is bounded by its own hop's timeout, so that only the
            # wait for a predecessor that never comes needs a bound here.
            until = None
            session.changed.wait()
        else:
            if until is None:
                until = time.monotonic() + patience_s
            remaining = until - time.monotonic()
            if remaining <= 0:
                raise came_early(session, header)
            session.changed.wait(remaining)
        caller.check()
