"""What was sent on of each session, kept so that a lost node's cache can be computed again.

A journal holds the outputs that went to the next hop, by reference, with the borders of
their chunks. All journals together have a budget of memory; a thread of its own writes
those least recently used to a temporary file before it is reached, and what finds no room
there either is dropped: the session then goes on without one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy.typing as npt

from meshnet.dtypes import BFLOAT16, view_bytes
from meshnet.errors import Code, MeshError
from meshnet.wire import view_tensor
from meshnet_node.spill import Extent, SpillFile

__all__ = ["Journal", "JournalLimits", "Journals"]

_log = logging.getLogger(__name__)

_ENTRY_BYTES: Final = 256
"""What an entry takes beside its numbers: the array's own object and the entry's."""
_ROUND_BYTES: Final = 8 * 1024 * 1024
"""Written at once; longer, and what waits for the file would wait long."""


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


class _Entry(NamedTuple):
    """One chunk's output.

    Attributes:
        position: of its first token.
        tokens: in it.
        tensor: bfloat16 ``[1, tokens, hidden]``; None where it is in the file.
    """

    position: int
    tokens: int
    tensor: npt.NDArray[Any] | None


class Journal:
    """One session's: `add` what is sent on, in the session's turns, until `close`.

    Attributes:
        extent: its part of the temporary file.
        width: of its tensors.
        memory_bytes: taken by its entries in memory.
        spilled_bytes: of those in the file.
        used: when it was added to last, by `Journals.clock`.
        lost: it was dropped.
        closed: its session has ended.
    """

    def __init__(self, journals: Journals) -> None:
        self._journals = journals
        self._entries: list[_Entry] = []
        self._end = 0
        self._num_spilled = 0
        self.extent = Extent()
        self.width = 0
        self.memory_bytes = 0
        self.spilled_bytes = 0
        self.used = 0
        self.lost = False
        self.closed = False

    def add(self, position: int, tensor: npt.NDArray[Any]) -> None:
        """Keep what is sent on: bfloat16 ``[1, tokens, hidden]``, not to be changed any more.

        What was kept from `position` on is forgotten. After a gap, or once dropped, nothing
        is kept until the session begins anew at 0.
        """
        if position != self._end:
            self._cut(position)
        journals = self._journals
        tokens = tensor.shape[1]
        self._end = position + tokens
        num_bytes = tensor.nbytes + _ENTRY_BYTES
        with journals.lock:
            if self.lost or self.closed:
                return
            if journals.memory_bytes + num_bytes <= journals.limits.memory_bytes:
                self._entries.append(tuple.__new__(_Entry, (position, tokens, tensor)))
                self.width = tensor.shape[2]
                self.memory_bytes += num_bytes
                journals.memory_bytes += num_bytes
                journals.clock += 1
                self.used = journals.clock
                if journals.memory_bytes > journals.high_bytes:
                    journals.wake()
                return
        journals.drop(self, "memory is full")

    def covers(self, end: int) -> bool:
        """Tell whether every token before `end` is kept."""
        return not self.lost and not self.closed and self._end >= end > 0

    def borders(self, end: int) -> list[int]:
        """Give the lengths of the chunks in which the tokens before `end` were sent on."""
        return [
            min(entry.tokens, end - entry.position)
            for entry in list(self._entries)
            if entry.position < end
        ]

    def read(self, end: int) -> Iterator[npt.NDArray[Any]]:
        """Give the tokens before `end`, chunk by chunk, in the session's turn.

        Raises:
            MeshError: ABORTED, reason ``JOURNAL_LOST``: some are not kept (any more).
        """
        if not self.covers(end):
            raise self._missing(end)
        offset = 0
        for entry in list(self._entries):
            if entry.position >= end:
                return
            num_bytes = entry.tokens * self.width * 2
            tensor = entry.tensor
            if tensor is None:
                tensor = self._read_back(entry, offset, offset + num_bytes, end)
            offset += num_bytes
            yield tensor[:, : end - entry.position]

    def close(self) -> None:
        """Forget everything; waits for no disk."""
        journals = self._journals
        with journals.lock:
            self.closed = True
            self.forget_entries(0)
            journals.forget(self)

    def spillable(self) -> list[_Entry]:
        """Give the oldest entries in memory, of one round; under the lock."""
        taken: list[_Entry] = []
        num_bytes = 0
        for entry in self._entries[self._num_spilled :]:
            if entry.tensor is None or (taken and num_bytes + entry.tensor.nbytes > _ROUND_BYTES):
                break
            taken.append(entry)
            num_bytes += entry.tensor.nbytes
        return taken

    def mark_spilled(self, entries: list[_Entry]) -> None:
        """Let go of the tensors of `entries`, up to the first that was cut meanwhile; locked."""
        for entry in entries:
            index = self._num_spilled
            if index >= len(self._entries) or self._entries[index] is not entry:
                break
            tensor = entry.tensor
            if tensor is None:
                break
            self._entries[index] = entry._replace(tensor=None)
            self._num_spilled += 1
            self._count_off(tensor)
            self.spilled_bytes += tensor.nbytes

    def forget_entries(self, first: int) -> None:
        """Drop the entries from index `first` on; under the lock. The file keeps its bytes."""
        for entry in self._entries[first:]:
            if entry.tensor is not None:
                self._count_off(entry.tensor)
            else:
                self.spilled_bytes -= entry.tokens * self.width * 2
        del self._entries[first:]
        if first < self._num_spilled:
            self._num_spilled = first
            self._journals.trim_later(self)

    def _cut(self, position: int) -> None:
        """Forget what was kept from `position` on."""
        if position == 0:
            self.lost = False
        elif position > self._end:
            self._journals.drop(self, f"position {position} follows {self._end}")
            return
        with self._journals.lock:
            first = len(self._entries)
            while first and self._entries[first - 1].position >= position:
                first -= 1
            self.forget_entries(first)
            self._end = position
            last = self._entries[-1] if self._entries else None
            within = last is not None and last.position + last.tokens > position
        if within:
            # Our gateway cuts where chunks end; another's cut inside of one is not worth code.
            self._journals.drop(self, f"position {position} is inside of a chunk")

    def _count_off(self, tensor: npt.NDArray[Any]) -> None:
        num_bytes = tensor.nbytes + _ENTRY_BYTES
        self.memory_bytes -= num_bytes
        self._journals.memory_bytes -= num_bytes

    def _read_back(self, entry: _Entry, start: int, stop: int, end: int) -> npt.NDArray[Any]:
        data = self._journals.read(self, start, stop)
        if data is None:
            raise self._missing(end)
        return view_tensor(data, (1, entry.tokens, self.width), BFLOAT16)

    def _missing(self, end: int) -> MeshError:
        return MeshError(
            Code.ABORTED,
            f"the journal of this session does not hold its first {end} tokens (any more)",
            reason="JOURNAL_LOST",
        )


class Journals:
    """The journals of one node, under one budget; `close` ends the thread that writes them.

    Args:
        limits: see there.

    Attributes:
        lock: guards entries and counts; never held while the file is read or written.
        memory_bytes: taken by entries in memory.
        high_bytes: above it, entries are written to the file.
        clock: counts uses, to tell which journal was used last.
        num_dropped: journals that found no room.
    """

    def __init__(self, limits: JournalLimits | None = None) -> None:
        self.limits = limits or JournalLimits()
        self.lock = threading.Lock()
        self.memory_bytes = 0
        self.high_bytes = self.limits.memory_bytes * 3 // 4
        self.clock = 0
        self.num_dropped = 0
        self._low_bytes = self.limits.memory_bytes // 2
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
            journal.forget_entries(0)
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
                entries = journal.spillable()
            why = self._write(journal, entries)
        if why:
            self.drop(journal, why)
        return True

    def _write(self, journal: Journal, entries: list[_Entry]) -> str:
        """Move entries to the file; says why not, where they cannot be."""
        pieces = [view_bytes(entry.tensor) for entry in entries if entry.tensor is not None]
        num_bytes = sum(map(len, pieces))
        while not self._file.has_room(journal.extent, num_bytes):
            if not self._drop_oldest(journal):
                return "the temporary file is full"
        try:
            self._file.append(journal.extent, pieces)
        except OSError as error:
            return f"the temporary file: {error}"
        with self.lock:
            journal.mark_spilled(entries)
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
            oldest.forget_entries(0)
            self._trim(oldest)
            self.num_dropped += 1
        _log.info("a session goes on without a journal: the temporary file is full")
        return True
