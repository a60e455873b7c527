"""The choice of tokens: exact distributions, repeatable draws, the model's own logprobs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import Code, MeshError
from meshnet.grammar import Want
from meshnet_gateway.sampling import Sampler, SamplingParams, want_for
from meshnet_gateway.steps import StepOutput
from tests.gateway.fakes import answer

P = SamplingParams
LOGITS = np.array([1.0, 3.0, 2.0, 3.0, -1.0], np.float32)


def full(logits: npt.ArrayLike) -> StepOutput:
    return StepOutput(np.asarray(logits, np.float32), None, None, None)


def log_softmax(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    wide = logits.astype(np.float64)
    shifted: npt.NDArray[np.float64] = wide - np.log(np.exp(wide).sum())
    return shifted


@pytest.mark.parametrize(
    ("params", "want"),
    [
        (P(), "logits"),
        (P(temperature=0), "top-4"),
        (P(temperature=0, seed=3, top_p=0.5), "top-4"),
        (P(temperature=0, top_logprobs=0), "top-4"),
        (P(temperature=0, top_logprobs=20), "top-20"),
        (P(temperature=0, frequency_penalty=0.1), "logits"),
        (P(temperature=0, presence_penalty=-1), "logits"),
        (P(temperature=0, repetition_penalty=1.1), "logits"),
        (P(temperature=0, logit_bias={3: 1}), "logits"),
        (P(top_k=40), "top-40"),
        (P(top_k=5, top_logprobs=20), "top-20"),
        (P(top_k=40, logit_bias={3: 1}), "logits"),
        (P(top_k=1024), "top-1024"),
        (P(top_k=1025), "logits"),
        (P(top_p=0.9), "logits"),
        (P(min_p=0.1), "logits"),
    ],
)
def test_wants_the_least_that_loses_nothing(params: SamplingParams, want: str) -> None:
    assert str(want_for(params)) == want


def test_greedy_takes_the_largest_and_of_ties_the_lowest_id() -> None:
    greedy = P(temperature=0)
    assert Sampler(greedy).sample(full(LOGITS)).token_id == 1
    tied = StepOutput(None, np.array([9, 3, 7], np.int32), np.ones(3, np.float32), 2.0)
    assert Sampler(greedy).sample(tied).token_id == 3


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (P(), [1, 3, 2, 3, -1]),
        (P(temperature=0.5), [2, 6, 4, 6, -2]),
        (P(temperature=1e-320), [None, 3, None, 3, None]),
        (P(top_k=3), [None, 3, 2, 3, None]),
        (P(top_k=1), [None, 3, None, None, None]),
        (P(top_p=0.5), [None, 3, None, 3, None]),
        (P(top_p=0), [None, 3, None, None, None]),
        (P(top_p=0.9), [None, 3, 2, 3, None]),
        (P(min_p=0.3), [None, 3, 2, 3, None]),
        (P(top_k=3, top_p=0.7), [None, 3, None, 3, None]),
        (P(logit_bias={1: -100, 4: 5}), [1, None, 2, 3, 4]),
    ],
)
def test_draws_from_the_stated_distribution(
    params: SamplingParams, expected: list[float | None]
) -> None:
    weights = np.array([0 if value is None else np.exp(value) for value in expected])
    num_draws = 4000
    # A new sampler each time: penalties and streams start afresh.
    counts = Counter(
        Sampler(replace(params, seed=seed)).sample(full(LOGITS)).token_id
        for seed in range(num_draws)
    )
    for token_id, share in enumerate(weights / weights.sum()):
        spread = 5 * np.sqrt(share * (1 - share) / num_draws)
        assert abs(counts[token_id] / num_draws - share) <= spread


@given(
    st.integers(0, 2**63), st.integers(1, 60), st.sampled_from([0.2, 0.9, 1.0]), st.integers(0, 9)
)
def test_candidates_give_what_full_logits_give(
    seed: int, top_k: int, top_p: float, noise: int
) -> None:
    params = P(seed=seed, top_k=top_k, top_p=top_p, top_logprobs=5)
    # Coarse values, as bfloat16 has them, so that there are ties at the cut.
    logits = np.round(np.random.default_rng(noise).normal(0, 2, 500)).astype(np.float32)
    few, all_of_them = Sampler(params), Sampler(params)
    for _ in range(3):
        short = few.sample(answer(logits, want_for(params), ()))
        long = all_of_them.sample(full(logits))
        assert short.token_id == long.token_id
        assert short.logprob == pytest.approx(long.logprob)
        assert [item[0] for item in short.top] == [item[0] for item in long.top]


@pytest.mark.parametrize("vocab_size", [5000, 40_000])
@pytest.mark.parametrize("top_p", [0.1, 0.3, 0.999999])
def test_top_p_is_exact_on_a_flat_distribution(top_p: float, vocab_size: int) -> None:
    logits = full(np.zeros(vocab_size))
    sampler = Sampler(P(seed=1, top_p=top_p))
    ids = {sampler.sample(logits).token_id for _ in range(200)}
    assert top_p * vocab_size * 0.9 < max(ids) < top_p * vocab_size + 1


def test_seeds_repeat_and_choices_differ() -> None:
    logits = np.zeros(1000, np.float32)

    def draw(seed: int | None, choice: int) -> list[int]:
        sampler = Sampler(P(seed=seed), choice_index=choice)
        return [sampler.sample(full(logits)).token_id for _ in range(8)]

    assert draw(7, 0) == draw(7, 0)
    assert draw(7, 0) != draw(7, 1)
    assert draw(7, 0) != draw(8, 0)
    assert draw(-1, 0) == draw(-1, 0)
    assert draw(None, 0) != draw(None, 0)


def test_frequency_and_presence_penalties_follow_openai() -> None:
    sampler = Sampler(P(temperature=0, frequency_penalty=0.5, presence_penalty=0.25))
    logits = full([2.0, 1.4, 0.6])
    # 2.0, then 1.25 < 1.4, then 2.0-0.75=1.25 > 1.4-0.75, then 2.0-1.25=0.75 > 0.65, then 0.25
    assert [sampler.sample(logits).token_id for _ in range(5)] == [0, 1, 0, 0, 1]


def test_repetition_penalty_counts_the_prompt_and_ids_past_the_head() -> None:
    sampler = Sampler(P(temperature=0, repetition_penalty=2), prompt_ids=(0, 2, 99))
    assert sampler.sample(full([2.0, 1.5, -1.0])).token_id == 1
    assert sampler.sample(full([2.0, 1.5, -0.1])).token_id == 0


def test_logprobs_are_of_the_model_before_temperature_penalties_and_bias() -> None:
    params = P(temperature=0.1, logit_bias={4: 100}, frequency_penalty=1, top_logprobs=2, seed=1)
    sampled = Sampler(params).sample(full(LOGITS))
    expected = log_softmax(LOGITS)
    assert sampled.token_id == 4
    assert sampled.logprob == pytest.approx(expected[4])
    assert [item[0] for item in sampled.top] == [1, 3]
    assert [item[1] for item in sampled.top] == pytest.approx([expected[1], expected[3]])


def test_logprobs_of_candidates_use_the_whole_vocabulary() -> None:
    sampled = Sampler(P(temperature=0, top_logprobs=1)).sample(answer(LOGITS, Want("top", 4), ()))
    assert sampled.logprob == pytest.approx(log_softmax(LOGITS)[1])
    assert len(sampled.top) == 1


def test_no_logprobs_unless_asked() -> None:
    sampled = Sampler(P(temperature=0)).sample(full(LOGITS))
    assert (sampled.logprob, sampled.top) == (None, ())
    sampled = Sampler(P(temperature=0, top_logprobs=0)).sample(full(LOGITS))
    assert (sampled.logprob is not None, sampled.top) == (True, ())


def test_masked_tokens_are_never_drawn() -> None:
    logits = full([-np.inf, 0.0, -np.inf])
    assert {Sampler(P(seed=seed)).sample(logits).token_id for seed in range(50)} == {1}


@pytest.mark.parametrize(
    "output",
    [
        full([1.0, np.nan]),
        full([1.0, np.inf]),
        full([-np.inf, -np.inf]),
        full([]),
        StepOutput(None, None, None, None),
        StepOutput(None, np.array([1], np.int32), np.array([1.0], np.float32), None),
        StepOutput(None, np.array([1], np.int32), np.array([1.0], np.float32), float("nan")),
        StepOutput(None, np.array([1], np.int32), np.array([np.nan], np.float32), 1.0),
        StepOutput(None, np.array([-1], np.int32), np.array([1.0], np.float32), 1.0),
        StepOutput(None, np.array([1, 2], np.int32), np.array([1.0], np.float32), 1.0),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error(output: StepOutput, temperature: float) -> None:
    with pytest.raises(MeshError) as caught:
        Sampler(P(temperature=temperature)).sample(output)
    assert caught.value.code is Code.INTERNAL
    assert caught.value.reason == "BAD_LOGITS"
