"""What the OpenAI routes serve: models, and completions on sessions."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from meshnet.errors import Code, MeshError
from meshnet_gateway.generate import Event, generate, interleave
from meshnet_gateway.limits import DEFAULT_LIMITS, GatewayLimits
from meshnet_gateway.model_text import ModelText
from meshnet_gateway.openai_answers import Answer
from meshnet_gateway.openai_errors import shown
from meshnet_gateway.openai_requests import ChatRequest, CompletionRequest
from meshnet_gateway.openai_shapes import ChatShape, CompletionShape, Shape
from meshnet_gateway.steps import PipelineFactory

__all__ = ["OpenAIService"]


class OpenAIService:
    """Serves completions of named models.

    Args:
        models: text side by the name clients say; may change while serving.
        factory: opens sessions.
        limits: of requests.
        now: Unix time in seconds, for ``created``.
        clock: seconds that only grow, for timings.
    """

    def __init__(
        self,
        models: Mapping[str, ModelText],
        factory: PipelineFactory,
        *,
        limits: GatewayLimits = DEFAULT_LIMITS,
        now: Callable[[], float] = time.time,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._models = models
        self._factory = factory
        self._now = now
        self._clock = clock
        self._started = int(now())
        self._draining = False
        self.limits = limits

    def drain(self) -> None:
        """Refuse new completions from now on (503); those under way go on to their end."""
        self._draining = True

    def list_models(self) -> dict[str, Any]:
        """Give the object of ``GET /v1/models``."""
        return {"object": "list", "data": [self._card(name) for name in sorted(self._models)]}

    def show_model(self, name: str) -> dict[str, Any]:
        """Give the object of ``GET /v1/models/{name}``.

        Raises:
            MeshError: NOT_FOUND.
        """
        self._text(name)
        return self._card(name)

    async def start(
        self, request: ChatRequest | CompletionRequest, *, with_timings: bool
    ) -> tuple[Answer, AsyncGenerator[tuple[int, Event], None]]:
        """Turn a request into an answer to fill and the events that fill it.

        Nothing runs until the events are read; close them to end the sessions early.

        Raises:
            MeshError: for a model or tokens that cannot be served; no session is open then.
        """
        if self._draining:
            raise MeshError(
                Code.UNAVAILABLE,
                "the gateway is shutting down; expected new requests to go to another",
                reason="DRAINING",
                retry_after_s=1,
            )
        options = request.options
        text = self._text(options.model)
        prepared = await asyncio.to_thread(request.prepare, text)
        with_logprobs = options.params.top_logprobs is not None
        shape: Shape
        if isinstance(request, ChatRequest):
            shape = ChatShape(text.token_bytes, with_logprobs=with_logprobs)
        else:
            shape = CompletionShape(
                text.token_bytes, with_logprobs=with_logprobs, echoes=prepared.echoes
            )
        answer = Answer(
            shape=shape,
            id=f"{shape.id_prefix}{uuid.uuid4().hex}",
            created=int(self._now()),
            model=options.model,
            fingerprint=text.fingerprint,
            num_choices=len(prepared.generations),
            num_prompt_tokens=prepared.num_prompt_tokens,
            include_usage=options.include_usage,
            with_timings=with_timings,
        )
        streams = [
            generate(self._factory, options.model, text, generation, clock=self._clock)
            for generation in prepared.generations
        ]
        return answer, interleave(streams, max_running=self.limits.max_running_choices)

    def _text(self, name: str) -> ModelText:
        text = self._models.get(name)
        if text is None:
            served = ", ".join(sorted(self._models)) or "none"
            raise MeshError(
                Code.NOT_FOUND,
                f"The model {shown(name)} does not exist; models served here: {served}",
                field="model",
                reason="MODEL_NOT_FOUND",
            )
        return text

    def _card(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._started, "owned_by": "meshnet"}
