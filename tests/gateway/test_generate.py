"""The generation loop: what is fed, what is shown, why it ends, and that sessions are closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.errors import MeshError, NextHopError
from meshnet_gateway.generate import Delta, Event, Finish, Generation, generate, interleave
from meshnet_gateway.model_text import ModelText
from meshnet_gateway.sampling import SamplingParams
from tests.gateway.fakes import FORCED, FakeFactory, scripted, seeded

GREEDY = SamplingParams(temperature=0)


def ids_of(text: ModelText, *pieces: str) -> list[int]:
    ids = [text.encode(piece) for piece in pieces]
    assert all(len(item) == 1 for item in ids)
    return [item[0] for item in ids]


def saying(text: ModelText, *pieces: str) -> FakeFactory:
    return FakeFactory(scripted(ids_of(text, *pieces), text.vocab_size))


async def run(
    factory: FakeFactory, text: ModelText, generation: Generation
) -> tuple[list[Delta], Finish]:
    events: list[Event] = [
        event async for event in generate(factory, "m", text, generation, clock=iter_clock())
    ]
    *deltas, finish = events
    assert isinstance(finish, Finish)
    assert all(isinstance(delta, Delta) for delta in deltas)
    return [delta for delta in deltas if isinstance(delta, Delta)], finish


def iter_clock() -> Callable[[], float]:
    """Make a clock that goes on by 10 ms whenever it is read."""
    ticks = iter(range(10**9))
    return lambda: next(ticks) * 0.01


def shown(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


async def test_feeds_the_prompt_once_then_each_token(text: ModelText) -> None:
    factory = saying(text, "h", "e", "y")
    prompt = tuple(text.encode("hello"))
    deltas, finish = await run(factory, text, Generation(prompt, GREEDY, 3))
    (session,) = factory.sessions
    assert session.history == [*prompt, *ids_of(text, "h", "e")]
    assert session.max_tokens == len(prompt) + 3
    assert [str(want) for want in session.wants] == ["top-4"] * 3
    assert session.closed
    assert [delta.text for delta in deltas] == ["h", "e", "y"]
    assert (finish.reason, finish.num_tokens) == ("length", 3)


@pytest.mark.parametrize("num_before", [0, 2])
async def test_end_token_is_a_stop_without_text(text: ModelText, num_before: int) -> None:
    factory = saying(text, *"hello"[:num_before], "<|im_end|>")
    deltas, finish = await run(factory, text, Generation((1,), GREEDY, 20))
    assert shown(deltas) == "hello"[:num_before]
    assert (finish.reason, finish.num_tokens) == ("stop", num_before)


@pytest.mark.parametrize(
    ("pieces", "max_tokens", "expected", "reason", "num_tokens"),
    [
        ((*FORCED, "h"), 9, ["ok "], "stop", 4),
        ((*FORCED[:3], "<|im_end|>"), 9, ["ok ", "<<END"], "stop", 3),
        (FORCED, 3, ["ok ", "<<END"], "length", 3),
        (FORCED, 4, ["ok "], "stop", 4),
    ],
)
async def test_stop_string_is_never_shown(
    text: ModelText,
    pieces: tuple[str, ...],
    max_tokens: int,
    expected: list[str],
    reason: str,
    num_tokens: int,
) -> None:
    factory = saying(text, *pieces)
    wanted = Generation((1,), GREEDY, max_tokens, ("<<END>>",))
    deltas, finish = await run(factory, text, wanted)
    assert [delta.text for delta in deltas] == expected
    assert (finish.reason, finish.num_tokens) == (reason, num_tokens)
    assert factory.num_open == 0


async def test_characters_are_shown_whole(text: ModelText) -> None:
    ids = text.encode("\u4e2d\U0001f600")
    assert len(ids) == 7
    factory = FakeFactory(scripted(ids, text.vocab_size))
    deltas, _ = await run(factory, text, Generation((1,), GREEDY, 7))
    assert [delta.text for delta in deltas] == ["\u4e2d", "\U0001f600"]
    deltas, _ = await run(factory, text, Generation((1,), GREEDY, 6))
    assert shown(deltas) == "\u4e2d\ufffd"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([*FORCED, "h", "\u4e2d", "\U0001f600"]), min_size=1, max_size=6),
    st.sampled_from([(), ("<<END>>",), ("h", "\u4e2d"), ("ND>>",)]),
)
def test_logprobs_are_those_of_the_tokens_shown(
    text: ModelText, pieces: list[str], stops: tuple[str, ...]
) -> None:
    ids = [token_id for piece in pieces for token_id in text.encode(piece)]
    params = SamplingParams(temperature=0, top_logprobs=1)
    factory = FakeFactory(scripted(ids, text.vocab_size))
    deltas, _ = asyncio.run(run(factory, text, Generation((1,), params, len(ids), stops)))
    logprobs = [item for delta in deltas for item in delta.logprobs]
    tokens = [item.sampled.token_id for item in logprobs]
    assert tokens == ids[: len(tokens)]
    whole = shown(deltas)
    raw = b"".join(map(text.token_bytes, tokens))
    assert raw.startswith(whole.encode()) if stops else raw == whole.encode()
    assert all(item.text_offset < len(whole) for item in logprobs)
    offset = 0
    for delta in deltas:
        assert delta.text
        assert all(offset <= item.text_offset < offset + len(delta.text) for item in delta.logprobs)
        offset += len(delta.text)


async def test_timings_sum_the_hops_of_each_phase(text: ModelText) -> None:
    factory = saying(text, "h")
    _, finish = await run(factory, text, Generation((1, 1, 1), GREEDY, 5))
    described = finish.timings.describe()
    assert described["tokens_per_second"] == 100.0
    assert (described["prefill"]["steps"], described["prefill"]["tokens"]) == (1, 3)
    assert (described["decode"]["steps"], described["decode"]["wall_ms"]) == (4, 40.0)
    first, second = described["hops"]
    assert (first["node"], second["node"]) == ("a", "b")
    assert (first["compute_ms"], first["wire_ms"], first["total_ms"]) == (3.0, 2.0, 12.0)
    assert (second["compute_ms"], second["wire_ms"], second["in_bytes"]) == (4.0, 0.0, 1152)


@pytest.mark.parametrize("fail_at", [0, 2])
async def test_session_is_closed_when_a_step_fails(text: ModelText, fail_at: int) -> None:
    factory = saying(text, "h")
    factory.error, factory.fail_at = NextHopError("gone", failed_node="b"), fail_at
    events = generate(factory, "m", text, Generation((1,), GREEDY, 9))
    for _ in range(fail_at):
        assert isinstance(await anext(events), Delta)
    with pytest.raises(NextHopError):
        await anext(events)
    assert factory.num_open == 0


async def test_session_is_closed_when_the_reader_goes(text: ModelText) -> None:
    factory = saying(text, "h")
    async with aclosing(generate(factory, "m", text, Generation((1,), GREEDY, 9))) as events:
        await anext(events)
        assert factory.num_open == 1
    assert factory.num_open == 0


async def test_session_is_closed_when_cancelled_in_a_step(text: ModelText) -> None:
    factory = saying(text, "h")
    factory.hold_at = 1
    task = asyncio.create_task(run(factory, text, Generation((1,), GREEDY, 9)))
    await factory.holding.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert factory.num_open == 0


def several(factory: FakeFactory, text: ModelText, count: int) -> list[AsyncGenerator[Event, None]]:
    params = SamplingParams(seed=5)
    return [
        generate(factory, "m", text, Generation((1,), params, 40, (), index))
        for index in range(count)
    ]


async def test_interleaved_completions_are_what_each_is_alone(text: ModelText) -> None:
    factory = FakeFactory(seeded(text.vocab_size))
    alone = [[event async for event in stream] for stream in several(factory, text, 5)]
    together: list[list[Event]] = [[] for _ in range(5)]
    factory.most_open = 0
    async for index, event in interleave(several(factory, text, 5), max_running=2):
        together[index].append(event)
    strip = [[event for event in events if isinstance(event, Delta)] for events in together]
    assert strip == [[event for event in events if isinstance(event, Delta)] for events in alone]
    assert len({str(events) for events in strip}) == 5
    assert factory.most_open == 2
    assert factory.num_open == 0


async def test_one_failure_ends_and_closes_all(text: ModelText) -> None:
    factory = FakeFactory(seeded(text.vocab_size))
    factory.error, factory.fail_at = NextHopError("gone", failed_node="b"), 3
    events = interleave(several(factory, text, 3), max_running=3)
    with pytest.raises(MeshError, match="gone"):
        [event async for event in events]
    assert factory.num_open == 0
    assert factory.most_open == 3


@pytest.mark.parametrize("count", [1, 3])
async def test_readers_that_stop_close_all(text: ModelText, count: int) -> None:
    factory = FakeFactory(seeded(text.vocab_size))
    async with aclosing(interleave(several(factory, text, count), max_running=2)) as events:
        await anext(events)
    assert factory.num_open == 0


async def test_slow_reader_holds_completions_back(text: ModelText) -> None:
    factory = FakeFactory(scripted(text.encode("h"), text.vocab_size))
    streams = [generate(factory, "m", text, Generation((1,), GREEDY, 200)) for _ in range(2)]
    async with aclosing(interleave(streams, max_running=2)) as events:
        await anext(events)
        for _ in range(500):
            await asyncio.sleep(0)
        assert sum(len(session.wants) for session in factory.sessions) < 30
