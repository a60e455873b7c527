"""What the server answers besides tensors, before it is written to a connection (pure)."""

from __future__ import annotations

from dataclasses import dataclass
from email.utils import formatdate

from meshnet.dtypes import Body
from meshnet.errors import Code, MeshError
from meshnet.problem import pack_problem

__all__ = ["Reply", "date", "late", "not_allowed", "problem"]


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer.

    Attributes:
        status: HTTP status.
        fields: header fields, without those of the framing.
        body: None where the status allows none.
    """

    status: int
    fields: list[tuple[str, str]]
    body: Body | None = b""


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


_dates: dict[int, str] = {}


def date(now: float) -> str:
    """Write a Date header field's value (`now` in Unix seconds); kept for its second."""
    second = int(now)
    value = _dates.get(second)
    if value is None:
        _dates.clear()
        value = _dates[second] = formatdate(second, usegmt=True)
    return value
