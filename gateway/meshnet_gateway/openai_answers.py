"""From a completion's events to OpenAI's answers: one JSON object, or server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any, Final

from meshnet_gateway.generate import Delta, Event, Finish, TokenLogprob
from meshnet_gateway.openai_shapes import Shape
from meshnet_gateway.timings import CompletionTimings

__all__ = ["DONE", "Answer", "sse"]

DONE: Final = b"data: [DONE]\n\n"
"""The last event of a stream that went well."""


def sse(value: dict[str, Any]) -> bytes:
    """Write one server-sent event."""
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


@dataclass(slots=True)
class _Choice:
    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    opened: bool = False


@dataclass(slots=True)
class Answer:
    """One answer in the making.

    Attributes:
        shape: how the endpoint writes choices.
        id: of the answer and of all its chunks.
        created: Unix time in seconds.
        model: name as the client said it.
        fingerprint: of the model's configuration.
        num_choices: how many completions there are.
        num_prompt_tokens: of all prompts.
        include_usage: whether a stream ends with a usage chunk.
        with_timings: whether usage comes with the ``meshnet`` object.
    """

    shape: Shape
    id: str
    created: int
    model: str
    fingerprint: str
    num_choices: int
    num_prompt_tokens: int
    include_usage: bool
    with_timings: bool
    _num_tokens: int = 0
    _timings: CompletionTimings = field(default_factory=CompletionTimings)

    async def collect(self, events: AsyncIterator[tuple[int, Event]]) -> dict[str, Any]:
        """Take all events and give the whole answer."""
        choices = [_Choice() for _ in range(self.num_choices)]
        written: dict[int, dict[str, Any]] = {}
        async for index, event in events:
            if isinstance(event, Delta):
                choices[index].text.append(event.text)
                choices[index].logprobs.extend(event.logprobs)
            else:
                self._count(event)
                delta = Delta("".join(choices[index].text), tuple(choices[index].logprobs))
                written[index] = self.shape.whole(index, delta, event.reason)
        return {
            **self._envelope(self.shape.object_name),
            "choices": [written[index] for index in range(self.num_choices)],
            **self._usage(),
        }

    async def stream(self, events: AsyncIterator[tuple[int, Event]]) -> AsyncGenerator[bytes, None]:
        """Give the answer as server-sent events as they come, up to ``[DONE]``."""
        choices = [_Choice() for _ in range(self.num_choices)]
        async for index, event in events:
            written = []
            if not choices[index].opened:
                choices[index].opened = True
                written.append(self.shape.opening(index))
            if isinstance(event, Delta):
                written.append(self.shape.piece(index, event))
            else:
                self._count(event)
                written.append(self.shape.ending(index, event.reason))
            yield b"".join(self._chunk(choice) for choice in written if choice is not None)
        last = b""
        if self.include_usage or self.with_timings:
            envelope = self._envelope(self.shape.chunk_name)
            last = sse({**envelope, "choices": [], **self._usage()})
        yield last + DONE

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        # With include_usage, OpenAI's other chunks have a usage too, which is null.
        usage = {"usage": None} if self.include_usage else {}
        return sse({**self._envelope(self.shape.chunk_name), "choices": [choice], **usage})

    def _envelope(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object_name,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }

    def _count(self, finish: Finish) -> None:
        self._num_tokens += finish.num_tokens
        self._timings.merge(finish.timings)

    def _usage(self) -> dict[str, Any]:
        usage: dict[str, Any] = {
            "usage": {
                "prompt_tokens": self.num_prompt_tokens,
                "completion_tokens": self._num_tokens,
                "total_tokens": self.num_prompt_tokens + self._num_tokens,
            }
        }
        if self.with_timings:
            usage["meshnet"] = self._timings.describe()
        return usage
