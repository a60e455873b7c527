"""The journals of a node under one budget: in memory, then in a temporary file, then dropped."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt

from meshnet.dtypes import view_bytes
from meshnet_node.journal import Journal
from meshnet_node.spill import SpillFile

__all__ = ["JournalLimits", "Journals"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class JournalLimits:
    """What journals may take, all of a node's together.

    Attributes:
        memory_bytes: of memory; 0 keeps no journals.
        disk_bytes: of the temporary file; 0 writes none.
        directory: for that file; None is the system's for temporary files.
    """

    memory_bytes: int = 256 * 1024 * 1024
    disk_bytes: int = 4 * 1024 * 1024 * 1024
    directory: Path | None = None


class Journals:
    """The journals of one node, under one budget; `close` ends the thread that writes them.

    Args:
        limits: see there.

    Attributes:
        lock: guards entries and counts; never held while the file is read or written.
        memory_bytes: taken by entries in memory.
        max_bytes: that these may take.
        high_bytes: above it, entries are written to the file.
        clock: counts uses, to tell which journal was used last.
        num_dropped: journals that found no room.
    """

    def __init__(self, limits: JournalLimits | None = None) -> None:
        self.limits = limits or JournalLimits()
        self.lock = threading.Lock()
        self.memory_bytes = 0
        self.max_bytes = self.limits.memory_bytes
        self.high_bytes = self.max_bytes * 3 // 4
        self.clock = 0
        self.num_dropped = 0
        self._low_bytes = self.max_bytes // 2
        self._journals: set[Journal] = set()
        self._file = SpillFile(self.limits.directory, self.limits.disk_bytes)
        self._file_lock = threading.Lock()  # taken before `lock`, never after
        self._loose: set[Journal] = set()
        self._work = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    @property
    def spilled_bytes(self) -> int:
        """Bytes of the temporary file in use."""
        return self._file.used_bytes

    def open(self) -> Journal:
        """Make a session's journal."""
        journal = Journal(self)
        with self.lock:
            self._journals.add(journal)
        return journal

    def close(self) -> None:
        """End the thread, and give the file back."""
        self._closed = True
        self._work.set()
        if self._thread is not None:
            self._thread.join()
        with self._file_lock:
            self._file.close()

    def wake(self) -> None:
        """Have the thread look for what is to be done; under the lock."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
            self._thread.start()
        self._work.set()

    def drop(self, journal: Journal, why: str) -> None:
        """Forget what a journal holds, until its session begins anew."""
        with self.lock:
            if journal.lost or journal.closed:
                return
            journal.lost = True
            journal.forget_from(0)
            self.num_dropped += 1
        _log.info("a session goes on without a journal: %s", why)

    def forget(self, journal: Journal) -> None:
        """Forget a closed journal; under the lock."""
        self._journals.discard(journal)

    def trim_later(self, journal: Journal) -> None:
        """Have the bytes given back that no entry refers to any more; under the lock."""
        self._loose.add(journal)
        self.wake()

    def read(self, journal: Journal, start: int, end: int) -> bytearray | None:
        """Read what a journal has in the file; None where that is gone."""
        with self._file_lock:
            if self._closed or end > journal.extent.length:
                return None
            try:
                return self._file.read(journal.extent, start, end)
            except OSError as error:
                _log.warning("a journal cannot be read: %s", error)
                return None

    def _run(self) -> None:
        is_full = False
        while True:
            self._work.wait()
            self._work.clear()
            while not self._closed:
                self._trim_all()
                is_full = self.memory_bytes > (self._low_bytes if is_full else self.high_bytes)
                if not (is_full and self._spill_one()):
                    break
            if self._closed:
                return

    def _trim_all(self) -> None:
        while True:
            with self._file_lock, self.lock:
                if not self._loose:
                    return
                journal = self._loose.pop()
                self._trim(journal)

    def _trim(self, journal: Journal) -> None:
        """Give back the bytes that no entry refers to; under both locks."""
        self._loose.discard(journal)
        self._file.cut(journal.extent, journal.spilled_bytes)

    def _spill_one(self) -> bool:
        """Write a round of the journal least recently used; False where none has any."""
        with self.lock:
            held = [journal for journal in self._journals if journal.memory_bytes]
            if not held:
                return False
            journal = min(held, key=lambda item: item.used)
        with self._file_lock:
            with self.lock:
                self._trim(journal)
                tensors = journal.spillable()
            why = self._write(journal, tensors)
        if why:
            self.drop(journal, why)
        return True

    def _write(self, journal: Journal, tensors: list[npt.NDArray[Any]]) -> str:
        """Move outputs to the file; says why not, where they cannot be."""
        pieces = list(map(view_bytes, tensors))
        num_bytes = sum(map(len, pieces))
        while not self._file.has_room(journal.extent, num_bytes):
            if not self._drop_oldest(journal):
                return "the temporary file is full"
        try:
            self._file.append(journal.extent, pieces)
        except OSError as error:
            return f"the temporary file: {error}"
        with self.lock:
            journal.mark_spilled(tensors)
            self._trim(journal)
        return ""

    def _drop_oldest(self, but: Journal) -> bool:
        """Drop the journal in the file that was least recently used; False where none is."""
        with self.lock:
            spilled = [item for item in self._journals if item.extent.length and item is not but]
            if not spilled:
                return False
            oldest = min(spilled, key=lambda item: item.used)
            if oldest.used > but.used:
                return False
            oldest.lost = True
            oldest.forget_from(0)
            self._trim(oldest)
            self.num_dropped += 1
        _log.info("a session goes on without a journal: the temporary file is full")
        return True
