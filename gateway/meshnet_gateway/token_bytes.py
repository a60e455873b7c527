"""The bytes that single tokens stand for, by the kind of tokenizer."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from tokenizers import Tokenizer

__all__ = ["TokenBytes"]

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK: Final = "\u2581"


def _byte_alphabet() -> dict[str, int]:
    """Map the characters in which byte-level BPE writes bytes: printable ones as themselves.

    Source: GPT-2's byte-level BPE; the rest follow from U+0100 in rising order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [value for value in range(256) if value not in printable]
    alphabet = {chr(value): value for value in printable}
    alphabet.update({chr(0x100 + index): value for index, value in enumerate(others)})
    return alphabet


class TokenBytes:
    """Looks up the bytes of tokens, which need not be whole characters.

    Args:
        tokenizer: byte-level BPE, or SentencePiece style with byte tokens and space marks.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        kinds = _decoder_kinds(json.loads(tokenizer.to_str()).get("decoder"))
        self._alphabet = _byte_alphabet() if "ByteLevel" in kinds else None
        self._byte_tokens = "ByteFallback" in kinds

    def of(self, token_id: int) -> bytes:
        """Give the token's bytes; none for an id that the tokenizer does not have."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added:
            return bytes(token.encode())
        if self._alphabet is not None and all(mark in self._alphabet for mark in token):
            return bytes(self._alphabet[mark] for mark in token)
        match = _BYTE_TOKEN.fullmatch(token) if self._byte_tokens else None
        if match is not None:
            return bytes.fromhex(match[1])
        return bytes(token.replace(_SPACE_MARK, " ").encode())


def _decoder_kinds(decoder: Any) -> set[str]:
    if not isinstance(decoder, dict):
        return set()
    kinds = {str(decoder.get("type"))}
    for part in decoder.get("decoders", ()):
        kinds |= _decoder_kinds(part)
    return kinds
