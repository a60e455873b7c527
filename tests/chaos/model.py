"""A tiny real model, requests to it, and the texts that they must be answered with.

The reference runs the same shards in this process, fed with the same chunks: neither a
socket nor the gateway's pipeline or recovery has a part in it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise, product
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from meshnet.grammar import Want
from meshnet.topology import LayerRange
from meshnet_gateway.sampling import Sampler, SamplingParams
from meshnet_gateway.steps import StepOutput
from meshnet_node.hf.exact import save_random_model
from meshnet_node.hf.shard import TransformersShard

__all__ = [
    "CHUNK_TOKENS",
    "NUM_REQUESTS",
    "NUM_TOKENS",
    "STAGES",
    "Request",
    "prepare_requests",
    "save_model",
]

STAGES = (LayerRange(0, 2), LayerRange(2, 4), LayerRange(4, 6))
CHUNK_TOKENS = 32
NUM_TOKENS = 60
NUM_REQUESTS = 8
_VOCAB = 256
_EOS = 2
_NOISE = 5e-3
"""Of the logits' spread. Rounding in other chunks does far less to them."""


@dataclass(frozen=True, eq=False)
class Request:
    """One completion, and the text that it must give.

    Attributes:
        model: directory.
        prompt: token ids.
        options: of the OpenAI request, beside model, prompt and stream.
        text: the whole completion.
    """

    model: Path
    prompt: tuple[int, ...]
    params: SamplingParams
    options: dict[str, Any]
    text: str

    @cached_property
    def texts_over_more_nodes(self) -> list[str]:
        """Texts of routes that lead over two nodes of a stage.

        Hidden states are rounded to bfloat16 once more between the two, by about 1e-3 of the
        logits' spread: now and then another token follows, and is right there. Such texts are
        not chosen to have no ties, so that those of caches that were computed again in chunks,
        which round differently in the last bits, count too.
        """
        num_tokens = self.options["max_tokens"]
        ways = [
            [[stage], [LayerRange(at, at + 1) for at in range(stage.start, stage.end)]]
            for stage in STAGES
        ]
        routes = [list(chain.from_iterable(route)) for route in product(*ways)]
        found = []
        for route in routes[1:]:
            shards = _load(self.model, route)
            for again_at in (0, num_tokens // 4):
                tokens = _generate(
                    shards, self.prompt, self.params, num_tokens, noise=0.0, again_at=again_at
                )
                found.append(" ".join(map(_word, tokens)))
        return found


def save_model(directory: Path) -> Path:
    """Write a random float32 model of six layers with a tokenizer of one word a token."""
    torch.set_num_threads(1)
    config = transformers.LlamaConfig(
        vocab_size=_VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=STAGES[-1].end,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=_EOS,
        pad_token_id=0,
    )
    save_random_model(config, directory, dtype=torch.float32)
    words = Tokenizer(models.WordLevel({_word(i): i for i in range(_VOCAB)}, unk_token=_word(0)))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": _word(_EOS)}))
    return directory


def prepare_requests(directory: Path, count: int, num_tokens: int = NUM_TOKENS) -> list[Request]:
    """Make requests of many lengths: greedy, with penalties, and drawn with a seed.

    Those are left out that end early, that repeat themselves (a lost token would not show),
    or whose tokens a little noise on the logits changes: in float32 another chunk size rounds
    differently in the last bits, and a tie between two tokens would show that, not a fault.
    """
    shards = _load(directory, STAGES)
    random = Random(7)
    requests: list[Request] = []
    while len(requests) < count:
        length = (3, 30, 90, 200)[len(requests) % 4] + random.randrange(30)
        prompt = tuple(random.randrange(3, _VOCAB) for _ in range(length))
        params = (
            SamplingParams(temperature=0.0),
            SamplingParams(temperature=0.0, frequency_penalty=0.7),
            SamplingParams(temperature=0.8, seed=random.randrange(1 << 30)),
        )[len(requests) % 3]
        tokens = _generate(shards, prompt, params, num_tokens, noise=_NOISE)
        if len(tokens) == num_tokens and len(set(tokens)) >= num_tokens // 3:
            options = {
                "max_tokens": num_tokens,
                "temperature": params.temperature,
                "frequency_penalty": params.frequency_penalty,
                "seed": params.seed,
            }
            text = " ".join(map(_word, tokens))
            requests.append(Request(directory, prompt, params, options, text))
    return requests


def _load(directory: Path, stages: Sequence[LayerRange]) -> list[TransformersShard]:
    return [
        TransformersShard(directory, layers, model="m", digest="", dtype="float32", threads=1)
        for layers in stages
    ]


def _generate(
    shards: Sequence[TransformersShard],
    prompt: tuple[int, ...],
    params: SamplingParams,
    num_tokens: int,
    *,
    noise: float,
    again_at: int = 0,
) -> list[int]:
    """Give the tokens that follow a prompt, up to an end, or to the first that noise changes.

    After `again_at` tokens, if any, all caches are computed again in chunks.
    """
    caches = [shard.open_cache() for shard in shards]
    sampler, doubtful = Sampler(params, prompt, 0), Sampler(params, prompt, 0)
    random = np.random.default_rng(len(prompt))
    borders = [*range(0, len(prompt), CHUNK_TOKENS), len(prompt)]
    fed = [prompt[start:end] for start, end in pairwise(borders)]
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        for ids in fed:
            values: Any = np.asarray(ids, np.int32)[None]
            for shard, cache in zip(shards, caches, strict=True):
                want = Want("logits" if shard.spec.holds_head else "hidden")
                values = shard.forward(cache, values, layers=shard.spec.layers, want=want)
        logits = values[0, -1]
        shaken = logits + random.normal(0, noise * logits.std(), len(logits)).astype(np.float32)
        token = sampler.sample(StepOutput(logits, None, None, None)).token_id
        if doubtful.sample(StepOutput(shaken, None, None, None)).token_id != token:
            break
        if token == _EOS:
            break
        tokens.append(token)
        fed = [(token,)]
        if len(tokens) == again_at:
            caches = [shard.open_cache() for shard in shards]
            whole = (*prompt, *tokens[:-1])
            borders = [*range(0, len(whole), CHUNK_TOKENS), len(whole)]
            fed = [*(whole[start:end] for start, end in pairwise(borders)), (token,)]
    return tokens


def _word(token: int) -> str:
    return f"w{token}"
