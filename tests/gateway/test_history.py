"""What a session was fed, and how it is cut when it is fed again."""

from __future__ import annotations

import pytest

from meshnet.operations import RebuildMode
from meshnet_gateway.history import History


def fed(mode: RebuildMode) -> History:
    history = History(4, mode)
    for step in (range(10), range(10, 11), range(11, 16)):
        history.add(step)
    return history


def test_all_tokens_come_back_in_order() -> None:
    assert fed(RebuildMode.FAST).tokens() == list(range(16))


@pytest.mark.parametrize(
    ("start", "end", "sizes"),
    [(0, 16, [4, 4, 2, 1, 4, 1]), (0, 10, [4, 4, 2]), (10, 16, [1, 4, 1]), (15, 16, [1])],
)
def test_exactly_the_chunks_of_the_first_time(start: int, end: int, sizes: list[int]) -> None:
    history = fed(RebuildMode.EXACT)
    assert history.sizes(start, end) == sizes
    assert sum(sizes) == end - start


def test_the_usual_chunks_where_speed_counts() -> None:
    assert fed(RebuildMode.FAST).sizes(0, 16) is None
