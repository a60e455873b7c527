"""The generation loop: prompt ids in, text deltas and a finish reason out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Final, Literal, Protocol

from meshnet_gateway.detokenize import Detokenizer
from meshnet_gateway.sampling import SampledToken, Sampler, SamplingParams, want_for
from meshnet_gateway.steps import PipelineFactory
from meshnet_gateway.stops import StopFilter
from meshnet_gateway.timings import CompletionTimings

__all__ = [
    "Delta",
    "Event",
    "Finish",
    "FinishReason",
    "Generation",
    "TextSide",
    "TokenLogprob",
    "generate",
    "interleave",
]

FinishReason = Literal["stop", "length"]

_MAX_EVENTS_AHEAD: Final = 16
"""Events that completions may be ahead of a slow reader, all of a request's together."""


class TextSide(Protocol):
    """The part of a model's text side that generation needs."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens that end a completion."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Give the text of tokens; special ones have none."""
        ...


@dataclass(frozen=True, slots=True)
class Generation:
    """One completion to make.

    Attributes:
        prompt_ids: at least one.
        params: how to choose tokens.
        max_tokens: at least 1; tokens after which the completion ends as ``length``.
        stops: non-empty strings that end it as ``stop`` and are not part of it.
        choice_index: which of the request's choices; each draws its own random numbers.
    """

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    max_tokens: int
    stops: tuple[str, ...] = ()
    choice_index: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token's probability, with where its text begins in the completion."""

    sampled: SampledToken
    text_offset: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Text that follows what was given before, and the logprobs of tokens in it."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """A completion's last event.

    Attributes:
        reason: ``stop`` for an end token or stop string, ``length`` for max_tokens.
        num_tokens: tokens generated, an end token not counted.
        timings: where the time went.
    """

    reason: FinishReason
    num_tokens: int
    timings: CompletionTimings


Event = Delta | Finish


async def generate(
    factory: PipelineFactory,
    model: str,
    text: TextSide,
    generation: Generation,
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> AsyncGenerator[Event, None]:
    """Run one completion on a session of its own, which is closed however this ends.

    Yields:
        Deltas with text or logprobs, then one `Finish`.

    Raises:
        MeshError: from the pipeline; what was yielded before stands.
    """
    params = generation.params
    sampler = Sampler(params, generation.prompt_ids, generation.choice_index)
    shown = _ShownText(text, generation)
    timings = CompletionTimings()
    want = want_for(params)
    reason: FinishReason = "length"
    num_tokens = 0
    pipeline = await factory.open(
        model, max_tokens=len(generation.prompt_ids) + generation.max_tokens
    )
    try:
        fed: Sequence[int] = generation.prompt_ids
        while num_tokens < generation.max_tokens:
            phase = timings.decode if num_tokens else timings.prefill
            began = clock()
            output = await pipeline.step(fed, want)
            phase.add(len(fed), (clock() - began) * 1000, output.timings)
            sampled = sampler.sample(output)
            if sampled.token_id in text.eos_ids:
                reason = "stop"
                break
            num_tokens += 1
            delta = shown.push(sampled)
            if shown.stopped:
                reason = "stop"
                break
            if delta.text or delta.logprobs:
                yield delta
            fed = (sampled.token_id,)
        delta = shown.finish()
        if shown.stopped:
            reason = "stop"
        if delta.text or delta.logprobs:
            yield delta
        yield Finish(reason, num_tokens, timings)
    finally:
        await pipeline.close()


class _ShownText:
    """What of the tokens so far a client may see, with the logprobs that belong to it."""

    def __init__(self, text: TextSide, generation: Generation) -> None:
        self._detokenizer = Detokenizer(text.decode, generation.prompt_ids)
        self._filter = StopFilter(generation.stops)
        self._with_logprobs = generation.params.top_logprobs is not None
        self._waiting: list[TokenLogprob] = []
        self._num_decoded = 0
        self._num_shown = 0
        self._unsent = ""

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._filter.stopped

    def push(self, sampled: SampledToken) -> Delta:
        """Take a token and give what can be shown; after a stop string, `finish` gives it."""
        if self._with_logprobs:
            self._waiting.append(TokenLogprob(sampled, self._num_decoded))
        piece = self._detokenizer.push(sampled.token_id)
        self._num_decoded += len(piece)
        shown = self._filter.push(piece)
        self._num_shown += len(shown)
        if self.stopped:
            self._unsent = shown
            return Delta("")
        return Delta(shown, self._take_logprobs())

    def finish(self) -> Delta:
        """Give what was held back, which may still turn out to be a stop string."""
        tail = self._unsent
        if not self.stopped:
            tail = self._filter.push(self._detokenizer.flush())
            if not self.stopped:
                tail += self._filter.flush()
            self._num_shown += len(tail)
        if self.stopped:
            return Delta(tail, self._take_logprobs())
        logprobs, self._waiting = tuple(self._waiting), []
        return Delta(tail, logprobs)

    def _take_logprobs(self) -> tuple[TokenLogprob, ...]:
        """Take those of tokens whose text has begun to show."""
        count = 0
        while count < len(self._waiting) and self._waiting[count].text_offset < self._num_shown:
            count += 1
        taken, self._waiting = tuple(self._waiting[:count]), self._waiting[count:]
        return taken


@dataclass(slots=True)
class _Merge:
    """Events of several completions on their way to one reader."""

    events: asyncio.Queue[tuple[int, Event | None]] = field(default_factory=asyncio.Queue)
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_MAX_EVENTS_AHEAD))

    async def pump(
        self, index: int, stream: AsyncGenerator[Event, None], gate: asyncio.Semaphore
    ) -> None:
        """Copy one completion's events; None marks its end, good or bad."""
        try:
            async with gate, aclosing(stream) as events:
                async for event in events:
                    await self.room.acquire()
                    self.events.put_nowait((index, event))
        finally:
            self.events.put_nowait((index, None))


async def interleave(
    streams: Sequence[AsyncGenerator[Event, None]], *, max_running: int
) -> AsyncGenerator[tuple[int, Event], None]:
    """Run completions together and give (index, event) pairs as they come.

    Args:
        streams: one a completion.
        max_running: completions that hold a session at a time.

    Raises:
        MeshError: the first completion's that fails; the others are ended and closed.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as events:
            async for event in events:
                yield 0, event
        return
    merge = _Merge()
    gate = asyncio.Semaphore(max_running)
    tasks = [
        asyncio.create_task(merge.pump(index, stream, gate)) for index, stream in enumerate(streams)
    ]
    try:
        running = len(tasks)
        while running:
            index, item = await merge.events.get()
            if item is None:
                await tasks[index]
                running -= 1
            else:
                merge.room.release()
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
