"""Whatever JSON a request holds, it is either served or refused with a named field."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.errors import Code, MeshError
from meshnet_gateway.model_text import ModelText
from meshnet_gateway.openai_errors import error_body
from meshnet_gateway.openai_fields import parse_object
from meshnet_gateway.openai_requests import Prepared, read_chat, read_completion
from tests.gateway.fakes import CONTEXT

NAMES = [
    "best_of",
    "echo",
    "frequency_penalty",
    "functions",
    "logit_bias",
    "logprobs",
    "max_tokens",
    "max_completion_tokens",
    "min_p",
    "modalities",
    "n",
    "presence_penalty",
    "repetition_penalty",
    "response_format",
    "seed",
    "stop",
    "stream",
    "stream_options",
    "suffix",
    "temperature",
    "tool_choice",
    "tools",
    "top_k",
    "top_logprobs",
    "top_p",
    "user",
]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 40)
    | st.floats(-3, 3)
    | st.text(max_size=6)
    | st.sampled_from(["text", "user", "auto", "none"]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "include_usage", "1", "name"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)
BASES: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "hi"}]},
    {"prompt": "hi"},
)


def attempt(body: bytes, text: ModelText) -> Prepared | MeshError:
    """Read a request of either kind, by its fields, as far as its tokens."""
    try:
        fields = parse_object(body)
        is_chat = fields.get("messages") is not None
        request = read_chat(fields) if is_chat else read_completion(fields)
        return request.prepare(text)
    except MeshError as error:
        return error


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from(BASES),
    st.dictionaries(st.sampled_from(NAMES), JSON, max_size=2),
    st.none() | JSON,
)
def test_any_json_is_served_or_refused(
    text: ModelText, base: dict[str, Any], change: dict[str, Any], main: Any
) -> None:
    (name,) = base
    body = {"model": "m", **base, **change}
    if main is not None:
        body[name] = main
    prepared = attempt(json.dumps(body).encode(), text)
    if isinstance(prepared, MeshError):
        assert prepared.code is Code.INVALID_ARGUMENT
        assert prepared.field
        assert len(prepared.message) < 2000
        json.dumps(error_body(prepared)).encode()
        return
    assert prepared.generations
    for index, generation in enumerate(prepared.generations):
        assert generation.choice_index == index
        assert generation.prompt_ids
        assert 1 <= generation.max_tokens <= CONTEXT - len(generation.prompt_ids)
        assert all(generation.stops)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40) | st.text(max_size=40).map(str.encode))
def test_any_bytes_are_refused(text: ModelText, body: bytes) -> None:
    outcome = attempt(body, text)
    assert isinstance(outcome, MeshError)  # no model, whatever else there is
    assert outcome.code is Code.INVALID_ARGUMENT
