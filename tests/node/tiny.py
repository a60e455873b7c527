"""Tiny random models of real architectures, saved as Hugging Face directories."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from meshnet_node.hf.exact import save_random_model

__all__ = ["TINY", "save_tiny"]

VOCAB = 128

# Models this small only wait for each other's threads.
torch.set_num_threads(1)


def _config(name: str, **over: Any) -> Callable[[], Any]:
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return lambda: getattr(transformers, name)(**{**common, **over})


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

TINY: dict[str, Callable[[], Any]] = {
    "llama": _config("LlamaConfig"),
    "llama-tied": _config("LlamaConfig", tie_word_embeddings=True),
    "qwen2": _config("Qwen2Config"),
    "qwen3": _config("Qwen3Config", head_dim=16),
    "mistral": _config("MistralConfig", sliding_window=8),
    "gemma2": _config("Gemma2Config", head_dim=16, sliding_window=8),
    "gemma3": _config(
        "Gemma3TextConfig",
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", *["sliding_attention"] * 3],
    ),
    "gpt2": _config("GPT2Config", n_inner=96),
    "gpt_neox": _config("GPTNeoXConfig"),
    "opt": _config("OPTConfig", ffn_dim=96, word_embed_proj_dim=32),
    "phi3": _config("Phi3Config"),
    "mixtral": _config("MixtralConfig", num_local_experts=4),
    "qwen2_moe": _config("Qwen2MoeConfig", shared_expert_intermediate_size=32, **_EXPERTS),
    "qwen3_moe": _config("Qwen3MoeConfig", head_dim=16, **_EXPERTS),
}
"""Family name to a factory of its configuration: five layers, 64 wide, 128 token ids."""


def save_tiny(
    family: str, directory: Path, *, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> Path:
    """Save a random model of `family` and give its directory."""
    return save_random_model(TINY[family](), directory, dtype=dtype, seed=seed)
