"""Token ids to text, one at a time, never showing half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

__all__ = ["Detokenizer"]

_REPLACEMENT: Final = "\ufffd"

_CONTEXT_TOKENS: Final = 6
"""Prompt tokens decoded before the first token, so that a decoder which trims the space at
the start of a text does not trim the one between prompt and completion."""

_MAX_WINDOW: Final = 48
"""Tokens after which bytes that never make a character are shown as replacement marks."""


class Detokenizer:
    """Decodes a growing sequence by a window over its end, in constant time a token.

    The window begins with tokens whose text is out already, so that decoders which look at
    the neighbour (leading spaces, runs of byte tokens) see it. Trailing replacement marks
    are held back: some decoders turn a whole run of bytes into marks until it is complete.

    Args:
        decode: ids to text, special tokens skipped.
        prompt_ids: what comes before; only its last few tokens are looked at.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], prompt_ids: Sequence[int]) -> None:
        self._decode = decode
        window = list(prompt_ids[-_CONTEXT_TOKENS:])
        while window and decode(window).startswith(_REPLACEMENT):
            del window[0]  # begins inside a character
        self._window = window
        self._num_old = len(window)
        self._num_shown = len(decode(window).rstrip(_REPLACEMENT)) if window else 0

    def push(self, token_id: int) -> str:
        """Take the next token and give the text that is certain now."""
        self._window.append(token_id)
        text = self._decode(self._window)
        settled = text.rstrip(_REPLACEMENT)
        if len(settled) == len(text) or len(self._window) > _MAX_WINDOW:
            piece = text[self._num_shown :]
            del self._window[: self._num_old]
            self._num_old = len(self._window)
            self._num_shown = len(self._decode(self._window))
            if self._num_old > _MAX_WINDOW:
                self._window.clear()
                self._num_old = self._num_shown = 0
            return piece
        piece = settled[self._num_shown :]
        self._num_shown = max(self._num_shown, len(settled))
        return piece

    def flush(self) -> str:
        """Give what was held back: a character that never got its last bytes."""
        if not self._window:
            return ""
        text = self._decode(self._window)
        piece = text[self._num_shown :]
        self._num_shown = max(self._num_shown, len(text))
        return piece
