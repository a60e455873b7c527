"""Who makes the call that is being answered, for the code that answers it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from meshnet.identity import Identity

__all__ = ["acting", "current_caller"]

_caller: ContextVar[Identity | None] = ContextVar("caller", default=None)


def current_caller() -> Identity | None:
    """Give who called, the same on both faces.

    None on a control plane that is open, where nobody says who they are, and for the few
    methods that callers without credentials may call.
    """
    return _caller.get()


@contextmanager
def acting(caller: Identity | None) -> Iterator[None]:
    """Answer a call of `caller` in the block, and in the tasks that it starts."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)
