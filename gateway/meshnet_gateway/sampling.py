"""From logits to the next token: penalties, truncation, the seeded draw, logprobs (pure numpy)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from meshnet.errors import Code, MeshError
from meshnet.grammar import Want
from meshnet_gateway.steps import StepOutput

__all__ = ["MAX_CANDIDATES", "SampledToken", "Sampler", "SamplingParams", "want_for"]

MAX_CANDIDATES: Final = 1024
"""Largest top_k that is answered with candidates; above it, logits are not much more to send."""

_GREEDY_CANDIDATES: Final = 4
"""Ties for the largest logit are common in bfloat16; the lowest of the tied ids is taken."""

_Floats = npt.NDArray[np.float64]
_Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens; the defaults are OpenAI's.

    Attributes:
        temperature: 0 takes the most likely token, ties to the lowest id.
        top_p: smallest set of tokens that has this share of the probability.
        top_k: 0 for no bound.
        min_p: tokens at least this likely, relative to the most likely one.
        seed: makes the draws repeatable.
        frequency_penalty: taken from a token's logit for each time it was generated.
        presence_penalty: taken from a token's logit once it was generated.
        repetition_penalty: divides positive and multiplies negative logits of tokens in
            prompt or completion; 1 for none.
        logit_bias: added to the logits of these ids.
        top_logprobs: likeliest tokens to report at each position; None for no logprobs.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    top_logprobs: int | None = None

    @property
    def adjusts_logits(self) -> bool:
        """Whether logits change before the choice, so that all of them are needed."""
        return (
            self.frequency_penalty != 0
            or self.presence_penalty != 0
            or self.repetition_penalty != 1
            or bool(self.logit_bias)
        )


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token.

    Attributes:
        token_id: the choice.
        logprob: by the model's own distribution, before temperature and penalties; None
            where no logprobs were asked for.
        top: likeliest (id, logprob) pairs of that distribution.
    """

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def want_for(params: SamplingParams) -> Want:
    """Give the smallest answer from which `params` can be served without loss."""
    reported = params.top_logprobs or 0
    if not params.adjusts_logits:
        if params.temperature == 0:
            return Want("top", max(_GREEDY_CANDIDATES, reported))
        if 0 < params.top_k <= MAX_CANDIDATES:
            return Want("top", max(params.top_k, reported))
    return Want("logits")


class Sampler:
    """Chooses the tokens of one completion; keeps its random stream and counts.

    Args:
        params: how to choose.
        prompt_ids: for the repetition penalty.
        choice_index: which of a request's choices; each has its own random stream.
    """

    def __init__(
        self, params: SamplingParams, prompt_ids: Sequence[int] = (), choice_index: int = 0
    ) -> None:
        self._params = params
        self._seen = set(prompt_ids) if params.repetition_penalty != 1 else set()
        self._counts: Counter[int] = Counter()
        self._bias_ids = np.fromiter(params.logit_bias.keys(), np.int64)
        self._biases = np.fromiter(params.logit_bias.values(), np.float64)
        entropy = None if params.seed is None else (params.seed % (1 << 64), choice_index)
        self._random = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))

    def sample(self, output: StepOutput) -> SampledToken:
        """Choose the next token.

        Raises:
            MeshError: INTERNAL, for logits that are not numbers: the model or a node is
                broken, and no choice from them would mean anything.
        """
        ids, logits, log_sum_exp = _read(output)
        adjusted = self._adjust(logits) if self._params.adjusts_logits else logits
        token_id = self._choose(ids, adjusted)
        self._counts[token_id] += 1
        if self._params.top_logprobs is None:
            return SampledToken(token_id)
        if log_sum_exp is None:
            log_sum_exp = _log_sum_exp(logits)
        place = token_id if ids is None else int(np.flatnonzero(ids == token_id)[0])
        order = _largest(ids, logits, self._params.top_logprobs)
        top = tuple(
            (int(index if ids is None else ids[index]), float(logits[index]) - log_sum_exp)
            for index in order
        )
        return SampledToken(token_id, float(logits[place]) - log_sum_exp, top)

    def _adjust(self, logits: _Floats) -> _Floats:
        params = self._params
        adjusted = logits.copy()
        seen = self._seen.union(self._counts)
        if params.repetition_penalty != 1 and seen:
            at = np.fromiter((item for item in seen if item < adjusted.size), np.int64)
            values = adjusted[at]
            penalty = params.repetition_penalty
            adjusted[at] = np.where(values > 0, values / penalty, values * penalty)
        for token_id, count in self._counts.items():
            adjusted[token_id] -= count * params.frequency_penalty + params.presence_penalty
        known = self._bias_ids < adjusted.size
        adjusted[self._bias_ids[known]] += self._biases[known]
        return adjusted

    def _choose(self, ids: _Ids | None, logits: _Floats) -> int:
        params = self._params
        if params.temperature == 0:
            if ids is None:
                return int(np.argmax(logits))
            return int(ids[logits == logits.max()].min())
        # The draw comes first: every token takes exactly one number of the random stream.
        draw = self._random.random()
        with np.errstate(over="ignore"):  # a tiny temperature: all but the largest become 0
            scaled = (logits - logits.max()) / params.temperature
        if ids is None and params.top_k == 0 and params.top_p >= 1 and params.min_p == 0:
            return _draw(np.exp(scaled), draw)
        order, weights = _truncate(ids, scaled, params)
        index = int(order[_draw(weights, draw)])
        return index if ids is None else int(ids[index])


def _read(output: StepOutput) -> tuple[_Ids | None, _Floats, float | None]:
    """Give (candidate ids or None for all, their logits, log-sum-exp where known)."""
    if output.logits is not None:
        logits = output.logits.astype(np.float64).reshape(-1)
        ids, log_sum_exp = None, None
    elif output.token_ids is not None and output.top_logits is not None:
        logits = output.top_logits.astype(np.float64).reshape(-1)
        ids, log_sum_exp = output.token_ids.astype(np.int64).reshape(-1), output.log_sum_exp
        if ids.size != logits.size or (ids < 0).any() or log_sum_exp is None:
            raise _broken(f"{ids.size} candidates with {logits.size} logits")
        if not np.isfinite(log_sum_exp):
            raise _broken(f"log-sum-exp {log_sum_exp}")
    else:
        raise _broken("neither logits nor candidates")
    # -inf is a token that cannot be chosen; some models mask padded ids with it.
    if logits.size == 0 or not np.isfinite(logits.max()):
        raise _broken(f"a largest logit of {logits.max()}" if logits.size else "no logits")
    return ids, logits, log_sum_exp


def _broken(what: str) -> MeshError:
    return MeshError(
        Code.INTERNAL,
        f"the model's last stage answered with {what}; expected finite logits",
        reason="BAD_LOGITS",
    )


def _log_sum_exp(logits: _Floats) -> float:
    largest = logits.max()
    return float(largest + np.log(np.exp(logits - largest).sum()))


def _largest(ids: _Ids | None, values: _Floats, count: int) -> _Ids:
    """Give the indices of the `count` largest values, falling, ties by rising id."""
    if count <= 0:
        return np.empty(0, np.int64)
    if ids is not None:
        return np.lexsort((ids, -values))[:count]
    if count >= values.size:
        return np.argsort(-values, kind="stable")
    # Everything at or above the last kept value, so that ties are cut by id, not by chance.
    bound = np.partition(values, values.size - count)[values.size - count]
    among = np.flatnonzero(values >= bound)
    return among[np.argsort(-values[among], kind="stable")][:count]


def _truncate(ids: _Ids | None, scaled: _Floats, params: SamplingParams) -> tuple[_Ids, _Floats]:
    """Give the indices that top_k, top_p and min_p leave, and their weights, falling.

    Without top_k, the head of the vocabulary is nearly always enough; sorting all of it
    takes ten times as long.
    """
    sizes = (params.top_k,) if params.top_k else (MAX_CANDIDATES, 16 * MAX_CANDIDATES, scaled.size)
    total = np.exp(scaled).sum()
    for size in sizes:
        order = _largest(ids, scaled, size)
        weights = np.exp(scaled[order])
        kept = _num_kept(weights, weights.sum() if params.top_k else total, params)
        if kept < weights.size:  # else the set may reach past the head
            break
    return order[:kept], weights[:kept]


def _num_kept(weights: _Floats, total: float, params: SamplingParams) -> int:
    """Count the tokens that top_p of `total` and min_p leave of falling `weights`; at least one."""
    kept = weights.size
    if params.top_p < 1:
        kept = int(np.searchsorted(np.cumsum(weights), params.top_p * total)) + 1
    if params.min_p > 0:
        likely = np.searchsorted(-weights, -params.min_p * weights[0], side="right")
        kept = min(kept, int(likely))
    return max(1, min(kept, weights.size))


def _draw(weights: _Floats, draw: float) -> int:
    """Choose an index by `weights`, which need not sum to 1; `draw` is in [0, 1)."""
    cumulative = np.cumsum(weights)
    index = int(np.searchsorted(cumulative, draw * cumulative[-1], side="right"))
    return min(index, int(np.flatnonzero(weights)[-1]))
