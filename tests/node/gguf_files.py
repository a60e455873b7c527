"""Tiny random GGUF files of real architectures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

__all__ = ["CONFIGS", "Q", "write_gguf"]

Q = gguf.GGMLQuantizationType

COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**COMMON),
    "qwen2": lambda: transformers.Qwen2Config(**COMMON),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=128),
    "gemma2": lambda: transformers.Gemma2Config(**COMMON, head_dim=16),
    "gemma3": lambda: transformers.Gemma3TextConfig(**COMMON, head_dim=16),
    "phi3": lambda: transformers.Phi3Config(**COMMON),
}


def write_gguf(
    path: Path,
    architecture: str = "llama",
    *,
    types: tuple[Q, ...] = (Q.F32,),
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    leave_out: str = "",
) -> None:
    """Write a tiny random model; matrices are stored in `types`, taken in turn."""
    config = CONFIGS[architecture]()
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    writer = gguf.GGUFWriter(path, architecture)
    for key, name in GGUF_CONFIG_MAPPING[architecture].items():
        value = getattr(config, name, None) if isinstance(name, str) else None
        if name == "rope_theta":
            value = 10_000.0
        if isinstance(value, int) and not isinstance(value, bool):
            writer.add_uint32(f"{architecture}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
    add_tokenizer(writer)
    if change is not None:
        change(writer)
    arch = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}[architecture]
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    random = np.random.default_rng(3)
    tied = set(model.all_tied_weights_keys)
    for index, (name, value) in enumerate(model.state_dict().items()):
        if name in tied or (leave_out and leave_out in name):
            continue
        data = random.standard_normal(tuple(value.shape), np.float32)
        kind = types[index % len(types)] if data.ndim == 2 else Q.F32
        ggml_name = names.get_name(name, (".weight", ".bias"))
        assert ggml_name is not None
        writer.add_tensor(ggml_name, gguf.quantize(data, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter) -> None:
    tokens = ["<pad>", "<s>", "</s>", *(chr(code) for code in range(33, 33 + 60)), "AB"]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * 61])
    writer.add_token_merges(["A B"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
