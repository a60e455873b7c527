"""Who computes next: one chunk at a time, on the thread that brought it or on one of its own."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, Generic, TypeVar

from meshnet.errors import Code, MeshError
from meshnet.plane.caller import Caller

__all__ = ["Scheduler"]

_T = TypeVar("_T")

_MAX_AHEAD: Final = 8
"""Decode steps in a row that pass ahead of a prefill chunk that waits."""


class _Waiter:
    """A thread in the queue, woken by its own lock: the one that ends hands the turn over."""

    __slots__ = ("gate", "has_turn")

    def __init__(self) -> None:
        self.gate = threading.Lock()
        self.gate.acquire()
        self.has_turn = False


class Scheduler:
    """Lets one computation run at a time.

    Decode steps pass ahead of prefill chunks that wait, so that one long prompt does not
    stop every other session's text; after `_MAX_AHEAD` of them a prefill chunk has its turn.
    The chunks of one session are in order already: its session lets one through at a time.

    Args:
        one_thread: run every computation on one thread kept for that. Handing over costs
            two wake-ups, but a backend whose library keeps a pool of threads for each
            thread that calls it (OpenMP) has one pool then, not one a connection.
        max_wait_s: after which a chunk is refused.
        max_waiting: chunks that may wait; one more is refused.
    """

    def __init__(
        self, *, one_thread: bool = False, max_wait_s: float = 120.0, max_waiting: int = 1024
    ) -> None:
        self._lock = threading.Lock()
        self._busy = False
        self._decodes: deque[_Waiter] = deque()
        self._prefills: deque[_Waiter] = deque()
        self._idles: deque[_Waiter] = deque()
        self._num_ahead = 0
        self._max_wait_s = max_wait_s
        self._max_waiting = max_waiting
        self._worker = _Worker() if one_thread else None

    def run(self, work: Callable[[], _T], caller: Caller, *, urgent: bool) -> _T:
        """Wait for a turn and do `work`, which must not call this again.

        Args:
            work: computes.
            caller: the wait ends when it leaves; a computation that has begun does not.
            urgent: pass ahead of what is not.

        Raises:
            MeshError: UNAVAILABLE, too many wait or none ended in time.
            CallerGoneError: `caller` left while this waited.
        """
        return self._run(work, caller, self._decodes if urgent else self._prefills)

    def run_idle(self, work: Callable[[], _T], caller: Caller, *, max_wait_s: float) -> _T:
        """Do `work` when nothing else waits, as `run` does otherwise.

        Raises:
            MeshError: UNAVAILABLE (QUEUE_FULL), there was other work all the time.
            CallerGoneError: `caller` left while this waited.
        """
        return self._run(work, caller, self._idles, max_wait_s)

    def _run(
        self,
        work: Callable[[], _T],
        caller: Caller,
        queue: deque[_Waiter],
        max_wait_s: float | None = None,
    ) -> _T:
        with self._lock:
            is_free = not self._busy
            self._busy = True
        if not is_free:
            self._wait_turn(caller, queue, max_wait_s or self._max_wait_s)
        try:
            return work() if self._worker is None else self._worker.run(work)
        finally:
            with self._lock:
                self._pass_on()

    def close(self) -> None:
        """End the thread, after what it computes now."""
        if self._worker is not None:
            self._worker.close()

    def _wait_turn(self, caller: Caller, queue: deque[_Waiter], max_wait_s: float) -> None:
        with self._lock:
            if not self._busy:  # since
                self._busy = True
                return
            if len(self._decodes) + len(self._prefills) >= self._max_waiting:
                raise MeshError(
                    Code.UNAVAILABLE,
                    f"{self._max_waiting} chunks wait to be computed, the most allowed here",
                    reason="QUEUE_FULL",
                    retry_after_s=1.0,
                )
            waiter = _Waiter()
            queue.append(waiter)
        try:
            self._await_turn(caller, waiter, max_wait_s)
        except BaseException:
            with self._lock:
                if waiter.has_turn:
                    self._pass_on()
                else:
                    queue.remove(waiter)
            raise

    def _await_turn(self, caller: Caller, waiter: _Waiter, max_wait_s: float) -> None:
        until = time.monotonic() + max_wait_s
        with caller.waking(lambda: self._look_up(waiter)):
            while not waiter.has_turn:
                if not waiter.gate.acquire(timeout=max(0.0, until - time.monotonic())):
                    raise MeshError(
                        Code.UNAVAILABLE,
                        f"no turn to compute within {max_wait_s:g} s",
                        reason="QUEUE_FULL",
                        retry_after_s=1.0,
                    )
                caller.check()

    def _look_up(self, waiter: _Waiter) -> None:
        """Wake a waiter that was not given its turn."""
        with self._lock:
            if not waiter.has_turn and waiter.gate.locked():
                waiter.gate.release()

    def _pass_on(self) -> None:
        """Give the turn to the next in line."""
        if self._decodes and not (self._prefills and self._num_ahead >= _MAX_AHEAD):
            waiter = self._decodes.popleft()
            self._num_ahead += 1
        elif self._prefills:
            waiter = self._prefills.popleft()
            self._num_ahead = 0
        elif self._idles:
            waiter = self._idles.popleft()
            self._num_ahead = 0
        else:
            self._busy = False
            self._num_ahead = 0
            return
        waiter.has_turn = True
        if waiter.gate.locked():
            waiter.gate.release()


class _Worker:
    """A thread that does what it is handed, one thing after the other."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[_Task[Any] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="shard", daemon=True).start()

    def run(self, work: Callable[[], _T]) -> _T:
        """Do `work` there, and give what it gives or raise what it raises."""
        task = _Task(work)
        self._tasks.put(task)
        task.done.acquire()
        if task.error is not None:
            raise task.error
        result: _T = task.result
        return result

    def close(self) -> None:
        """End when all is done that was handed over."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task.result = task.work()
            except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
                task.error = error
            task.done.release()
            del task


class _Task(Generic[_T]):
    __slots__ = ("done", "error", "result", "work")

    def __init__(self, work: Callable[[], _T]) -> None:
        self.work = work
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Lock()
        self.done.acquire()
