"""What was sent on of each session, kept so that a lost node's cache can be computed again.

A journal holds the outputs that went to the next hop, by reference, with the borders of
their chunks. All journals together have a budget of memory; a thread of its own writes
those least recently used to a temporary file before it is reached, and what finds no room
there either is dropped: the session then goes on without one.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy.typing as npt

from meshnet.dtypes import BFLOAT16, item_size, view_bytes
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
        # Of each chunk: where it starts, and its output, None where that is in the file. Plain
        # lists, of what the garbage collector need not look into.
        self._starts: list[int] = []
        self._tensors: list[npt.NDArray[Any] | None] = []
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
        _, tokens, self.width = tensor.shape
        self._end = position + tokens
        num_bytes = tensor.nbytes + _ENTRY_BYTES
        with journals.lock:
            if self.lost or self.closed:
                return
            total = journals.memory_bytes + num_bytes
            if total <= journals.max_bytes:
                self._starts.append(position)
                self._tensors.append(tensor)
                self.memory_bytes += num_bytes
                journals.memory_bytes = total
                journals.clock = self.used = journals.clock + 1
                if total > journals.high_bytes:
                    journals.wake()
                return
        journals.drop(self, "memory is full")

    def covers(self, end: int) -> bool:
        """Tell whether every token before `end` is kept."""
        return not self.lost and not self.closed and self._end >= end > 0

    def borders(self, end: int) -> list[int]:
        """Give the lengths of the chunks in which the tokens before `end` were sent on."""
        starts = [start for start in self._starts if start < end]
        return [after - start for start, after in zip(starts, [*starts[1:], end], strict=False)]

    def read(self, end: int) -> Iterator[npt.NDArray[Any]]:
        """Give the tokens before `end`, chunk by chunk, in the session's turn.

        Raises:
            MeshError: ABORTED, reason ``JOURNAL_LOST``: some are not kept (any more).
        """
        if not self.covers(end):
            raise self._missing(end)
        token_bytes = self.width * item_size(BFLOAT16)
        for position, tokens, kept in zip(
            list(self._starts), self.borders(end), list(self._tensors), strict=False
        ):
            tensor = kept
            if tensor is None:
                start = position * token_bytes
                data = self._journals.read(self, start, start + tokens * token_bytes)
                if data is None:
                    raise self._missing(end)
                tensor = view_tensor(data, (1, tokens, self.width), BFLOAT16)
            yield tensor[:, :tokens]

    def close(self) -> None:
        """Forget everything; waits for no disk."""
        journals = self._journals
        with journals.lock:
            self.closed = True
            self.forget_from(0)
            journals.forget(self)

    def spillable(self) -> list[npt.NDArray[Any]]:
        """Give the oldest outputs in memory, of one round; under the lock."""
        taken: list[npt.NDArray[Any]] = []
        num_bytes = 0
        for tensor in self._tensors[self._num_spilled :]:
            if tensor is None or (taken and num_bytes + tensor.nbytes > _ROUND_BYTES):
                break
            taken.append(tensor)
            num_bytes += tensor.nbytes
        return taken

    def mark_spilled(self, tensors: list[npt.NDArray[Any]]) -> None:
        """Let go of `tensors`, up to the first that was cut meanwhile; under the lock."""
        for tensor in tensors:
            index = self._num_spilled
            if index >= len(self._tensors) or self._tensors[index] is not tensor:
                break
            self._tensors[index] = None
            self._num_spilled += 1
            self._count_off(tensor)
            self.spilled_bytes += tensor.nbytes

    def forget_from(self, index: int) -> None:
        """Drop the chunks from `index` on; under the lock. The file keeps its bytes for now."""
        for tensor in self._tensors[index:]:
            if tensor is not None:
                self._count_off(tensor)
        if index < self._num_spilled:
            self.spilled_bytes = self._starts[index] * self.width * item_size(BFLOAT16)
            self._num_spilled = index
            self._journals.trim_later(self)
        del self._starts[index:]
        del self._tensors[index:]

    def _cut(self, position: int) -> None:
        """Forget what was kept from `position` on."""
        if position == 0:
            self.lost = False
        elif position > self._end:
            self._journals.drop(self, f"position {position} follows {self._end}")
            return
        with self._journals.lock:
            index = bisect_left(self._starts, position)
            is_border = index < len(self._starts) and self._starts[index] == position
            self.forget_from(index)
        if position and not is_border:
            # Our gateway cuts where chunks end; another's cut inside of one is not worth code.
            self._journals.drop(self, f"position {position} is inside of a chunk")

    def _count_off(self, tensor: npt.NDArray[Any]) -> None:
        num_bytes = tensor.nbytes + _ENTRY_BYTES
        self.memory_bytes -= num_bytes
        self._journals.memory_bytes -= num_bytes

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
