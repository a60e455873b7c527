"""Bad requests and failing routes: always OpenAI's error object, always the right status."""

from __future__ import annotations

import gzip
import json
from typing import Any

import openai
import pytest

from meshnet.errors import (
    CacheFullError,
    Code,
    MeshError,
    NextHopError,
    PositionError,
    RouteError,
    UnknownSessionError,
)
from meshnet_gateway.limits import GatewayLimits
from meshnet_gateway.model_text import ModelText
from tests.gateway.conftest import MODEL, Gateway, Serve
from tests.gateway.fakes import CONTEXT, FakeFactory, scripted

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI: list[Any] = [{"role": "user", "content": "hi"}]


@pytest.fixture
def factory(text: ModelText) -> FakeFactory:
    return FakeFactory(scripted(text.encode("h"), text.vocab_size))


async def send(gateway: Gateway, path: str, raw: bytes, **headers: str) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", **headers}
    async with gateway.http.post(gateway.url + path, data=raw, headers=headers) as response:
        assert response.content_type == "application/json"
        return response.status, (await response.json())["error"]


@pytest.mark.parametrize("stream", [False, True])
async def test_unknown_model(serve: Serve, factory: FakeFactory, stream: bool) -> None:
    """Trouble report O4."""
    gateway = await serve(factory)
    body = {"model": "no-such", "messages": HI, "stream": stream}
    status, answer = await gateway.post(CHAT, body)
    assert status == 404
    error: Any = answer["error"]
    assert error["type"] == "invalid_request_error"
    assert error["code"] == "model_not_found"
    assert error["param"] == "model"
    assert "'no-such'" in error["message"] or '"no-such"' in error["message"]
    assert factory.sessions == []
    with pytest.raises(openai.NotFoundError):
        await gateway.client.models.retrieve("no-such")


BAD_CHAT: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": None}, "messages", "missing_required_parameter"),
    ({"messages": "hi"}, "messages", "invalid_type"),
    ({"messages": ["hi"]}, "messages[0]", "invalid_type"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role", "missing_required_parameter"),
    ({"messages": [{"role": "x", "content": "hi"}]}, "messages[0].role", "invalid_value"),
    ({"messages": [{"role": "tool", "content": ""}]}, "messages[0].role", "unsupported_parameter"),
    ({"messages": [*HI, {"role": "user"}]}, "messages[1].content", "missing_required_parameter"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_type"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "invalid_type"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        "messages[0].content[0].type",
        "unsupported_parameter",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
        "missing_required_parameter",
    ),
    ({"messages": [{**HI[0], "contnt": 1}]}, "messages[0].contnt", "unknown_parameter"),
    (
        {"messages": [{**HI[0], "tool_calls": [1]}]},
        "messages[0].tool_calls",
        "unsupported_parameter",
    ),
    ({"model": None}, "model", "missing_required_parameter"),
    ({"model": 5}, "model", "invalid_type"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": -5}, "max_tokens", "invalid_value"),
    ({"max_tokens": 1.5}, "max_tokens", "invalid_type"),
    ({"max_tokens": True}, "max_tokens", "invalid_type"),
    ({"max_tokens": "5"}, "max_tokens", "invalid_type"),
    ({"max_tokens": 10**30}, "max_tokens", "invalid_value"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    ({"max_completion_tokens": 5, "max_tokens": 5}, "max_tokens", "invalid_value"),
    ({"max_tokens": CONTEXT}, "messages", "context_length_exceeded"),
    ({"messages": [{**HI[0], "content": "zq" * CONTEXT}]}, "messages", "context_length_exceeded"),
    ({"temperature": -1}, "temperature", "invalid_value"),
    ({"temperature": 2.1}, "temperature", "invalid_value"),
    ({"temperature": "1"}, "temperature", "invalid_type"),
    ({"top_p": 1.01}, "top_p", "invalid_value"),
    ({"top_k": -2}, "top_k", "invalid_value"),
    ({"min_p": 2}, "min_p", "invalid_value"),
    ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    ({"frequency_penalty": 2.5}, "frequency_penalty", "invalid_value"),
    ({"presence_penalty": -2.5}, "presence_penalty", "invalid_value"),
    ({"seed": 1.5}, "seed", "invalid_type"),
    ({"seed": 2**63}, "seed", "invalid_value"),
    ({"n": 0}, "n", "invalid_value"),
    ({"n": 129}, "n", "invalid_value"),
    ({"n": 10**9}, "n", "invalid_value"),
    ({"stop": ""}, "stop", "invalid_value"),
    ({"stop": ["a", ""]}, "stop", "invalid_value"),
    ({"stop": ["a"] * 5}, "stop", "invalid_value"),
    ({"stop": 5}, "stop", "invalid_value"),
    ({"logprobs": 5}, "logprobs", "invalid_type"),
    ({"top_logprobs": 5}, "top_logprobs", "invalid_value"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    ({"logit_bias": [1]}, "logit_bias", "invalid_type"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"\u0661": 1}}, "logit_bias", "invalid_value"),
    ({"logit_bias": {"1": 101}}, "logit_bias.1", "invalid_value"),
    ({"logit_bias": {"999999": 1}}, "logit_bias", "invalid_value"),
    ({"stream": "yes"}, "stream", "invalid_type"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "invalid_value"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown_parameter"),
    ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
    ({"tool_choice": "required"}, "tool_choice", "unsupported_parameter"),
    ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
    ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
    ({"modalities": ["text", "audio"]}, "modalities", "unsupported_parameter"),
    ({"temprature": 0}, "temprature", "unknown_parameter"),
]
BAD_TEXT: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "missing_required_parameter"),
    ({"prompt": []}, "prompt", "invalid_type"),
    ({"prompt": [[]]}, "prompt", "invalid_type"),
    ({"prompt": ["a", 1]}, "prompt", "invalid_type"),
    ({"prompt": [True]}, "prompt", "invalid_type"),
    ({"prompt": {"text": "a"}}, "prompt", "invalid_type"),
    ({"prompt": [10**12]}, "prompt", "invalid_value"),
    ({"prompt": [-1]}, "prompt", "invalid_value"),
    ({"prompt": ["a"] * 129}, "prompt", "invalid_value"),
    ({"prompt": ["a"] * 65, "n": 2}, "n", "invalid_value"),
    ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    ({"max_tokens": CONTEXT}, "prompt", "context_length_exceeded"),
    ({"logprobs": True}, "logprobs", "invalid_type"),
    ({"logprobs": 21}, "logprobs", "invalid_value"),
    ({"logprobs": 1, "echo": True}, "logprobs", "unsupported_parameter"),
    ({"suffix": "x"}, "suffix", "unsupported_parameter"),
    ({"best_of": 2}, "best_of", "unsupported_parameter"),
    ({"messages": HI}, "messages", "unknown_parameter"),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_bad_fields_are_named(serve: Serve, factory: FakeFactory, stream: bool) -> None:
    """Trouble report O6, and all of its kind."""
    gateway = await serve(factory)
    cases = [(CHAT, {"model": MODEL, "messages": HI}, *case) for case in BAD_CHAT]
    cases += [(TEXT, {"model": MODEL, "prompt": "hi"}, *case) for case in BAD_TEXT]
    for path, base, change, param, code in cases:
        body = {**base, **({"stream": True} if stream else {}), **change}
        if stream and change.get("stream_options") == {"include_usage": True}:
            continue  # right, with a stream
        status, answer = await gateway.post(path, body)
        error: Any = answer["error"]
        assert (status, error["param"], error["code"]) == (400, param, code), change
        assert error["type"] == "invalid_request_error"
        assert 10 < len(error["message"]) < 600
    assert factory.sessions == []


async def test_harmless_fields_are_accepted(serve: Serve, factory: FakeFactory) -> None:
    gateway = await serve(factory)
    body = {
        "model": MODEL,
        "messages": [{**HI[0], "name": "ada"}],
        "max_tokens": 1,
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "parallel_tool_calls": False,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "top_k": -1,
        "logit_bias": {},
        "stop": [],
    }
    assert (await gateway.post(CHAT, body))[0] == 200
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 1, "suffix": "", "best_of": 2, "n": 2}
    assert (await gateway.post(TEXT, body))[0] == 200


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"\xff\xfe{}",
        b'{"model": "\xff"}',
        b'{"temperature": NaN}',
        b'{"temperature": -Infinity}',
        b'{"temperature": 1e999}',
        b'{"seed": ' + b"1" * 5000 + b"}",
        b"[" * 200_000,
        b'{"a":' * 200_000,
        rb'{"model": "\ud800"}',
        rb'{"model": "\uDFFF\ud83d"}',
    ],
)
async def test_bodies_that_are_no_json_object(
    serve: Serve, factory: FakeFactory, raw: bytes
) -> None:
    gateway = await serve(factory)
    status, error = await send(gateway, CHAT, raw)
    assert (status, error["code"]) == (400, "invalid_json")
    assert len(error["message"]) < 300


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"model": "a", "model": "b"}', "model"),
        (b'{"model": "a", "prompt": "x", "n": 1, "n": 1}', "n"),
        (rb'{"model": "a", "mod\u0065l": "a"}', "model"),
        (
            b'{"messages": [{"role": "user", "content": "x"}, {"content": 1, "content": 2}]}',
            "messages[1].content",
        ),
        (b'{"logit_bias": {"7": 1, "8": 2, "7": 3}}', "logit_bias.7"),
        (b'{"a": {"b": 1, "b": 2}, "a": {}}', "a"),
        (b'{"metadata": {"": 1}, "": 1, "": 2}', ""),
        (b'{"' + b"y" * 5000 + b'": 1, "' + b"y" * 5000 + b'": 2}', "y" * 80),
    ],
)
async def test_a_name_that_comes_twice(
    serve: Serve, factory: FakeFactory, raw: bytes, param: str
) -> None:
    """Who checks a request and who serves it might each see another value."""
    gateway = await serve(factory)
    for path in (CHAT, TEXT):
        status, error = await send(gateway, path, raw)
        assert (status, error["code"], error["param"]) == (400, "duplicate_parameter", param)
        assert error["type"] == "invalid_request_error"
        assert error["message"].endswith("given twice; expected once")
    assert factory.sessions == []


async def test_surrogate_pairs_are_text(
    serve: Serve, factory: FakeFactory, text: ModelText
) -> None:
    gateway = await serve(factory)
    raw = json.dumps({"model": MODEL, "prompt": "\U0001f600", "max_tokens": 1}).encode()
    assert rb"\ud83d" in raw
    url, headers = gateway.url + TEXT, {"Content-Type": "application/json"}
    async with gateway.http.post(url, data=raw, headers=headers) as response:
        assert response.status == 200
    assert factory.sessions[0].history == text.encode("\U0001f600")


@pytest.mark.parametrize("coding", ["identity", "gzip", "chunked"])
async def test_large_bodies_are_refused_and_the_next_is_served(
    serve: Serve, factory: FakeFactory, coding: str
) -> None:
    gateway = await serve(factory, limits=GatewayLimits(max_body_bytes=10_000))
    headers = {"Content-Type": "application/json"}
    data: Any = b" " * 300_000
    if coding == "gzip":
        data = gzip.compress(b" " * (20 << 20))
        headers["Content-Encoding"] = "gzip"
    if coding == "chunked":

        async def pieces() -> Any:
            for _ in range(30):
                yield b" " * 10_000

        data = pieces()
    async with gateway.http.post(gateway.url + CHAT, data=data, headers=headers) as response:
        assert response.status == 413
        error = (await response.json())["error"]
    assert "10000" in error["message"]
    assert error["type"] == "invalid_request_error"
    body = {"model": MODEL, "messages": HI, "max_tokens": 1}
    assert (await gateway.post(CHAT, body))[0] == 200


async def test_body_that_is_not_the_gzip_it_claims(serve: Serve, factory: FakeFactory) -> None:
    gateway = await serve(factory)
    status, error = await send(gateway, CHAT, b"x" * 100, **{"Content-Encoding": "gzip"})
    assert (status, error["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
async def test_other_content_types_are_refused(
    serve: Serve, factory: FakeFactory, kind: str
) -> None:
    gateway = await serve(factory)
    status, error = await send(gateway, CHAT, b"{}", **{"Content-Type": kind})
    assert status == 415
    assert kind in error["message"]


async def test_unknown_paths_and_methods(serve: Serve, factory: FakeFactory) -> None:
    gateway = await serve(factory)
    status, error = await send(gateway, "/v1/embeddings", b"{}")
    assert (status, error["code"]) == (404, "unknown_url")
    async with gateway.http.get(gateway.url + CHAT) as response:
        assert response.status == 405
        assert response.headers["Allow"] == "POST"
        assert (await response.json())["error"]["type"] == "invalid_request_error"
    async with gateway.http.get(f"{gateway.url}/elsewhere") as response:
        assert response.status == 404
        assert response.content_type == "text/plain"  # not this surface's path


FAILURES: list[tuple[Exception, int, str, str]] = [
    (RouteError(Code.UNAVAILABLE, "layers 10-20 uncovered"), 503, "server_error", "unavailable"),
    (CacheFullError("full", retry_after_s=2.5), 429, "rate_limit_error", "cache_full"),
    (NextHopError("gone", failed_node="b"), 502, "server_error", "next_hop_failed"),
    (NextHopError("slow", failed_node="b", timed_out=True), 504, "server_error", "next_hop_failed"),
    (UnknownSessionError("lost"), 502, "server_error", "session_unknown"),
    (PositionError("gap", expected=3), 502, "server_error", "position_gap"),
    (MeshError(Code.INVALID_ARGUMENT, "bad shape"), 502, "server_error", "invalid_argument"),
    (ZeroDivisionError("a secret detail"), 500, "server_error", "internal"),
]


@pytest.mark.parametrize(("error", "status", "kind", "code"), FAILURES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at_open", [False, True])
async def test_failures_before_the_first_token_are_http_errors(
    serve: Serve,
    factory: FakeFactory,
    error: Exception,
    status: int,
    kind: str,
    code: str,
    stream: bool,
    at_open: bool,
) -> None:
    if at_open:
        factory.open_error = error
    else:
        factory.error = error
    gateway = await serve(factory)
    body = {"model": MODEL, "messages": HI, "stream": stream}
    async with gateway.http.post(gateway.url + CHAT, json=body) as response:
        assert response.status == status
        assert response.content_type == "application/json"
        assert response.headers.get("Retry-After") == ("3" if status == 429 else None)
        answer = (await response.json())["error"]
    assert (answer["type"], answer["code"]) == (kind, code)
    assert "secret" not in answer["message"]
    assert factory.num_open == 0


@pytest.mark.parametrize(("error", "status", "kind", "code"), FAILURES)
async def test_failures_later_end_the_stream_with_an_error(
    serve: Serve, factory: FakeFactory, error: Exception, status: int, kind: str, code: str
) -> None:
    factory.error, factory.fail_at = error, 3
    gateway = await serve(factory)
    body = {"model": MODEL, "messages": HI, "stream": True, "n": 2}
    async with gateway.http.post(gateway.url + CHAT, json=body) as response:
        assert response.status == 200
        raw = (await response.read()).decode()
    events = [json.loads(item.removeprefix("data: ")) for item in raw.strip().split("\n\n")]
    assert events[-1]["error"]["type"] == kind
    assert events[-1]["error"]["code"] == code
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert "secret" not in raw
    assert factory.num_open == 0
    with pytest.raises(openai.APIError):
        async for _ in await gateway.client.chat.completions.create(
            model=MODEL, messages=HI, stream=True
        ):
            pass


async def test_draining_refuses_new_work(serve: Serve, factory: FakeFactory) -> None:
    gateway = await serve(factory)
    gateway.service.drain()
    with pytest.raises(openai.InternalServerError) as caught:
        await gateway.client.chat.completions.create(model=MODEL, messages=HI)
    assert caught.value.status_code == 503
    assert caught.value.response.headers["Retry-After"] == "1"
    assert factory.sessions == []
