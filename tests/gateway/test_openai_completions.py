"""Text completions through OpenAI's own client."""

from __future__ import annotations

from typing import Any

import pytest

from meshnet_gateway.model_text import ModelText
from tests.gateway.conftest import MODEL, NOW, Serve
from tests.gateway.fakes import FakeFactory, scripted, seeded


def saying(text: ModelText, *pieces: str) -> FakeFactory:
    ids = [token_id for piece in pieces for token_id in text.encode(piece)]
    return FakeFactory(scripted(ids, text.vocab_size))


async def test_whole_answer_has_openais_shape(serve: Serve, text: ModelText) -> None:
    gateway = await serve(saying(text, "h"))
    body = {"model": MODEL, "prompt": "hello", "temperature": 0}
    status, answer = await gateway.post("/v1/completions", body)
    assert status == 200
    assert str(answer.pop("id")).startswith("cmpl-")
    num_prompt = len(text.encode("hello"))
    assert answer == {
        "object": "text_completion",
        "created": NOW,
        "model": MODEL,
        "system_fingerprint": text.fingerprint,
        "choices": [{"text": "h" * 16, "index": 0, "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": 16,
            "total_tokens": num_prompt + 16,
        },
    }


@pytest.mark.parametrize(
    "make",
    [
        lambda text: "hello",
        lambda text: ["hello"],
        lambda text: text.encode("hello"),
        lambda text: [text.encode("hello")],
    ],
)
async def test_prompts_of_all_forms(serve: Serve, text: ModelText, make: Any) -> None:
    factory = saying(text, "h")
    gateway = await serve(factory)
    answer = await gateway.client.completions.create(model=MODEL, prompt=make(text), max_tokens=1)
    assert answer.choices[0].text == "h"
    assert factory.sessions[0].history == text.encode("hello")


@pytest.mark.parametrize("prompt", ["", None])
async def test_empty_prompt_starts_a_text(
    serve: Serve, text: ModelText, prompt: str | None
) -> None:
    factory = saying(text, "h")
    gateway = await serve(factory)
    body: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 1}
    status, _ = await gateway.post("/v1/completions", body)
    if prompt is None:
        assert status == 400
    else:
        assert factory.sessions[0].history == text.encode("")


async def test_several_prompts_and_choices(serve: Serve, text: ModelText) -> None:
    gateway = await serve(FakeFactory(seeded(text.vocab_size)))
    wanted: dict[str, Any] = {"model": MODEL, "n": 2, "max_tokens": 6, "seed": 1}
    both = await gateway.client.completions.create(prompt=["hello", "world"], **wanted)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    alone = await gateway.client.completions.create(prompt="hello", **wanted)
    assert [choice.text for choice in both.choices[:2]] == [choice.text for choice in alone.choices]
    assert len({choice.text for choice in both.choices}) == 4
    assert both.usage is not None
    assert both.usage.prompt_tokens == len(text.encode("hello") + text.encode("world"))


@pytest.mark.parametrize("as_ids", [False, True])
async def test_echo_comes_before_the_text(serve: Serve, text: ModelText, as_ids: bool) -> None:
    gateway = await serve(saying(text, "h"))
    prompt: Any = text.encode("hello") if as_ids else "hello"
    wanted: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "echo": True}
    whole = await gateway.client.completions.create(**wanted)
    assert whole.choices[0].text == "hellohh"
    parts = [
        chunk.choices[0].text
        async for chunk in await gateway.client.completions.create(**wanted, stream=True)
    ]
    assert parts == ["hello", "h", "h", ""]


async def test_stream_equals_the_whole(serve: Serve, text: ModelText) -> None:
    gateway = await serve(FakeFactory(seeded(text.vocab_size)))
    wanted: dict[str, Any] = {
        "model": MODEL,
        "prompt": "hello",
        "max_tokens": 40,
        "seed": 9,
        "stop": ["\u00e9", "zz"],
        "logprobs": 2,
    }
    whole = await gateway.client.completions.create(**wanted)
    streamed: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "text_offset": []}
    parts = []
    async for chunk in await gateway.client.completions.create(
        **wanted, stream=True, stream_options={"include_usage": True}
    ):
        if not chunk.choices:
            assert chunk.usage == whole.usage
            continue
        parts.append(chunk.choices[0].text)
        logprobs = chunk.choices[0].logprobs
        if logprobs is not None:
            for name, values in streamed.items():
                values += getattr(logprobs, name)
    assert "".join(parts) == whole.choices[0].text
    assert whole.choices[0].logprobs is not None
    for name, values in streamed.items():
        assert values == getattr(whole.choices[0].logprobs, name)


async def test_logprobs_have_the_older_form(serve: Serve, text: ModelText) -> None:
    gateway = await serve(saying(text, "h", "\u4e2d"))
    answer = await gateway.client.completions.create(
        model=MODEL, prompt="x", temperature=0, max_tokens=4, logprobs=1
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["h", r"bytes:\xe4", r"bytes:\xb8", r"bytes:\xad"]
    assert logprobs.text_offset == [0, 1, 1, 1]
    assert logprobs.top_logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs[0] == {"h": logprobs.token_logprobs[0]}


async def test_the_sampled_token_is_always_among_the_top(serve: Serve, text: ModelText) -> None:
    gateway = await serve(FakeFactory(seeded(text.vocab_size, spread=0.1)))
    answer = await gateway.client.completions.create(
        model=MODEL, prompt="x", seed=4, max_tokens=8, logprobs=0
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.tokens is not None
    assert [list(top) for top in logprobs.top_logprobs] == [[token] for token in logprobs.tokens]
