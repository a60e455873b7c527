"""Requests on ``/sessions/{id}``, what is below it, and ``/owners/{id}``: how they are answered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from meshnet.cache_wire import CacheHeader, unpack_cache, unpack_move
from meshnet.errors import Code, MeshError, WireError
from meshnet.grammar import parse_session
from meshnet.operations import parse_owner, unpack_rebuild, unpack_release, unpack_reservation
from meshnet.plane.caller import Caller
from meshnet.plane.handler import PlaneHandler
from meshnet.plane.http1 import RequestHead
from meshnet.plane.reply import Reply, not_allowed
from meshnet.topology import SessionId

__all__ = ["OWNERS", "SESSIONS", "Receive", "answer_owner", "answer_session"]

SESSIONS: Final = "/sessions/"
OWNERS: Final = "/owners/"

Receive = Callable[[list[memoryview]], None]


@dataclass(frozen=True, slots=True)
class _Asked:
    """One request on a session.

    Attributes:
        session: named in its path.
        head: with its header fields.
        handler: the node's.
        caller: who waits for the answer.
        receive: reads the request's body into memory of just its length.
    """

    session: SessionId
    head: RequestHead
    handler: PlaneHandler
    caller: Caller
    receive: Receive


def answer_session(
    head: RequestHead, path: str, handler: PlaneHandler, caller: Caller, receive: Receive
) -> Reply:
    """Answer a request whose path begins with `SESSIONS`; no body but a cache's is read.

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
    return act(_Asked(session, head, handler, caller, receive))


def answer_owner(head: RequestHead, path: str, handler: PlaneHandler, caller: Caller) -> Reply:
    """Answer a request whose path begins with `OWNERS`, when the node ends.

    Raises:
        MeshError: to be answered instead.
        CallerGoneError: the owner has left.
    """
    if head.method != "POST":
        return not_allowed(head.method, path, "POST")
    text = path.removeprefix(OWNERS)
    try:
        owner = parse_owner(text)
    except ValueError as error:
        raise MeshError(
            Code.INVALID_ARGUMENT, f"owner {text[:80]!r}; expected {error}", field="owner"
        ) from None
    handler.attend(owner, caller)
    return Reply(204, [], None)


def _release(asked: _Asked) -> Reply:
    asked.handler.release(unpack_release(asked.session, asked.head.fields), asked.caller)
    return Reply(204, [], None)


def _reserve(asked: _Asked) -> Reply:
    asked.handler.reserve(unpack_reservation(asked.session, asked.head.fields), asked.caller)
    return Reply(204, [], None)


def _move(asked: _Asked) -> Reply:
    asked.handler.move(unpack_move(asked.session, asked.head.fields), asked.caller)
    return Reply(204, [], None)


def _take(asked: _Asked) -> Reply:
    header = unpack_cache(asked.session, asked.head.fields)
    _check_length(asked.head, header)
    arriving = asked.handler.take_cache(header, asked.caller)
    try:
        asked.receive(arriving.memory)
    except BaseException:
        arriving.drop()
        raise
    arriving.keep()
    return Reply(204, [], None)


def _check_length(head: RequestHead, header: CacheHeader) -> None:
    """Refuse a body that is not just the cache's, before anything is taken for it."""
    if head.content_length is None:
        raise WireError(
            f"Content-Length is missing; expected {header.num_bytes}, as the header says",
            field="Content-Length",
            code=Code.LENGTH_REQUIRED,
        )
    if head.content_length != header.num_bytes:
        raise WireError(
            f"Content-Length: body has {head.content_length} bytes; expected"
            f" {header.num_bytes}, for {header.tokens} tokens of"
            f" {header.kv.bytes_per_token} bytes",
            field="Content-Length",
        )


def _rebuild(asked: _Asked) -> Reply:
    asked.handler.rebuild(unpack_rebuild(asked.session, asked.head.fields), asked.caller)
    return Reply(204, [], None)


_METHODS: Final[dict[str, dict[str, Callable[[_Asked], Reply]]]] = {
    "": {"DELETE": _release, "PUT": _reserve},
    "/cache": {"PUT": _take},
    "/move": {"POST": _move},
    "/rebuild": {"POST": _rebuild},
}
"""By what follows the session's id in the path, then by method."""
