"""Stop strings: nothing of one is ever shown, and nothing else is ever lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet_gateway.stops import StopFilter


def run(pieces: list[str], stops: list[str]) -> tuple[list[str], bool]:
    """Push all pieces; give what was shown after each and whether a stop was met."""
    stop_filter = StopFilter(stops)
    shown = [stop_filter.push(piece) for piece in pieces]
    shown.append("" if stop_filter.stopped else stop_filter.flush())
    return shown, stop_filter.stopped


def model(text: str, stops: list[str]) -> tuple[str, bool]:
    """Say what must be shown of the whole text: up to the stop that ends first."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "stopped"),
    [
        (["ok ", "<<E", "ND", ">>x"], ["<<END>>"], ["ok ", "", "", "", ""], True),
        (["ok ", "<<E", "ND"], ["<<END>>"], ["ok ", "", "", "<<END"], False),
        (["ab", "ab", "c"], ["abc"], ["", "ab", "", ""], True),
        (["abcd"], ["abcd", "bc"], ["a", ""], True),
        (["xbc"], ["bc", "xbc"], ["", ""], True),
        (["a", "b"], [], ["a", "b", ""], False),
        (["a", "STOP", "b"], ["STOP"], ["a", "", "", ""], True),
    ],
)
def test_shows_text_up_to_the_stop(
    pieces: list[str], stops: list[str], shown: list[str], stopped: bool
) -> None:
    assert run(pieces, stops) == (shown, stopped)


@given(
    st.lists(st.text("ab<", max_size=4), max_size=12),
    st.lists(st.text("ab<", min_size=1, max_size=4), max_size=4),
)
def test_equals_the_model_however_the_text_is_cut(pieces: list[str], stops: list[str]) -> None:
    shown, stopped = run(pieces, stops)
    assert ("".join(shown), stopped) == model("".join(pieces), stops)


@given(
    st.lists(st.text("ab<", min_size=1, max_size=3), max_size=10),
    st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_holds_back_no_more_than_may_begin_a_stop(pieces: list[str], stops: list[str]) -> None:
    stop_filter = StopFilter(stops)
    shown = pushed = ""
    for piece in pieces:
        shown += stop_filter.push(piece)
        pushed += piece
        if stop_filter.stopped:
            break
        held = pushed[len(shown) :]
        assert pushed == shown + held
        assert not held or any(stop.startswith(held) and stop != held for stop in stops)
