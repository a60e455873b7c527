"""The temporary file of blocks: what is written is read, and what is cut is free again."""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet_node.spill import Extent, SpillFile

BLOCK = 64 * 1024


def noise(num_bytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def test_pieces_are_read_back_across_blocks(tmp_path):
    file, extent = SpillFile(tmp_path, 8 * BLOCK), Extent()
    data = noise(3 * BLOCK + 17)
    file.append(extent, [data[:5], data[5 : 2 * BLOCK]])
    file.append(extent, [data[2 * BLOCK :]])
    assert extent.length == len(data)
    for start, end in [(0, len(data)), (3, 9), (BLOCK - 1, BLOCK + 1), (7, 7), (BLOCK, 2 * BLOCK)]:
        assert file.read(extent, start, end) == data[start:end]
    assert file.used_bytes == 4 * BLOCK
    file.close()


def test_the_file_has_no_name_and_only_its_user_reads_it(tmp_path):
    file, extent = SpillFile(tmp_path, BLOCK), Extent()
    file.append(extent, [b"x"])
    assert list(tmp_path.iterdir()) == []
    assert os.fstat(file._file.fileno()).st_mode & 0o077 == 0
    file.close()


def test_the_bound_counts_blocks(tmp_path):
    file, one, other = SpillFile(tmp_path, 2 * BLOCK), Extent(), Extent()
    file.append(one, [b"x"])
    assert file.has_room(one, 2 * BLOCK - 1)
    assert not file.has_room(one, 2 * BLOCK)
    assert file.has_room(other, BLOCK)
    assert not file.has_room(other, BLOCK + 1)
    file.close()


def test_an_empty_file_gives_its_disk_back(tmp_path):
    file, extent = SpillFile(tmp_path, 8 * BLOCK), Extent()
    file.append(extent, [noise(3 * BLOCK)])
    file.cut(extent, 0)
    assert os.fstat(file._file.fileno()).st_size == 0
    assert file.used_bytes == 0
    file.append(extent, [b"again"])
    assert file.read(extent, 0, 5) == b"again"
    file.close()


def test_a_directory_that_is_not_there_is_the_systems_error(tmp_path):
    file, extent = SpillFile(tmp_path / "none", BLOCK), Extent()
    with pytest.raises(OSError, match="none"):
        file.append(extent, [b"x"])
    assert (extent.length, file.used_bytes) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3 * BLOCK), st.booleans())))
def test_extents_do_not_disturb_each_other(moves):
    file, extents, held = SpillFile(None, 10 * BLOCK), [Extent() for _ in range(3)], [b""] * 3
    for number, (owner, size, grows) in enumerate(moves):
        extent = extents[owner]
        if not grows:
            file.cut(extent, size)
            held[owner] = held[owner][:size]
        elif file.has_room(extent, size):
            data = noise(size, number)
            file.append(extent, [data])
            held[owner] += data
        for other, expected in zip(extents, held, strict=True):
            assert other.length == len(expected)
        assert file.used_bytes == sum(-(-len(data) // BLOCK) for data in held) * BLOCK <= 10 * BLOCK
    for extent, expected in zip(extents, held, strict=True):
        assert expected == b"" or file.read(extent, 0, len(expected)) == expected
    file.close()
