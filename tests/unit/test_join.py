"""The text of a join token is read as it was written, and says what is wrong without its secret."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.join import JoinText, parse_join_text

PUBLIC, SECRET, PIN = "abcdef0123", "s3cr3t_-ABCDEFGHIJKLMN", "ab" * 32
TOKEN = JoinText(PUBLIC, SECRET, PIN, ("10.0.0.5:7070", "[2001:db8::1]:7070", "mesh.example:1"))


def test_it_is_read_as_written_and_fits_a_line():
    assert parse_join_text(f" {TOKEN.text()}\n") == TOKEN
    assert TOKEN.credential == f"{PUBLIC}.{SECRET}"
    assert len(JoinText(PUBLIC, SECRET, PIN, ("192.168.100.200:65535",)).text()) < 120


def test_as_many_addresses_are_written_as_fit_a_token():
    addresses = tuple(f"{'a' * 240}{number}:7070" for number in range(9))
    text = JoinText(PUBLIC, SECRET, PIN, addresses).text()
    assert parse_join_text(text).addresses == addresses[:3]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "not a join token"),
        ("mj1.a.b.c", "not a join token"),
        (TOKEN.text().replace("mj1", "mj2"), "not a join token"),
        (TOKEN.text().replace(PUBLIC, "ABC"), "public part of 3 characters"),
        (TOKEN.text().replace(SECRET, SECRET[1:]), "secret of 21 characters"),
        (TOKEN.text().replace("@", "A@"), "pin of 44 characters"),
        (TOKEN.text() + ",", "address ''"),
        (TOKEN.text() + ",host", "address 'host'"),
        (TOKEN.text() + ",host:0", "address 'host:0'"),
        (TOKEN.text() + ",host:65536", "address 'host:65536'"),
        (TOKEN.text() + ",ho/st:1", "address 'ho/st:1'"),
        (TOKEN.text() + "x" * 1024, "expected at most 1024"),
    ],
)
def test_what_is_wrong_is_named_and_the_secret_is_not(text, part):
    with pytest.raises(ValueError, match="join token") as caught:
        parse_join_text(text)
    assert part in str(caught.value)
    assert SECRET[1:] not in str(caught.value)


def test_the_secret_is_not_in_its_repr():
    assert SECRET not in repr(TOKEN)


@given(st.text(max_size=200))
def test_any_text_is_a_token_or_an_error(text):
    try:
        assert parse_join_text(text).text() == text.strip()
    except ValueError:
        return
