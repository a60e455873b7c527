"""Notices callers that leave while their requests are computed."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from collections.abc import Callable

__all__ = ["Watcher"]


class Watcher:
    """One thread that waits for the other ends of many sockets to close.

    A socket is registered once, for its end alone and edge-triggered: requests on it cost
    nothing here, whatever they send. Linux only; elsewhere a caller's leaving shows when
    its answer is sent.
    """

    def __init__(self) -> None:
        self._ended: dict[int, Callable[[], object]] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        if sys.platform == "linux":
            self._poll = select.epoll()
            self._reader, self._writer = os.pipe()
            self._poll.register(self._reader, select.EPOLLIN)
            self._thread = threading.Thread(target=self._run, name="plane-watcher", daemon=True)
            self._thread.start()

    def watch(self, descriptor: int, ended: Callable[[], object]) -> None:
        """Call `ended` from the watcher's thread, once, when the other end has closed."""
        if sys.platform == "linux":
            with self._lock:
                self._ended[descriptor] = ended
                self._poll.register(descriptor, select.EPOLLRDHUP | select.EPOLLET)

    def forget(self, descriptor: int) -> None:
        """Watch no more; before the descriptor is closed, since its number is used again."""
        if sys.platform == "linux":
            # A thread that computes may outlive this watcher, whose descriptor is closed then.
            with self._lock, contextlib.suppress(OSError, ValueError):
                self._ended.pop(descriptor, None)
                self._poll.unregister(descriptor)

    def close(self) -> None:
        """End the thread."""
        if sys.platform == "linux" and self._thread is not None:
            os.write(self._writer, b"\0")
            self._thread.join()
            self._thread = None
            self._poll.close()
            os.close(self._reader)
            os.close(self._writer)

    if sys.platform == "linux":

        def _run(self) -> None:
            while True:
                for descriptor, _ in self._poll.poll():
                    if descriptor == self._reader:
                        return
                    with self._lock:
                        # Since the event the descriptor may have been closed, and be
                        # another caller's by now: look again.
                        if descriptor in self._ended and _has_ended(descriptor):
                            self._ended.pop(descriptor)()


if sys.platform == "linux":

    def _has_ended(descriptor: int) -> bool:
        look = select.poll()
        look.register(descriptor, select.POLLRDHUP)
        return bool(look.poll(0))
