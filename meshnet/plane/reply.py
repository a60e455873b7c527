"""What the server answers besides tensors, before it is written to a connection (pure)."""

from __future__ import annotations

from email.utils import formatdate
from typing import Final, NamedTuple

from meshnet.codec import ENCODINGS
from meshnet.dtypes import Body
from meshnet.errors import Code, MeshError
from meshnet.plane.http1 import build_answer
from meshnet.problem import pack_problem
from meshnet.wire import AnswerHeader, pack_answer

__all__ = ["Reply", "ReplyHeads", "date", "late", "not_allowed", "problem", "too_slow"]

_MAX_KNOWN: Final = 256
_NUM_LASTING: Final = AnswerHeader._fields.index("server_timing")
"""The fields of an answer's header before this one stay as they are for a session's steps."""


class Reply(NamedTuple):
    """One answer.

    Attributes:
        status: HTTP status.
        fields: header fields, without those of the framing.
        body: None where the status allows none.
        answer: to a chunk, instead of `fields`.
    """

    status: int
    fields: list[tuple[str, str]]
    body: Body | None = b""
    answer: AnswerHeader | None = None


class ReplyHeads:
    """Heads of replies; those to chunks are written anew in their Server-Timing alone.

    They say what this server reads, whatever the handler's header does.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], bytes] = {}

    def pack(self, reply: Reply, length: int | None, now: float, *, close: bool) -> bytes:
        """Write a reply's head (`now` in Unix seconds).

        Raises:
            ValueError: a value would break the head.
        """
        answer = reply.answer
        if answer is None:
            return build_answer(
                reply.status, [("Date", date(now)), *reply.fields], length, close=close
            )
        key = (int(now), length, close, answer[:_NUM_LASTING])
        begun = self._known.get(key)
        if begun is None:
            lasting = answer._replace(server_timing="", accept_encoding=ENCODINGS)
            fields = [("Date", date(now)), *pack_answer(lasting)]
            begun = build_answer(reply.status, fields, length, close=close)[:-2]
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[key] = begun
        timing = answer.server_timing
        if not timing:
            return begun + b"\r\n"
        if "\r" in timing or "\n" in timing:
            raise ValueError("Server-Timing holds CR or LF")
        return b"".join((begun, b"Server-Timing: ", timing.encode("latin-1"), b"\r\n\r\n"))


def problem(error: MeshError) -> Reply:
    """Answer with an error's problem details."""
    return Reply(*pack_problem(error))


def not_allowed(method: str, path: str, allow: str) -> Reply:
    """Answer 405; `allow` lists the methods that the path has."""
    message = f"{method[:20]} is not served on {path[:80]!r}; expected {allow}"
    reply = problem(MeshError(Code.METHOD_NOT_ALLOWED, message))
    reply.fields.append(("Allow", allow))
    return reply


def late(what: str, seconds: float) -> MeshError:
    """Give the error of a message that did not arrive in its time."""
    return MeshError(Code.REQUEST_TIMEOUT, f"{what} did not arrive within {seconds:.3g} s")


def too_slow(bytes_per_s: float) -> MeshError:
    """Give the error of a body that came too slowly for a server that is crowded."""
    return MeshError(
        Code.REQUEST_TIMEOUT,
        "more than half of the connections are in use, and the body came too slowly for that;"
        f" expected {bytes_per_s:g} bytes a second (crowded_bytes_per_s)",
    )


_dates: dict[int, str] = {}


def date(now: float) -> str:
    """Write a Date header field's value (`now` in Unix seconds); kept for its second."""
    second = int(now)
    value = _dates.get(second)
    if value is None:
        _dates.clear()
        value = _dates[second] = formatdate(second, usegmt=True)
    return value
