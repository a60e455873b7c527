"""The fields that chat and completion requests share (pure).

Source: OpenAI API reference; ``top_k``, ``min_p`` and ``repetition_penalty`` are
extensions that other servers share.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from meshnet_gateway.limits import GatewayLimits
from meshnet_gateway.openai_fields import Fields
from meshnet_gateway.sampling import SamplingParams

__all__ = ["INT64", "Options", "read_options"]

INT64: Final = 1 << 63
_HARMLESS: Final = (
    "metadata",
    "parallel_tool_calls",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Fields that do not alter a completion here."""


@dataclass(frozen=True, slots=True)
class Options:
    """What both kinds of request may ask for.

    Attributes:
        model: name, known to be a string.
        params: how to choose tokens.
        max_tokens: None for the endpoint's default.
        stops: non-empty strings.
        num_choices: completions a prompt.
        stream: whether to answer with server-sent events.
        include_usage: whether a stream ends with a usage chunk.
    """

    model: str
    params: SamplingParams
    max_tokens: int | None
    stops: tuple[str, ...]
    num_choices: int
    stream: bool
    include_usage: bool


def read_options(
    fields: Fields, max_tokens: int | None, top_logprobs: int | None, limits: GatewayLimits
) -> Options:
    """Check the fields that both endpoints have, and accept those that change nothing.

    Args:
        fields: of the request.
        max_tokens: as the endpoint names it.
        top_logprobs: as the endpoint names it; None for no logprobs.
        limits: of what may be asked for.

    Raises:
        MeshError: INVALID_ARGUMENT, naming the field.
    """
    model = fields.string("model")
    if not model:
        fields.missing("model", "the name of one of /v1/models")
    stream = fields.boolean("stream")
    stream_options = fields.nested("stream_options")
    include_usage = False
    if stream_options is not None:
        if not stream:
            fields.fail("stream_options", fields.get("stream_options"), "stream to be true as well")
        include_usage = stream_options.boolean("include_usage")
        stream_options.ignore("include_obfuscation")
        stream_options.done()
    options = Options(
        model=model,
        params=_params(fields, top_logprobs, limits),
        max_tokens=max_tokens,
        stops=_stops(fields, limits),
        num_choices=fields.integer("n", 1, limits.max_choices) or 1,
        stream=stream,
        include_usage=include_usage,
    )
    fields.ignore(*_HARMLESS)
    return options


def _params(fields: Fields, top_logprobs: int | None, limits: GatewayLimits) -> SamplingParams:
    repetition_penalty = fields.number("repetition_penalty", 0, 100, 1.0)
    if repetition_penalty == 0:
        fields.fail("repetition_penalty", 0, "a number above 0")
    top_k = fields.integer("top_k", -1, INT64 - 1) or 0
    return SamplingParams(
        temperature=fields.number("temperature", 0, 2, 1.0),
        top_p=fields.number("top_p", 0, 1, 1.0),
        top_k=max(0, top_k),  # -1 is other servers' word for no bound
        min_p=fields.number("min_p", 0, 1, 0.0),
        seed=fields.integer("seed", -INT64, INT64 - 1),
        frequency_penalty=fields.number("frequency_penalty", -2, 2, 0.0),
        presence_penalty=fields.number("presence_penalty", -2, 2, 0.0),
        repetition_penalty=repetition_penalty,
        logit_bias=_logit_bias(fields, limits),
        top_logprobs=top_logprobs,
    )


def _logit_bias(fields: Fields, limits: GatewayLimits) -> dict[int, float]:
    biases = fields.nested("logit_bias")
    if biases is None:
        return {}
    ids: dict[int, float] = {}
    names = biases.names()
    if len(names) > limits.max_logit_biases:
        fields.fail("logit_bias", f"{len(names)} tokens", f"at most {limits.max_logit_biases}")
    for name in names:
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            fields.fail("logit_bias", name, "token ids as names")
        ids[int(name)] = biases.number(name, -100, 100, 0.0)
    return ids


def _stops(fields: Fields, limits: GatewayLimits) -> tuple[str, ...]:
    value = fields.get("stop")
    if value is None:
        return ()
    stops = value if isinstance(value, list) else [value]
    most = limits.max_stop_chars
    expected = (
        f"null, a string, or up to {limits.max_stops} strings, each of 1 to {most} characters"
    )
    if len(stops) > limits.max_stops or not all(
        isinstance(stop, str) and 1 <= len(stop) <= most for stop in stops
    ):
        fields.fail("stop", value, expected)
    return tuple(stops)
