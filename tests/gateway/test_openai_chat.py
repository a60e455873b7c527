"""Chat completions through OpenAI's own client, on a real socket."""

from __future__ import annotations

import json
from typing import Any

import pytest

from meshnet_gateway.model_text import ModelText
from tests.gateway.conftest import MODEL, NOW, Gateway, Serve
from tests.gateway.fakes import CONTEXT, FORCED, FakeFactory, scripted, seeded, write_model

HI: list[Any] = [{"role": "user", "content": "hi"}]


def saying(text: ModelText, *pieces: str) -> FakeFactory:
    ids = [token_id for piece in pieces for token_id in text.encode(piece)]
    return FakeFactory(scripted(ids, text.vocab_size))


async def lines(gateway: Gateway, body: dict[str, Any], **headers: str) -> list[str]:
    """Post a streaming request and give the data of its events, raw."""
    url = f"{gateway.url}/v1/chat/completions"
    body = {"model": MODEL, "messages": HI, "stream": True, **body}
    async with gateway.http.post(url, json=body, headers=headers) as response:
        assert response.status == 200
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        text = (await response.read()).decode()
    assert text.endswith("\n\n")
    events = text[:-2].split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


async def test_whole_answer_has_openais_shape(serve: Serve, text: ModelText) -> None:
    gateway = await serve(saying(text, "h", "e", "y", "<|im_end|>"))
    body = {"model": MODEL, "messages": HI, "temperature": 0}
    status, answer = await gateway.post("/v1/chat/completions", body)
    assert status == 200
    assert str(answer.pop("id")).startswith("chatcmpl-")
    num_prompt = len(text.encode_chat(HI))
    assert answer == {
        "object": "chat.completion",
        "created": NOW,
        "model": MODEL,
        "system_fingerprint": text.fingerprint,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hey", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt,
            "completion_tokens": 3,
            "total_tokens": num_prompt + 3,
        },
    }


@pytest.mark.parametrize("options", [{"include_usage": True}, {}, None])
async def test_stream_events(
    serve: Serve, text: ModelText, options: dict[str, bool] | None
) -> None:
    """Trouble report O1."""
    gateway = await serve(saying(text, "h", "e", "y", "<|im_end|>"))
    data = await lines(gateway, {"temperature": 0, "stream_options": options})
    assert data[-1] == "[DONE]"
    chunks = [json.loads(item) for item in data[:-1]]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    with_usage = options == {"include_usage": True}
    if with_usage:
        last = chunks.pop()
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 3
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        assert not any("usage" in chunk for chunk in chunks)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices] == [None] * 4 + ["stop"]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "h"},
        {"content": "e"},
        {"content": "y"},
        {},
    ]


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [(FORCED, "ok "), ((*FORCED[:3], "<|im_end|>"), "ok <<END")],
)
async def test_stop_strings(
    serve: Serve, text: ModelText, pieces: tuple[str, ...], expected: str
) -> None:
    """Trouble report O2."""
    gateway = await serve(saying(text, *pieces))
    wanted: dict[str, Any] = {"model": MODEL, "messages": HI, "temperature": 0, "stop": "<<END>>"}
    whole = await gateway.client.chat.completions.create(**wanted)
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == "stop"
    parts, reasons = [], []
    async for chunk in await gateway.client.chat.completions.create(**wanted, stream=True):
        parts.append(chunk.choices[0].delta.content or "")
        reasons.append(chunk.choices[0].finish_reason)
        assert "<<E" not in parts[-1] or parts[-1] == "<<END"
    assert "".join(parts) == expected
    assert reasons == [None] * (len(reasons) - 1) + ["stop"]


async def test_content_parts_equal_a_string(serve: Serve, text: ModelText) -> None:
    """Trouble report O6."""
    gateway = await serve(saying(text, "h"))
    create = gateway.client.chat.completions.create
    parts: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    counts = set()
    for messages in (HI, parts):
        answer = await create(model=MODEL, messages=messages, max_tokens=2)
        assert answer.usage is not None
        counts.add(answer.usage.prompt_tokens)
    assert counts == {len(text.encode_chat(HI))}


async def test_null_is_as_omitted(serve: Serve, text: ModelText) -> None:
    """Trouble report O6."""
    factory = saying(text, "h", "<|im_end|>")
    gateway = await serve(factory)
    body = {"model": MODEL, "messages": HI, "temperature": 0}
    nulls = dict.fromkeys(
        ("max_tokens", "max_completion_tokens", "stop", "n", "seed", "tools", "logit_bias")
    )
    _, plain = await gateway.post("/v1/chat/completions", body)
    status, answer = await gateway.post("/v1/chat/completions", {**body, **nulls})
    assert status == 200
    assert answer["choices"] == plain["choices"]
    assert [session.max_tokens for session in factory.sessions] == [CONTEXT] * 2


async def test_finish_reasons_and_seeds(serve: Serve, text: ModelText) -> None:
    """Trouble report O8."""
    gateway = await serve(FakeFactory(seeded(text.vocab_size)))

    async def ask(**options: Any) -> Any:
        return await gateway.client.chat.completions.create(model=MODEL, messages=HI, **options)

    one = await ask(max_tokens=1)
    assert (one.choices[0].finish_reason, one.usage.completion_tokens) == ("length", 1)
    greedy = [
        (await ask(temperature=0, seed=seed, max_tokens=20)).choices[0].message.content
        for seed in (1, 2)
    ]
    assert greedy[0] == greedy[1]
    drawn = [
        (await ask(temperature=1, seed=seed, max_tokens=20)).choices[0].message.content
        for seed in (7, 7, 1, 2, 3, 4, 5, 6, 8)
    ]
    assert drawn[0] == drawn[1]
    assert len(set(drawn)) > 1


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
async def test_both_names_of_the_token_limit(serve: Serve, text: ModelText, field: str) -> None:
    gateway = await serve(saying(text, "h"))
    body = {"model": MODEL, "messages": HI, field: 3}
    _, answer = await gateway.post("/v1/chat/completions", body)
    assert answer["usage"]["completion_tokens"] == 3


async def test_without_a_limit_the_context_is_one(serve: Serve, text: ModelText) -> None:
    gateway = await serve(saying(text, "h"))
    _, answer = await gateway.post("/v1/chat/completions", {"model": MODEL, "messages": HI})
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == CONTEXT


async def test_choices_differ_and_repeat_with_their_seed(serve: Serve, text: ModelText) -> None:
    factory = FakeFactory(seeded(text.vocab_size))
    gateway = await serve(factory)
    wanted: dict[str, Any] = {"model": MODEL, "messages": HI, "n": 6, "seed": 3, "max_tokens": 8}
    whole = await gateway.client.chat.completions.create(**wanted)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.index for choice in whole.choices] == list(range(6))
    assert len(set(texts)) == 6
    assert factory.most_open <= gateway.service.limits.max_running_choices
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == len(text.encode_chat(HI))
    streamed = [""] * 6
    finished = 0
    async for chunk in await gateway.client.chat.completions.create(**wanted, stream=True):
        (choice,) = chunk.choices
        streamed[choice.index] += choice.delta.content or ""
        finished += choice.finish_reason is not None
    assert (streamed, finished) == (texts, 6)
    assert factory.num_open == 0


async def test_logprobs(serve: Serve, text: ModelText) -> None:
    gateway = await serve(saying(text, "h", "\u4e2d"))
    wanted: dict[str, Any] = {
        "model": MODEL,
        "messages": HI,
        "temperature": 0,
        "max_tokens": 4,
        "logprobs": True,
    }
    answer = await gateway.client.chat.completions.create(**wanted, top_logprobs=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [item.token for item in logprobs.content] == ["h", r"\xe4", r"\xb8", r"\xad"]
    assert [item.bytes for item in logprobs.content] == [[0x68], [0xE4], [0xB8], [0xAD]]
    for item in logprobs.content:
        assert -1e-4 < item.logprob < 0
        assert len(item.top_logprobs) == 2
        assert item.top_logprobs[0].logprob == item.logprob
    bare = await gateway.client.chat.completions.create(**wanted)
    assert bare.choices[0].logprobs is not None
    assert bare.choices[0].logprobs.content is not None
    assert all(item.top_logprobs == [] for item in bare.choices[0].logprobs.content)
    streamed: list[Any] = []
    stream = await gateway.client.chat.completions.create(**wanted, top_logprobs=2, stream=True)
    async for chunk in stream:
        if chunk.choices[0].logprobs is not None:
            streamed += chunk.choices[0].logprobs.content or []
    assert [item.model_dump() for item in streamed] == [
        item.model_dump() for item in logprobs.content
    ]


async def test_timings_come_only_when_asked_for(serve: Serve, text: ModelText) -> None:
    gateway = await serve(saying(text, "h"))
    data = await lines(gateway, {"max_tokens": 5}, **{"X-Meshnet-Timings": "1"})
    last = json.loads(data[-2])
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5
    assert [hop["node"] for hop in last["meshnet"]["hops"]] == ["a", "b"]
    assert last["meshnet"]["tokens_per_second"] > 0
    body = {"model": MODEL, "messages": HI, "max_tokens": 5}
    _, timed = await gateway.post("/v1/chat/completions", body, **{"X-Meshnet-Timings": "1"})
    _, plain = await gateway.post("/v1/chat/completions", body)
    assert timed["meshnet"]["decode"]["steps"] == 4
    assert "meshnet" not in plain
    assert not any("meshnet" in item for item in await lines(gateway, {"max_tokens": 5}))


async def test_developer_speaks_as_system(serve: Serve, text: ModelText) -> None:
    factory = saying(text, "h")
    gateway = await serve(factory)
    for role in ("system", "developer"):
        messages = [{"role": role, "content": "be brief"}, *HI]
        body = {"model": MODEL, "messages": messages, "max_tokens": 1}
        assert (await gateway.post("/v1/chat/completions", body))[0] == 200
    first, second = factory.sessions
    assert first.history == second.history


async def test_model_without_template_still_completes(
    serve: Serve, text: ModelText, tmp_path_factory: pytest.TempPathFactory
) -> None:
    bare = ModelText.load(write_model(tmp_path_factory.mktemp("bare"), template=None))
    gateway = await serve(saying(text, "h"), models={MODEL: bare})
    body = {"model": MODEL, "max_tokens": 1}
    status, answer = await gateway.post("/v1/chat/completions", {**body, "messages": HI})
    assert status == 400
    assert answer["error"]["code"] == "no_chat_template"
    assert (await gateway.post("/v1/completions", {**body, "prompt": "hi"}))[0] == 200


async def test_models_are_listed_and_shown(serve: Serve, text: ModelText) -> None:
    gateway = await serve(saying(text, "h"), models={"b": text, "a/x y": text})
    listed = await gateway.client.models.list()
    assert [model.id for model in listed.data] == ["a/x y", "b"]
    assert (await gateway.client.models.retrieve("a/x y")).id == "a/x y"
    async with gateway.http.get(f"{gateway.url}/v1/models/a%2Fx%20y") as response:
        assert await response.json() == {
            "id": "a/x y",
            "object": "model",
            "created": NOW,
            "owned_by": "meshnet",
        }
