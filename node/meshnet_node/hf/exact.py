"""Checks that a model in shards gives, bit for bit, what it gives in one process.

The promise is: with bfloat16 weights, and the prompt cut at the same borders, every logit
is the same. The reference is transformers' own model with its own cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from meshnet.grammar import Want
from meshnet.model_dir import read_model_dir
from meshnet.topology import LayerRange
from meshnet_node.hf.shard import TransformersShard
from meshnet_node.hf.skeleton import arguments_of

__all__ = ["ShardedModel", "WholeModel", "find_difference", "save_random_model", "three_cuts"]

_CACHE_NAMES: Final = ("cache", "past_key_values", "cache_params")


class WholeModel:
    """The model in one process, with transformers' own cache: the reference.

    Args:
        directory: of the model.
        dtype: of its arithmetic.
    """

    def __init__(self, directory: Path, dtype: torch.dtype = torch.bfloat16) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, use_safetensors=True, local_files_only=True
        )
        self.model.train(False)
        self._arguments = arguments_of(self.model)
        self._argument = next((name for name in _CACHE_NAMES if name in self._arguments), "")
        self._cache: Any = None

    def restart(self) -> None:
        """Begin a new session."""
        self._cache = None

    @torch.inference_mode()
    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Append ids ``[1, seq]``; gives float32 logits ``[1, 1, vocab]`` of the last one."""
        arguments: dict[str, Any] = {"input_ids": ids, "use_cache": True}
        if self._cache is not None and self._argument:
            arguments[self._argument] = self._cache
        if "logits_to_keep" in self._arguments:
            arguments["logits_to_keep"] = 1
        output = self.model(**arguments)
        self._cache = next((output[name] for name in _CACHE_NAMES if name in output), None)
        logits: torch.Tensor = output.logits[:, -1:].float()
        return logits


class ShardedModel:
    """The same model in shards that hand numpy arrays to each other, as over the wire.

    Args:
        directory: of the model.
        cuts: the layers of each shard, in order.
        dtype: of the arithmetic.
    """

    def __init__(
        self, directory: Path, cuts: Sequence[LayerRange], dtype: str = "bfloat16"
    ) -> None:
        self.shards = [
            TransformersShard(
                directory, layers, model="m", digest="", dtype=dtype, allow_unverified=True
            )
            for layers in cuts
        ]
        self.caches = [shard.open_cache() for shard in self.shards]

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on in every shard."""
        for cache in self.caches:
            cache.truncate(length)

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        """Append ids ``[1, seq]``; gives float32 logits ``[1, 1, vocab]`` of the last one."""
        values: Any = ids.numpy().astype(np.int32)
        for shard, cache in zip(self.shards, self.caches, strict=True):
            want = Want("logits" if shard.spec.holds_head else "hidden")
            values = shard.forward(cache, values, layers=shard.spec.layers, want=want)
        return torch.from_numpy(values)


def three_cuts(num_layers: int) -> tuple[LayerRange, LayerRange, LayerRange]:
    """Cut a model of 4 layers or more in three uneven shards."""
    first, second = max(1, num_layers // 4), max(2, num_layers * 5 // 8)
    return LayerRange(0, first), LayerRange(first, second), LayerRange(second, num_layers)


def find_difference(
    directory: Path, *, prompt_tokens: int = 40, chunk_tokens: int = 16, decode_steps: int = 20
) -> str:
    """Compare the model whole and in three shards, in bfloat16; gives "" where all logits agree.

    Prefills a random prompt in chunks, then decodes greedily.
    """
    shape = read_model_dir(directory)
    whole = WholeModel(directory)
    sharded = ShardedModel(directory, three_cuts(shape.num_layers))
    generator = torch.Generator().manual_seed(1)
    prompt = torch.randint(3, shape.vocab_size, (1, prompt_tokens), generator=generator)
    chunks: list[torch.Tensor | None] = [*torch.split(prompt, chunk_tokens, dim=1)]
    token = reference = torch.empty(0)
    for step, chunk in enumerate(chunks + [None] * decode_steps):
        ids = token if chunk is None else chunk
        reference, given = whole.step(ids), sharded.step(ids)
        if not torch.isfinite(reference).all():
            return f"the whole model gives logits that are not finite at step {step}"
        if not torch.equal(reference, given):
            error = float((reference - given).abs().max() / reference.std())
            return f"step {step}: logits differ by {error:.2g} standard deviations"
        token = reference.argmax(-1)
    whole.restart()
    if torch.equal(whole.step(token), reference):
        return "the logits do not depend on the context, so that agreement shows nothing"
    return ""


def save_random_model(
    config: Any, directory: Path, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Path:
    """Save a model of `config` with random weights; gives its directory.

    The weights are larger than transformers initializes them, so that every layer changes
    the logits by more than rounding does.
    """
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]  # untyped
    with torch.no_grad():
        for module in model.modules():
            linear = isinstance(module, nn.Linear | Conv1D)
            for parameter in module.parameters(recurse=False):
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
                elif linear or parameter.dim() == 3:
                    parameter.normal_(0.0, min(parameter.shape[-2:]) ** -0.5)
    model.save_pretrained(directory)
    return directory
