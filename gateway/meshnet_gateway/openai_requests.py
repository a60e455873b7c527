"""OpenAI's requests, checked and turned into completions to generate (pure).

Source: OpenAI API reference, Create chat completion and Create completion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from meshnet_gateway.generate import Generation
from meshnet_gateway.limits import DEFAULT_LIMITS, GatewayLimits
from meshnet_gateway.model_text import ModelText
from meshnet_gateway.openai_errors import bad_request, shown
from meshnet_gateway.openai_fields import Fields
from meshnet_gateway.openai_messages import Message, read_messages
from meshnet_gateway.openai_options import INT64, Options, read_options

__all__ = [
    "ChatRequest",
    "CompletionRequest",
    "Options",
    "Prepared",
    "read_chat",
    "read_completion",
]

_MAX_TOP_LOGPROBS: Final = 20
_COMPLETION_TOKENS: Final = 16
"""OpenAI's default max_tokens of /v1/completions."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request in tokens.

    Attributes:
        generations: one a choice, in the order of the answer's indices.
        num_prompt_tokens: of all prompts, each counted once.
        echoes: text to put before each choice's.
    """

    generations: tuple[Generation, ...]
    num_prompt_tokens: int
    echoes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A request to /v1/chat/completions."""

    options: Options
    messages: tuple[Message, ...]

    def prepare(self, text: ModelText) -> Prepared:
        """Turn the messages into tokens; slow for long ones.

        Raises:
            MeshError: INVALID_ARGUMENT, for messages that the model's template refuses, or
                too many tokens.
        """
        ids = text.encode_chat(
            [{"role": item.role, "content": item.content} for item in self.messages]
        )
        return _prepare(self.options, text, [ids], "messages", lambda room: room)


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A request to /v1/completions.

    Attributes:
        options: what both kinds of request may ask for.
        prompts: texts or token ids.
        echo: whether each choice's text begins with its prompt.
    """

    options: Options
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool

    def prepare(self, text: ModelText) -> Prepared:
        """Turn the prompts into tokens; slow for long ones.

        Raises:
            MeshError: INVALID_ARGUMENT, for token ids that the model does not have, or too
                many tokens.
        """
        encoded = [
            text.encode(prompt) if isinstance(prompt, str) else _checked_ids(prompt, text)
            for prompt in self.prompts
        ]
        echoes: list[str] = []
        if self.echo:
            echoes = [
                prompt if isinstance(prompt, str) else text.decode(prompt)
                for prompt in self.prompts
            ]
        default: Callable[[int], int] = lambda room: min(room, _COMPLETION_TOKENS)  # noqa: E731
        return _prepare(self.options, text, encoded, "prompt", default, echoes)


def read_chat(fields: Fields, limits: GatewayLimits = DEFAULT_LIMITS) -> ChatRequest:
    """Check a chat request; unknown fields and unsupported ones that matter are refused.

    Raises:
        MeshError: INVALID_ARGUMENT, naming the field.
    """
    messages = read_messages(fields)
    _check_chars(fields, "messages", sum(len(item.content) for item in messages), limits)
    top_logprobs = fields.integer("top_logprobs", 0, _MAX_TOP_LOGPROBS)
    with_logprobs = fields.boolean("logprobs")
    if top_logprobs is not None and not with_logprobs:
        fields.fail("top_logprobs", top_logprobs, "logprobs to be true as well")
    limit = fields.integer("max_completion_tokens", 1, INT64 - 1)
    older_limit = fields.integer("max_tokens", 1, INT64 - 1)
    if limit is not None and older_limit is not None:
        fields.fail("max_tokens", older_limit, "only one of max_tokens and max_completion_tokens")
    for name in (
        "audio",
        "function_call",
        "moderation",
        "reasoning_effort",
        "verbosity",
        "web_search_options",
    ):
        fields.refuse(name)
    fields.refuse("functions", [])
    fields.refuse("modalities", ["text"])
    fields.refuse("response_format", {"type": "text"})
    fields.refuse("tool_choice", "none", "auto")
    fields.refuse("tools", [])
    options = read_options(
        fields, limit or older_limit, (top_logprobs or 0) if with_logprobs else None, limits
    )
    fields.done()
    return ChatRequest(options, messages)


def read_completion(fields: Fields, limits: GatewayLimits = DEFAULT_LIMITS) -> CompletionRequest:
    """Check a completion request, as `read_chat`."""
    prompts = _prompts(fields, limits)
    num_chars = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    _check_chars(fields, "prompt", num_chars, limits)
    echo = fields.boolean("echo")
    logprobs = fields.integer("logprobs", 0, _MAX_TOP_LOGPROBS)
    if echo and logprobs is not None:
        fields.refuse("logprobs")  # of the prompt's tokens, which are not computed
    fields.refuse("suffix", "")
    max_tokens = fields.integer("max_tokens", 1, INT64 - 1)
    best_of = fields.integer("best_of", 1, limits.max_choices)
    options = read_options(fields, max_tokens, logprobs, limits)
    fields.done()
    if best_of is not None and best_of != options.num_choices:
        fields.refuse("best_of")
    most = limits.max_choices
    if len(prompts) * options.num_choices > most:
        fields.fail("n", options.num_choices, f"at most {most} choices of all prompts")
    return CompletionRequest(options, prompts, echo)


def _check_chars(fields: Fields, name: str, num_chars: int, limits: GatewayLimits) -> None:
    """Refuse text that would take long to turn into tokens, only to be too many."""
    if num_chars > limits.max_prompt_chars:
        fields.fail(
            name,
            f"{num_chars} characters",
            f"at most {limits.max_prompt_chars} (max_prompt_chars)",
            "string_above_max_length",
        )


def _prompts(fields: Fields, limits: GatewayLimits) -> tuple[str | tuple[int, ...], ...]:
    value = fields.get("prompt")
    expected = "a string, an array of strings, an array of token ids, or an array of such arrays"
    if value is None:
        fields.missing("prompt", expected)
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list) or not value:
        fields.fail("prompt", value, expected, "invalid_type")
    if all(isinstance(item, str) for item in value):
        return _counted(fields, tuple(value), limits)
    if _are_ids(value):
        return (tuple(value),)
    if all(isinstance(item, list) and item and _are_ids(item) for item in value):
        return _counted(fields, tuple(tuple(item) for item in value), limits)
    return fields.fail("prompt", value, expected, "invalid_type")


def _counted(
    fields: Fields, prompts: tuple[str | tuple[int, ...], ...], limits: GatewayLimits
) -> tuple[str | tuple[int, ...], ...]:
    if len(prompts) > limits.max_choices:
        fields.fail("prompt", f"{len(prompts)} prompts", f"at most {limits.max_choices}")
    return prompts


def _are_ids(items: list[object]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in items)


def _checked_ids(ids: tuple[int, ...], text: ModelText) -> tuple[int, ...]:
    for token_id in ids:
        if not 0 <= token_id < text.vocab_size:
            raise bad_request(
                f"prompt: token id {shown(token_id)}; expected ids from 0 to {text.vocab_size - 1}",
                "prompt",
            )
    return ids


def _prepare(
    options: Options,
    text: ModelText,
    prompts: list[list[int] | tuple[int, ...]],
    param: str,
    default: Callable[[int], int],
    echoes: list[str] | None = None,
) -> Prepared:
    for token_id in options.params.logit_bias:
        if token_id >= text.vocab_size:
            raise bad_request(
                f"logit_bias: token id {token_id}; expected ids from 0 to {text.vocab_size - 1}",
                "logit_bias",
            )
    generations: list[Generation] = []
    for ids in prompts:
        if not ids:
            raise bad_request(f"{param}: no tokens; expected some text", param)
        max_tokens = _max_tokens(options, text, len(ids), param, default)
        prompt_ids = tuple(ids)
        for _ in range(options.num_choices):
            generations.append(
                Generation(prompt_ids, options.params, max_tokens, options.stops, len(generations))
            )
    return Prepared(
        tuple(generations),
        sum(map(len, prompts)),
        tuple(echo for echo in echoes or () for _ in range(options.num_choices)),
    )


def _max_tokens(
    options: Options, text: ModelText, num_prompt: int, param: str, default: Callable[[int], int]
) -> int:
    room = text.context_length - num_prompt
    wanted = 1 if options.max_tokens is None else options.max_tokens
    if wanted > room:
        raise bad_request(
            f"This model's maximum context length is {text.context_length} tokens. However, you"
            f" requested {num_prompt + wanted} tokens ({num_prompt} in the {param}, {wanted} in"
            f" the completion). Please reduce the length of the {param} or completion.",
            param,
            "context_length_exceeded",
        )
    return default(room) if options.max_tokens is None else options.max_tokens
