"""What one session sent on, kept so that a lost node's cache can be computed again."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, Final, Protocol

import numpy.typing as npt

from meshnet.dtypes import BFLOAT16, item_size
from meshnet.errors import Code, MeshError
from meshnet.wire import view_tensor
from meshnet_node.spill import Extent

__all__ = ["Journal", "JournalKeeper"]

_ENTRY_BYTES: Final = 256
"""What an entry takes beside its numbers: the array's own object and its places in the lists."""
_ROUND_BYTES: Final = 8 * 1024 * 1024
"""Written at once; longer, and what waits for the file would wait long."""


class JournalKeeper(Protocol):
    """What the journals of a node have in common.

    Attributes:
        lock: guards what journals hold and the counts; never held while a file is used.
        memory_bytes: taken by all journals in memory.
        max_bytes: that these may take.
        high_bytes: above it, the keeper is to be woken.
        clock: counts uses, to tell which journal was used last.
    """

    lock: threading.Lock
    memory_bytes: int
    max_bytes: int
    high_bytes: int
    clock: int

    def wake(self) -> None:
        """Have entries written to the file; under the lock."""
        ...

    def drop(self, journal: Journal, why: str) -> None:
        """Forget what a journal holds, until its session begins anew."""
        ...

    def forget(self, journal: Journal) -> None:
        """Forget a closed journal; under the lock."""
        ...

    def trim_later(self, journal: Journal) -> None:
        """Have the bytes given back that no entry refers to any more; under the lock."""
        ...

    def read(self, journal: Journal, start: int, end: int) -> bytearray | None:
        """Read what a journal has in the file; None where that is gone."""
        ...


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

    def __init__(self, journals: JournalKeeper) -> None:
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
