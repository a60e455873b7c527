"""What the generation loop asks of a pipeline, and what it gets back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from meshnet.grammar import Want
from meshnet.timing import HopTiming

__all__ = ["PipelineFactory", "SessionPipeline", "StepOutput"]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Either full logits or candidates of the last position.

    Attributes:
        logits: float32 ``[vocab]``, for want ``logits``.
        token_ids: int32 ``[K]`` candidates by falling logit, for want ``top-K``.
        top_logits: float32 ``[K]``, of those candidates.
        log_sum_exp: over the whole vocabulary's logits, for want ``top-K``.
        timings: one entry a hop, in route order.
    """

    logits: npt.NDArray[np.float32] | None
    token_ids: npt.NDArray[np.int32] | None
    top_logits: npt.NDArray[np.float32] | None
    log_sum_exp: float | None
    timings: tuple[HopTiming, ...] = ()


class SessionPipeline(Protocol):
    """One session on a route: its caches, and the position they have reached."""

    async def step(self, token_ids: Sequence[int], want: Want) -> StepOutput:
        """Feed the session's next tokens and answer for the last of them.

        Args:
            token_ids: the prompt, which is cut in chunks inside, or the token sampled last.
            want: ``logits`` or ``top-K``; decides which half of the answer is set.

        Raises:
            MeshError: the route failed and no other took over, or a cache is full.
        """
        ...

    async def close(self) -> None:
        """Free the session's caches; idempotent, never raises."""
        ...


class PipelineFactory(Protocol):
    """Opens sessions."""

    async def open(self, model: str, *, max_tokens: int) -> SessionPipeline:
        """Select a route for a new session of `model`.

        Args:
            model: name as clients say it.
            max_tokens: positions the session may take, prompt and completion together.

        Raises:
            MeshError: no route, or no cache left.
        """
        ...
