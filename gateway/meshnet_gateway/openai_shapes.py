"""The choices of OpenAI's answers, whole and in chunks (pure).

Source: OpenAI API reference, The chat completion object, The chat completion chunk object,
The completion object.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from meshnet_gateway.generate import Delta, FinishReason, TokenLogprob

__all__ = ["ChatShape", "CompletionShape", "Shape"]

_LEAST_LOGPROB: Final = -9999.0
"""OpenAI's stand-in for minus infinity, which JSON cannot say."""

TokenBytes = Callable[[int], bytes]


class Shape(Protocol):
    """How one endpoint writes its choices."""

    @property
    def id_prefix(self) -> str:
        """What an answer's id begins with."""
        ...

    @property
    def object_name(self) -> str:
        """The ``object`` of a whole answer."""
        ...

    @property
    def chunk_name(self) -> str:
        """The ``object`` of a stream's chunks."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """Give a choice's first chunk, before its text."""
        ...

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        """Give a chunk with text."""
        ...

    def ending(self, index: int, reason: FinishReason) -> dict[str, Any]:
        """Give a choice's last chunk."""
        ...

    def whole(self, index: int, delta: Delta, reason: FinishReason) -> dict[str, Any]:
        """Give a choice at once; `delta` holds all of its text and logprobs."""
        ...


class ChatShape:
    """Choices of /v1/chat/completions.

    Args:
        token_bytes: the bytes a token stands for.
        with_logprobs: whether logprobs were asked for.
    """

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def __init__(self, token_bytes: TokenBytes, *, with_logprobs: bool) -> None:
        self._token_bytes = token_bytes
        self._with_logprobs = with_logprobs

    def opening(self, index: int) -> dict[str, Any]:
        """Give the chunk that says who speaks."""
        return self._chunk(index, {"role": "assistant", "content": ""}, None, None)

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        """Give a chunk with text."""
        return self._chunk(index, {"content": delta.text}, self._logprobs(delta), None)

    def ending(self, index: int, reason: FinishReason) -> dict[str, Any]:
        """Give a choice's last chunk."""
        return self._chunk(index, {}, None, reason)

    def whole(self, index: int, delta: Delta, reason: FinishReason) -> dict[str, Any]:
        """Give a choice at once."""
        return {
            "index": index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": self._logprobs(delta),
            "finish_reason": reason,
        }

    @staticmethod
    def _chunk(
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None,
        reason: FinishReason | None,
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, delta: Delta) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        content = []
        for item in delta.logprobs:
            sampled = item.sampled
            entry = self._entry(sampled.token_id, sampled.logprob)
            entry["top_logprobs"] = [self._entry(*pair) for pair in sampled.top]
            content.append(entry)
        return {"content": content, "refusal": None}

    def _entry(self, token_id: int, logprob: float | None) -> dict[str, Any]:
        raw = self._token_bytes(token_id)
        return {"token": _token_text(raw), "logprob": _finite(logprob), "bytes": list(raw)}


class CompletionShape:
    """Choices of /v1/completions.

    Args:
        token_bytes: the bytes a token stands for.
        with_logprobs: whether logprobs were asked for.
        echoes: text before each choice's; empty where none was asked for.
    """

    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(
        self, token_bytes: TokenBytes, *, with_logprobs: bool, echoes: Sequence[str] = ()
    ) -> None:
        self._token_bytes = token_bytes
        self._with_logprobs = with_logprobs
        self._echoes = echoes

    def opening(self, index: int) -> dict[str, Any] | None:
        """Give the chunk with the prompt, where it is to be echoed."""
        return self._choice(index, self._echoes[index], None, None) if self._echoes else None

    def piece(self, index: int, delta: Delta) -> dict[str, Any]:
        """Give a chunk with text."""
        return self._choice(index, delta.text, self._logprobs(delta.logprobs), None)

    def ending(self, index: int, reason: FinishReason) -> dict[str, Any]:
        """Give a choice's last chunk."""
        return self._choice(index, "", None, reason)

    def whole(self, index: int, delta: Delta, reason: FinishReason) -> dict[str, Any]:
        """Give a choice at once."""
        echo = self._echoes[index] if self._echoes else ""
        return self._choice(index, echo + delta.text, self._logprobs(delta.logprobs), reason)

    @staticmethod
    def _choice(
        index: int, text: str, logprobs: dict[str, Any] | None, reason: FinishReason | None
    ) -> dict[str, Any]:
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, items: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._with_logprobs:
            return None
        sampled = [item.sampled for item in items]
        # The sampled token is always among them, so that there may be one more than asked.
        tops = [dict((*item.top, (item.token_id, item.logprob))) for item in sampled]
        return {
            "tokens": [self._text(item.token_id) for item in sampled],
            "token_logprobs": [_finite(item.logprob) for item in sampled],
            "top_logprobs": [
                {self._text(token_id): _finite(logprob) for token_id, logprob in top.items()}
                for top in tops
            ],
            "text_offset": [item.text_offset for item in items],
        }

    def _text(self, token_id: int) -> str:
        raw = self._token_bytes(token_id)
        text = _token_text(raw)
        return text if text.encode() == raw else f"bytes:{text}"


def _token_text(raw: bytes) -> str:
    r"""Write a token's bytes as text, or as OpenAI does where they are none: ``\xe2\x9c``."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "".join(f"\\x{value:02x}" for value in raw)


def _finite(logprob: float | None) -> float:
    return _LEAST_LOGPROB if logprob is None else max(logprob, _LEAST_LOGPROB)
