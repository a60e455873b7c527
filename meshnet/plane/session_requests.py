"""Requests on ``/sessions/{id}`` and what is below it: whose handler, and how it is answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from meshnet.errors import Code, MeshError
from meshnet.grammar import parse_session
from meshnet.operations import unpack_reservation
from meshnet.plane.caller import Caller
from meshnet.plane.handler import PlaneHandler
from meshnet.plane.http1 import RequestHead
from meshnet.plane.reply import Reply, not_allowed
from meshnet.topology import SessionId

__all__ = ["SESSIONS", "answer_session"]

SESSIONS: Final = "/sessions/"


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request on a session.

    Attributes:
        session: named in its path.
        head: with its header fields.
        handler: the node's.
        caller: who waits for the answer.
    """

    session: SessionId
    head: RequestHead
    handler: PlaneHandler
    caller: Caller


def answer_session(head: RequestHead, path: str, handler: PlaneHandler, caller: Caller) -> Reply:
    """Answer a request whose path begins with `SESSIONS`; a body it may have is not read.

    Raises:
        MeshError: to be answered instead.
    """
    text, slash, action = path.removeprefix(SESSIONS).partition("/")
    methods = _METHODS.get(slash + action)
    if methods is None:
        raise MeshError(
            Code.NOT_FOUND,
            f"{path[:80]!r} is not served here; of a session there are"
            f" {', '.join(f'{SESSIONS}ID{known}' for known in _METHODS)}",
        )
    act = methods.get(head.method)
    if act is None:
        return not_allowed(head.method, path, ", ".join(methods))
    try:
        session = parse_session(text)
    except ValueError as error:
        raise MeshError(
            Code.INVALID_ARGUMENT, f"session {text[:80]!r}; expected {error}", field="session"
        ) from None
    return act(_Asked(session, head, handler, caller))


def _release(asked: _Asked) -> Reply:
    asked.handler.release(asked.session)
    return Reply(204, [], None)


def _reserve(asked: _Asked) -> Reply:
    asked.handler.reserve(unpack_reservation(asked.session, asked.head.fields), asked.caller)
    return Reply(204, [], None)


_METHODS: Final[dict[str, dict[str, Callable[[_Asked], Reply]]]] = {
    "": {"DELETE": _release, "PUT": _reserve},
}
"""By what follows the session's id in the path, then by method."""
