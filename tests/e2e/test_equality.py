"""The mesh equals the model: split over any number of nodes, the very same logits."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import torch

from meshnet.grammar import Want
from meshnet.plane.client import PlaneClient
from meshnet_gateway.model_text import ModelText
from meshnet_gateway.pipeline import PipelineSettings, RoutePipeline
from tests.e2e.mesh import node_processes, shards_of
from tests.e2e.prompts import PROMPTS
from tests.e2e.reference import Greedy, digest, generate, last_logits, load_whole

NUM_TOKENS = 200
LOGITS = Want("logits")


@pytest.fixture(scope="module")
def prompts(smollm2) -> list[list[int]]:
    text = ModelText.load(smollm2)
    ids = [text.encode_chat([{"role": "user", "content": prompt}]) for prompt in PROMPTS]
    assert len(ids[-1]) > 512
    return ids


@pytest.fixture(scope="module")
def references(smollm2, prompts) -> list[Greedy]:
    whole = load_whole(smollm2, torch.bfloat16)
    return [generate(whole, prompt, NUM_TOKENS) for prompt in prompts]


async def generate_on_mesh(client: PlaneClient, route, prompt: list[int]) -> Greedy:
    pipeline = RoutePipeline(client, route, PipelineSettings())
    tokens: list[int] = []
    digests: list[str] = []
    step = prompt
    while len(tokens) < NUM_TOKENS:
        logits = (await pipeline.step(step, LOGITS)).logits
        digests.append(digest(logits))
        tokens.append(int(logits.argmax()))
        step = [tokens[-1]]
    await pipeline.close()
    return Greedy(tokens, digests)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("num_nodes", [1, 2, 3, 5])
async def test_bfloat16_logits_are_those_of_one_process(smollm2, prompts, references, num_nodes):
    client = PlaneClient()
    async with node_processes(smollm2, shards_of(smollm2, num_nodes)) as route:
        results = await asyncio.gather(
            *(generate_on_mesh(client, route, prompt) for prompt in prompts)
        )
        await client.close()
    for result, reference in zip(results, references, strict=True):
        assert result.tokens == reference.tokens
        assert result.digests == reference.digests


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_float32_differs_by_the_wire_rounding_alone(smollm2, prompts):
    """Float32 nodes round to bfloat16 at the wire only: KL far below that of bfloat16 weights."""
    whole = load_whole(smollm2, torch.float32)
    prompt, num_tokens = prompts[1], 40
    reference = generate(whole, prompt, num_tokens)
    steps = [prompt, *([token] for token in reference.tokens[:-1])]
    expected = last_logits(whole, steps)
    client = PlaneClient()
    async with node_processes(smollm2, shards_of(smollm2, 3), dtype="float32") as route:
        pipeline = RoutePipeline(client, route, PipelineSettings())
        got = [(await pipeline.step(ids, LOGITS)).logits for ids in steps]
        await pipeline.close()
        await client.close()
    divergences = [kl_divergence(a, b) for a, b in zip(expected, got, strict=True)]
    assert np.mean(divergences) < 1e-4
    assert np.mean([a.argmax() == b.argmax() for a, b in zip(expected, got, strict=True)]) >= 0.97


def kl_divergence(reference: np.ndarray, other: np.ndarray) -> float:
    """KL of the distribution of `other` from that of `reference`, in nats."""
    p, q = (x.astype(np.float64) - x.max() for x in (reference, other))
    log_p, log_q = p - np.log(np.exp(p).sum()), q - np.log(np.exp(q).sum())
    return float((np.exp(log_p) * (log_p - log_q)).sum())
