"""Incremental text equals the text decoded at once, without half a character on the way."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from meshnet_gateway.detokenize import Detokenizer
from meshnet_gateway.model_text import ModelText
from meshnet_gateway.token_bytes import TokenBytes

PLAIN = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=30)


@pytest.fixture(scope="module")
def byte_tokens() -> Tokenizer:
    """SentencePiece's kind: words with a space mark, and one token for each byte."""
    words = ["<unk>", *(f"<0x{value:02X}>" for value in range(256)), "\u2581a", "\u2581b", "c"]
    vocab = [(word, -float(index)) for index, word in enumerate(words)]
    tokenizer = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def spell(text: str) -> list[int]:
    """Give byte tokens, but words where there are some."""
    ids = []
    for mark in text:
        words = {"a": 257, "b": 258, "c": 259}
        ids += [words[mark]] if mark in words else [value + 1 for value in mark.encode()]
    return ids


def pieces_of(detokenizer: Detokenizer, ids: Sequence[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.flush()]


@given(PLAIN)
def test_byte_level_text_is_whole(text: ModelText, written: str) -> None:
    pieces = pieces_of(Detokenizer(text.decode, []), text.encode(written or "x"))
    assert "".join(pieces) == (written or "x")
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.text("abc\u4e2d\U0001f600\u00e9", max_size=12), st.text("ab\U0001f600", max_size=4))
def test_byte_tokens_make_whole_characters(
    byte_tokens: Tokenizer, written: str, prompt: str
) -> None:
    prompt_ids, ids = spell(prompt), spell(written)
    pieces = pieces_of(Detokenizer(byte_tokens.decode, prompt_ids), ids)
    whole = byte_tokens.decode(prompt_ids + ids)
    assert "".join(pieces) == whole[len(byte_tokens.decode(prompt_ids)) :]
    assert not any("\ufffd" in piece for piece in pieces)


def test_byte_tokens_and_space_marks_stand_for_their_bytes(byte_tokens: Tokenizer) -> None:
    token_bytes = TokenBytes(byte_tokens)
    assert [token_bytes.of(item) for item in (257, 259, 0xE4 + 1, 0)] == [
        b" a",
        b"c",
        b"\xe4",
        b"<unk>",
    ]


def test_space_after_the_prompt_is_kept(byte_tokens: Tokenizer) -> None:
    assert byte_tokens.decode([257]) == "a"  # at a text's start, this decoder trims it
    assert Detokenizer(byte_tokens.decode, [258]).push(257) == " a"


def test_broken_character_is_shown_as_a_mark_at_the_end(text: ModelText) -> None:
    first = text.encode("\U0001f600")[0]
    detokenizer = Detokenizer(text.decode, [])
    assert detokenizer.push(first) == ""
    assert detokenizer.flush() == "\ufffd"
    assert detokenizer.flush() == ""


def test_text_after_a_broken_character_is_shown(text: ModelText) -> None:
    first, (letter,) = text.encode("\U0001f600")[0], text.encode("x")
    detokenizer = Detokenizer(text.decode, [])
    assert [detokenizer.push(first), detokenizer.push(letter)] == ["", "\ufffdx"]


def test_endless_broken_bytes_are_not_held_for_ever(text: ModelText) -> None:
    first = text.encode("\U0001f600")[0]
    detokenizer = Detokenizer(text.decode, [])
    pieces = pieces_of(detokenizer, [first] * 500)
    assert "".join(pieces) == "\ufffd" * 500
    assert sum(map(bool, pieces)) > 5
