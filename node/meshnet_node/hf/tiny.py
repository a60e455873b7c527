"""Shrinks the configuration of any causal language model to one that runs in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM
from transformers.configuration_utils import PretrainedConfig

__all__ = ["TINY_LAYERS", "tiny_config"]

TINY_LAYERS: Final = 8
"""Decoder layers of a shrunk model: enough for patterns that repeat every fourth or eighth."""

_MAX_PARAMETERS: Final = 30_000_000
_VOCAB: Final = 128

# One name for one meaning, as the configurations of transformers use them. Only names that
# a configuration has are passed on.
_SMALL: Final[dict[str, Any]] = {
    "vocab_size": _VOCAB,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "use_cache": True,
    # depth
    "num_hidden_layers": TINY_LAYERS,
    "num_layers": TINY_LAYERS,
    "n_layers": TINY_LAYERS,
    "n_layer": TINY_LAYERS,
    "decoder_layers": TINY_LAYERS,
    "encoder_layers": 1,
    "num_nextn_predict_layers": 0,
    "num_mtp_layers": 0,
    # width
    "hidden_size": 64,
    "d_model": 64,
    "embedding_size": 48,
    "word_embed_proj_dim": 48,
    "input_embedding_size": 64,
    "output_embedding_size": 64,
    "embedding_dim": 64,
    "lru_width": 64,
    "attention_hidden_size": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "shared_intermediate_size": 96,
    "dense_intermediate_size": 96,
    "ffn_dim": 96,
    "ffn_hidden_size": 96,
    "decoder_ffn_dim": 96,
    "encoder_ffn_dim": 96,
    "dff": 96,
    "dim_ff": 96,
    "n_inner": 96,
    # attention
    "num_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_attention_heads": 4,
    "num_heads": 4,
    "swa_num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_kv_heads": 2,
    "swa_num_key_value_heads": 2,
    "head_dim": 16,
    "swa_head_dim": 16,
    "global_head_dim": 16,
    "attention_head_dim": 16,
    "dim_head": 16,
    "kv_channels": 16,
    "rotary_dim": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "o_lora_rank": 16,
    "o_groups": 2,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 16,
    "sliding_window": 12,
    "sliding_window_size": 12,
    "attention_window_size": 12,
    "window_size": 12,
    "local_attention": 12,
    "attention_chunk_size": 24,
    "max_window_layers": TINY_LAYERS // 2,
    "max_position_embeddings": 512,
    "max_seq_len": 512,
    "n_positions": 512,
    "context_length": 512,
    # experts
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "moe_num_experts": 8,
    "zero_expert_num": 2,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "moe_topk": 2,
    "moe_k": 2,
    "n_group": 2,
    "num_expert_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "expert_ffn_hidden_size": 32,
    "shared_expert_intermediate_size": 32,
    "moe_shared_expert_intermediate_size": 32,
    "shared_experts_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "moe_layer_end_index": TINY_LAYERS - 1,
    "router_hidden_size": 32,
    # recurrences and convolutions
    "state_size": 16,
    "ssm_state_size": 16,
    "mamba_d_state": 16,
    "time_step_rank": 8,
    "mamba_dt_rank": 8,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 16,
    "mamba_head_dim": 16,
    "mamba_headdim": 16,
    "mamba_d_ssm": 128,
    "mamba_chunk_size": 16,
    "chunk_size": 16,
    "n_groups": 1,
    "mamba_n_groups": 1,
    "mamba_ngroups": 1,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_num_heads": 4,
    "linear_head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "block_multiple_of": 16,
    "num_blocks": TINY_LAYERS,
    "block_size": 16,
}

# What a family needs besides, where its dimensions depend on each other in ways of its own.
_HYBRID: Final = ["linear_attention", "linear_attention", "full_attention", "linear_attention"] * 2
_CONVOLUTIONS: Final = ["conv", "conv", "full_attention", "conv"] * 2
_FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "bamba": {"attn_layer_indices": [2, 5, 6]},
    "cohere2_moe": {"n_shared_experts": 1},
    "dots1": {"n_shared_experts": 1},
    "gemma4_text": {"hidden_size_per_layer_input": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], TINY_LAYERS // 2]]},
    "granitemoehybrid": {"layer_types": _HYBRID},
    "inkling2_text": {"unpadded_vocab_size": _VOCAB},
    "inkling_text": {"unpadded_vocab_size": _VOCAB},
    "jamba": {"attn_layer_period": 4, "attn_layer_offset": 2},
    "lfm2": {"layer_types": _CONVOLUTIONS},
    "lfm2_moe": {"layer_types": _CONVOLUTIONS},
    "longcat_flash": {"head_dim": 8},
    "mamba2": {"num_heads": 8},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 2,
    },
    "prophetnet": {"num_decoder_layers": TINY_LAYERS},
    "zamba": {"attn_layer_period": 4, "attn_layer_offset": 2},
}


def tiny_config(config_class: type[PretrainedConfig]) -> PretrainedConfig:
    """Build the smallest sensible configuration of a family.

    Raises:
        ValueError: the family's dimensions do not fit together, or it stays large.
    """
    default = config_class()
    config = config_class(**_small_values(default, config_class.model_type))
    _cut_lists(config)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]  # untyped
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > _MAX_PARAMETERS:
        raise ValueError(
            f"{count:,} parameters after shrinking, expected at most {_MAX_PARAMETERS:,}"
        )
    return config


def _small_values(default: PretrainedConfig, model_type: str) -> dict[str, Any]:
    parts = {
        name: _small_values(part, part.model_type)
        for name in default.sub_configs
        if isinstance(part := getattr(default, name, None), PretrainedConfig)
    }
    aliases: Mapping[str, str] = type(default).attribute_map
    own = {
        name: value
        for name, value in _SMALL.items()
        if name in vars(default) or aliases.get(name) in vars(default)
    }
    if "qk_rope_head_dim" in own:
        # Latent attention derives one, and expands the other to every head.
        own.pop("head_dim", None)
        own.pop("num_key_value_heads", None)
        own.update({"num_key_value_heads": 4} if "num_key_value_heads" in vars(default) else {})
    # Placeholders of other modalities must be in the vocabulary too.
    tokens = {
        name: 0
        for name, value in vars(default).items()
        if name.endswith("_token_id") and isinstance(value, int) and value >= _VOCAB
    }
    return {**tokens, **own, **_FAMILIES.get(model_type, {}), **parts}


def _cut_lists(config: PretrainedConfig) -> None:
    """Shorten lists with an item per layer that kept their default length."""
    text = config.get_text_config(decoder=True)
    for name, value in vars(text).items():
        if isinstance(value, list) and len(value) > TINY_LAYERS and name.endswith("layers"):
            setattr(text, name, value[:TINY_LAYERS])
