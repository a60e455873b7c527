"""Journals of what was sent on: what they keep, what they let go, and what that costs."""

from __future__ import annotations

import threading
import time

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.errors import MeshError
from meshnet_node.journals import JournalLimits, Journals
from meshnet_node.rebuild import regroup

HIDDEN = 8
BOUND_S = 10.0
TOKEN_BYTES = 2 * HIDDEN


def states(first: int, tokens: int, hidden: int = HIDDEN) -> np.ndarray:
    """Make hidden states that say which position they are of."""
    tensor = np.zeros((1, tokens, hidden), np.uint16)
    tensor[0, :, 0] = np.arange(first, first + tokens)
    return tensor.view(ml_dtypes.bfloat16)


def positions(journal, end: int) -> list[list[int]]:
    return [piece.view(np.uint16)[0, :, 0].tolist() for piece in journal.read(end)]


@pytest.fixture
def journals():
    made = Journals()
    yield made
    made.close()


def until(check) -> None:
    end = time.monotonic() + BOUND_S
    while not check():
        assert time.monotonic() < end
        threading.Event().wait(0.002)


def test_what_was_added_is_read_in_its_borders(journals):
    journal = journals.open()
    journal.add(0, states(0, 3))
    journal.add(3, states(3, 1))
    journal.add(4, states(4, 2))
    assert journal.borders(6) == [3, 1, 2]
    assert journal.borders(5) == [3, 1, 1]
    assert positions(journal, 6) == [[0, 1, 2], [3], [4, 5]]
    assert positions(journal, 5) == [[0, 1, 2], [3], [4]]
    assert journal.covers(6)
    assert not journal.covers(7)
    assert not journal.covers(0)


def test_tensors_are_kept_by_reference(journals):
    journal, tensor = journals.open(), states(0, 4)
    journal.add(0, tensor)
    assert np.shares_memory(next(journal.read(4)), tensor)


def test_a_lower_position_forgets_what_followed(journals):
    journal = journals.open()
    for position in range(0, 12, 4):
        journal.add(position, states(position, 4))
    before = journals.memory_bytes
    journal.add(8, states(108, 4))
    assert journals.memory_bytes == before
    assert positions(journal, 12)[-1] == [108, 109, 110, 111]
    journal.add(4, states(4, 1))
    assert positions(journal, 5) == [[0, 1, 2, 3], [4]]
    assert not journal.covers(6)
    journal.add(0, states(50, 2))
    assert positions(journal, 2) == [[50, 51]]


@pytest.mark.parametrize("position", [2, 5])
def test_a_gap_or_a_cut_inside_a_chunk_loses_the_journal_until_the_session_begins_anew(
    journals, position
):
    journal = journals.open()
    journal.add(0, states(0, 4))
    journal.add(position, states(position, 1))
    with pytest.raises(MeshError) as caught:
        positions(journal, position + 1)
    assert caught.value.reason == "JOURNAL_LOST"
    assert caught.value.code.http_status == 409
    assert (journals.num_dropped, journals.memory_bytes) == (1, 0)
    journal.add(0, states(0, 2))
    assert positions(journal, 2) == [[0, 1]]


def test_closing_gives_everything_back(journals):
    journal = journals.open()
    journal.add(0, states(0, 4))
    journal.close()
    assert journals.memory_bytes == 0
    assert not journal.covers(4)
    journal.add(4, states(4, 1))
    assert journals.memory_bytes == 0


def test_without_memory_there_is_no_journal():
    journals = Journals(JournalLimits(memory_bytes=0))
    journal = journals.open()
    journal.add(0, states(0, 4))
    assert not journal.covers(4)
    assert journals.memory_bytes == 0
    journals.close()


def test_the_least_recently_used_goes_to_disk_and_is_read_from_there(tmp_path):
    """Each takes 512 bytes with what an entry costs; above 3/4 of 4096 they go until 2048."""
    journals = Journals(JournalLimits(4096, 1 << 20, tmp_path))
    old, new = journals.open(), journals.open()
    chunk = 16
    for index in range(3):
        old.add(index * chunk, states(index * chunk, chunk))
    for index in range(4):
        new.add(index * chunk, states(index * chunk, chunk))
    until(lambda: journals.memory_bytes <= 2048)
    assert (old.memory_bytes, new.memory_bytes) == (0, 2048)
    assert old.extent.length == 3 * chunk * TOKEN_BYTES
    assert journals.spilled_bytes > 0
    old.add(3 * chunk, states(3 * chunk, 2))
    assert old.borders(50) == [16, 16, 16, 2]
    assert positions(old, 50) == [[*range(i, min(i + 16, 50))] for i in (0, 16, 32, 48)]
    old.add(32, states(132, 1))
    assert positions(old, 33)[-1] == [132]
    until(lambda: old.extent.length == 2 * chunk * TOKEN_BYTES)
    for journal in (old, new):
        journal.close()
    assert journals.memory_bytes == 0
    until(lambda: journals.spilled_bytes == 0)
    journals.close()


def test_a_full_disk_drops_the_oldest(tmp_path):
    """One block each; the file has two, and the third to come takes the first one's."""
    journals = Journals(JournalLimits(4096, 2 * 64 * 1024, tmp_path))
    made = [journals.open() for _ in range(3)]
    for journal in made:
        for index in range(7):
            journal.add(index * 16, states(index * 16, 16))
        until(lambda: journals.memory_bytes == 0)
    assert journals.num_dropped == 1
    assert not made[0].covers(112)
    for journal in made[1:]:
        assert positions(journal, 112) == [[*range(i, i + 16)] for i in range(0, 112, 16)]
    journals.close()


def test_a_disk_that_fails_drops_the_journal_and_nothing_else(tmp_path, caplog):
    caplog.set_level("INFO")
    journals = Journals(JournalLimits(4096, 1 << 20, tmp_path / "none"))
    journal = journals.open()
    for index in range(7):
        journal.add(index * 16, states(index * 16, 16))
    until(lambda: "none" in caplog.text)
    assert (journals.num_dropped, journals.memory_bytes) == (1, 0)
    assert not journal.covers(96)
    journals.close()


def test_a_session_that_ends_while_it_is_written_leaves_nothing(tmp_path):
    journals = Journals(JournalLimits(4096, 1 << 20, tmp_path))
    journal = journals.open()
    writing, go_on = threading.Event(), threading.Event()
    append = journals._file.append

    def slow(extent, pieces):
        writing.set()
        assert go_on.wait(BOUND_S)
        append(extent, pieces)

    journals._file.append = slow
    for index in range(7):
        journal.add(index * 16, states(index * 16, 16))
    assert writing.wait(BOUND_S)
    ending = threading.Thread(target=journal.close)
    ending.start()
    until(lambda: journal.closed)
    go_on.set()
    ending.join(BOUND_S)
    until(lambda: journals.spilled_bytes == 0)
    assert (journals.memory_bytes, journal.extent.length) == (0, 0)
    journals.close()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 20)), max_size=40))
def test_any_history_reads_as_a_plain_list_would(moves):
    """Against a list of chunks; memory for a few, so that most of it is on disk."""
    journals = Journals(JournalLimits(2048, 1 << 20))
    journal = journals.open()
    kept: list[tuple[int, int, int]] | None = []
    end = 0
    for number, (back, tokens) in enumerate(moves):
        position = max(0, end - back) if back % 3 == 0 else end
        if position == 0:
            kept = []
        if kept is not None:
            kept = [item for item in kept if item[0] < position]
            if (kept[-1][0] + kept[-1][1] if kept else 0) != position:
                kept = None
        journal.add(position, states(number * 100, tokens))
        if kept is not None and not journal.lost:
            kept.append((position, tokens, number * 100))
        end = position + tokens
        if journal.lost:
            kept = None
        else:
            expected = [[*range(first, first + count)] for _, count, first in kept]
            assert positions(journal, end) == expected
        assert 0 <= journals.memory_bytes <= 2048
    journal.close()
    assert journals.memory_bytes == 0
    until(lambda: journals.spilled_bytes == 0)
    journals.close()


@pytest.mark.parametrize("sizes", [[1], [128], [3, 1, 1, 250, 128, 1], [1] * 300, [129], [512]])
def test_regroup_keeps_the_order_and_cuts_anew(sizes):
    pieces, position = [], 0
    for size in sizes:
        pieces.append(states(position, size))
        position += size
    found = list(regroup(iter(pieces), 128))
    assert [piece.shape[1] for piece in found[:-1]] == [128] * (len(found) - 1)
    assert 1 <= found[-1].shape[1] <= 128
    joined = np.concatenate(found, axis=1).view(np.uint16)[0, :, 0]
    assert joined.tolist() == list(range(sum(sizes)))
