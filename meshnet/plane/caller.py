"""Who a request is computed for, and how its waits end when that caller goes away."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

from meshnet.identity import Identity

__all__ = ["Caller", "CallerGoneError"]


class CallerGoneError(Exception):
    """Nobody waits for the answer any more."""


class Caller:
    """The other end of one connection, as what computes for it sees it.

    What waits for its sake can also be interrupted by an error, which is that wait's alone.

    Attributes:
        gone: it has left, or the server ends; stays so.
        identity: who it is, where its certificate says so.
        uri: the same as a SPIFFE ID; empty where that is not known.
    """

    __slots__ = ("_failure", "_lock", "_wake", "gone", "identity", "uri")

    def __init__(self, identity: Identity | None = None) -> None:
        self.gone = False
        self.introduce(identity)
        self._lock = threading.Lock()
        self._wake: Callable[[], object] | None = None
        self._failure: Exception | None = None

    def introduce(self, identity: Identity | None) -> None:
        """Say who it is, before anything is asked."""
        self.identity = identity
        self.uri = "" if identity is None else identity.uri

    def leave(self) -> None:
        """Mark the caller as gone, and wake what waits for its sake."""
        with self._lock:
            self.gone = True
            if self._wake is not None:
                self._wake()

    def interrupt(self, failure: Exception) -> None:
        """Wake what waits now, and have its `check` raise `failure`; nothing where none waits."""
        with self._lock:
            if self._wake is not None:
                self._failure = failure
                self._wake()

    def check(self) -> None:
        """Raise CallerGoneError where the caller is gone, or what this wait is interrupted by."""
        if self.gone:
            raise CallerGoneError
        if self._failure is not None:
            raise self._failure

    def waking(self, wake: Callable[[], object]) -> _Waking:
        """Have `wake` called, from another thread, if the caller leaves within the block.

        Never enter or leave the block while holding a lock that `wake` takes.

        Raises:
            CallerGoneError: on entry, the caller has left already.
        """
        return _Waking(self, wake)


class _Waking:
    __slots__ = ("_caller", "_wake")

    def __init__(self, caller: Caller, wake: Callable[[], object]) -> None:
        self._caller = caller
        self._wake = wake

    def __enter__(self) -> None:
        caller = self._caller
        with caller._lock:
            if caller.gone:
                raise CallerGoneError
            caller._failure = None
            caller._wake = self._wake

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._caller._lock:
            self._caller._wake = None
