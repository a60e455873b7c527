"""Requests that ask for too much, and the settings that say what is too much."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from meshnet.errors import ConfigError, MeshError
from meshnet_gateway.limits import GatewayLimits
from meshnet_gateway.model_text import ModelText
from meshnet_gateway.openai_errors import shown
from meshnet_gateway.openai_fields import parse_object
from tests.gateway.conftest import MODEL, Serve
from tests.gateway.fakes import FakeFactory, scripted

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HI: list[Any] = [{"role": "user", "content": "hi"}]
SMALL = GatewayLimits(
    max_json_depth=8,
    max_json_containers=50,
    max_prompt_chars=100,
    max_choices=3,
    max_stops=2,
    max_stop_chars=5,
    max_logit_biases=2,
)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


TOO_MUCH: list[tuple[str, dict[str, Any], str | None, str]] = [
    (CHAT, {"messages": [{"role": "user", "content": "x" * 101}]}, "messages", "100"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 51}] * 2}, "messages", "100"),
    (TEXT, {"prompt": "x" * 101}, "prompt", "100"),
    (TEXT, {"prompt": ["x" * 51, "x" * 50]}, "prompt", "100"),
    (TEXT, {"prompt": ["x"] * 4}, "prompt", "3"),
    (TEXT, {"prompt": ["x"] * 2, "n": 2}, "n", "3"),
    (TEXT, {"prompt": "x", "best_of": 4, "n": 4}, "best_of", "3"),
    (CHAT, {"messages": HI, "n": 4}, "n", "3"),
    (CHAT, {"messages": HI, "stop": ["a", "b", "c"]}, "stop", "2 strings"),
    (CHAT, {"messages": HI, "stop": "abcdef"}, "stop", "1 to 5"),
    (CHAT, {"messages": HI, "logit_bias": {"1": 1, "2": 1, "3": 1}}, "logit_bias", "2"),
    (CHAT, {"messages": HI, "metadata": nested(8)}, None, "at most 8 levels"),
    (CHAT, {"messages": HI * 50}, None, "at most 50"),
]


@pytest.mark.parametrize(("path", "changes", "param", "said"), TOO_MUCH)
async def test_too_much_is_refused_with_the_bound(
    serve: Serve,
    text: ModelText,
    path: str,
    changes: dict[str, Any],
    param: str | None,
    said: str,
) -> None:
    factory = FakeFactory(scripted(text.encode("h"), text.vocab_size))
    gateway = await serve(factory, limits=SMALL)
    status, answer = await gateway.post(path, {"model": MODEL, **changes})
    assert status == 400
    error: Any = answer["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert said in error["message"]
    assert len(error["message"]) < 300
    assert factory.sessions == []
    ok = {"model": MODEL, "messages": HI, "max_tokens": 1}
    assert (await gateway.post(CHAT, ok))[0] == 200


async def test_what_is_just_within_is_served(serve: Serve, text: ModelText) -> None:
    gateway = await serve(FakeFactory(scripted(text.encode("h"), text.vocab_size)), limits=SMALL)
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x" * 100}],
        "max_tokens": 1,
        "n": 3,
        "stop": ["abcde", "b"],
        "logit_bias": {"1": 1, "2": 1},
        "metadata": nested(7),
    }
    status, answer = await gateway.post(CHAT, body)
    assert status == 200, answer


@pytest.mark.parametrize(
    "body",
    [
        b'{"a": "[[[[[[[[[[[[["}',
        rb'{"a": "\"[[[[[[[[[[[["}',
        rb'{"a": "\\", "b": [[[[1]]]], "c": "]]]"}',
        b'{"a": [' + b'"[]",' * 1000 + b"1]}",
        ('{"' + "é[" * 20 + '": 1}').encode(),
    ],
)
def test_brackets_in_strings_do_not_count(body: bytes) -> None:
    assert parse_object(body, SMALL).names()[0] == next(iter(json.loads(body)))


@pytest.mark.parametrize(
    "body",
    [
        b"[" * (8 << 20),
        b'{"a":' * (1 << 20),
        b"[]," * (2 << 20),
        b"[{}" * (2 << 20),
        b"]" * (8 << 20),
        b'"' + b'\\"' * (4 << 20),
        b'{"a":"' + b"\\" * (8 << 20),
        b'["a' * (2 << 20),
        b"[" * 33 + b'"' + b'\\"' * (4 << 20),
        b"[" * 33 + b'"' + b'\\"' * (4 << 20) + b"\\",
        b"[[]]" * 33 + b"]" * (8 << 20),
    ],
    ids=lambda body: body[:6].decode(),
)
def test_a_structure_is_bounded_in_time(body: bytes) -> None:
    began_s = time.process_time()
    with pytest.raises(MeshError) as caught:
        parse_object(body)
    assert caught.value.reason == "INVALID_JSON"
    assert time.process_time() - began_s < 10.0  # some 0.1 s where nothing else runs


@pytest.mark.parametrize("value", ["x" * 10**7, ["x"] * 10**6, {"a": {"b": "x" * 10**6}}])
def test_a_large_value_is_shown_in_part(value: object) -> None:
    text = shown(value)
    assert len(text) == 80
    assert text.endswith("...")
    assert json.dumps(value).startswith(text[:-3])


@pytest.mark.parametrize("value", [1, None, "é", "x" * 78, [1, {"a": None}], True, 1.5])
def test_a_small_value_is_shown_whole(value: object) -> None:
    assert shown(value) == json.dumps(value)


@pytest.mark.parametrize("change", [{"max_requests": 0}, {"head_timeout_s": 0.0}])
def test_limits_that_let_nothing_through(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        GatewayLimits(**change)
