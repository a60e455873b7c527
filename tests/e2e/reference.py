"""The model in one process, fed with the chunk borders that the gateway uses."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM


@dataclass(frozen=True)
class Greedy:
    """A greedy generation: its tokens, and the digest of the logits that each came from."""

    tokens: list[int]
    digests: list[str]


def load_whole(model: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Load plain transformers with its default attention, on one thread."""
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()


def feed(whole, ids: list[int], cache):
    """Run the next tokens; the head computes the last position only."""
    return whole(torch.tensor([ids]), cache=cache, use_cache=True, logits_to_keep=1)


@torch.inference_mode()
def last_logits(whole, steps: list[list[int]]) -> list[npt.NDArray[np.float32]]:
    """Feed `steps` one after another; gives the last position's logits of each."""
    cache = None
    logits = []
    for ids in steps:
        out = feed(whole, ids, cache)
        cache = out.past_key_values
        logits.append(out.logits[0, -1].float().numpy())
    return logits


@torch.inference_mode()
def generate(whole, prompt: list[int], num_tokens: int, chunk_tokens: int = 128) -> Greedy:
    """Generate greedily after a prompt fed in chunks."""
    cache = None
    steps = [prompt[start : start + chunk_tokens] for start in range(0, len(prompt), chunk_tokens)]
    tokens: list[int] = []
    digests: list[str] = []
    while len(tokens) < num_tokens:
        for ids in steps:
            out = feed(whole, ids, cache)
            cache = out.past_key_values
        logits = out.logits[0, -1].float().numpy()
        digests.append(digest(logits))
        tokens.append(int(logits.argmax()))
        steps = [[tokens[-1]]]
    return Greedy(tokens, digests)


def digest(logits: npt.NDArray[np.float32]) -> str:
    """Hash the bits of float32 logits."""
    return hashlib.sha256(np.ascontiguousarray(logits, np.float32).tobytes()).hexdigest()
