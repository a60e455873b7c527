"""Whose body comes too slowly for a server that is crowded (pure).

While there is room, a slow link is nobody's loss. Once more than half of the connections are
taken, whoever sends little more than the least that a server bears, on many connections, would
keep others out at a small price: bodies are due at a higher rate then.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, TypeVar

__all__ = ["Receiving", "is_crowded", "slowest"]

_T = TypeVar("_T")


class Receiving(NamedTuple):
    """Bytes that are on their way: a body, or so much of it as has a deadline of its own.

    Attributes:
        began: monotonic seconds.
        num_bytes: all of them.
    """

    began: float
    num_bytes: int


def is_crowded(num_open: int, max_connections: int) -> bool:
    """Tell whether more than half of the connections are taken."""
    return 2 * num_open > max_connections


def slowest(
    bodies: Iterable[tuple[_T, Receiving]], now: float, *, spare_s: float, bytes_per_s: float
) -> _T | None:
    """Give whose body is overdue for longest, at a rate; None where none is.

    Args:
        bodies: on their way, by what they come over.
        now: monotonic seconds.
        spare_s: what each gets beyond its bytes over `bytes_per_s`.
        bytes_per_s: at which it is due.
    """
    found, longest_s = None, 0.0
    for sender, body in bodies:
        overdue_s = now - body.began - spare_s - body.num_bytes / bytes_per_s
        if overdue_s > longest_s:
            found, longest_s = sender, overdue_s
    return found
