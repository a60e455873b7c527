"""The weights of a GGUF file: unpacked, renamed, written as safetensors files.

Names come from the `gguf` package, changes of layout (permuted rows, shifted norms) from
transformers' own GGUF loader, values from `gguf`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from transformers import modeling_gguf_pytorch_utils as gguf_loader

from meshnet.errors import ConfigError
from meshnet.model_weights import INDEX_FILE
from meshnet_node.gguf_header import GgufHeader, GgufTensor

__all__ = ["Plan", "model_parameters", "plan_files", "write_weights"]

_LAYER: Final = re.compile(r"blk\.([0-9]+)\.")


def model_parameters(model: Any) -> dict[str, torch.Tensor]:
    """Give the tensors that a file must hold: all but those tied to another one."""
    tied = set(model.all_tied_weights_keys)
    return {name: value for name, value in model.state_dict().items() if name not in tied}


Plan = list[list[tuple[GgufTensor, str]]]
"""For each file to write: the stored tensor and its parameter's name."""


def plan_files(
    header: GgufHeader, source: Path, model: Any, dtype: torch.dtype, max_shard_bytes: int
) -> Plan:
    """Choose which tensors go into which file: whole layers, in order, as far as they fit.

    Raises:
        ConfigError: the file's tensors are not exactly the model's parameters.
    """
    wanted = model_parameters(model)
    names = _gguf_names(header, wanted, model.config.num_hidden_layers)
    groups: dict[float, list[tuple[GgufTensor, str]]] = {}
    for tensor in header.tensors:
        name = names.get(tensor.name)
        if name is None or name not in wanted:
            raise ConfigError(
                f"{source}: tensor {tensor.name!r} has no place in {type(model).__name__}",
                field=str(source),
            )
        groups.setdefault(_group(tensor.name), []).append((tensor, name))
    missing = wanted.keys() - {name for group in groups.values() for _, name in group}
    if missing:
        raise ConfigError(
            f"{source}: no tensor for {min(missing)!r} ({len(missing)} missing)",
            field=str(source),
        )
    files: Plan = [[]]
    size = 0
    for _, group in sorted(groups.items()):
        sizes = [wanted[name].numel() * dtype.itemsize for _, name in group]
        whole = sum(sizes)
        if files[-1] and size + whole > max_shard_bytes:
            files.append([])
            size = 0
        for entry, num_bytes in zip(group, sizes, strict=True):
            if files[-1] and size + num_bytes > max_shard_bytes:
                files.append([])
                size = 0
            files[-1].append(entry)
            size += num_bytes
    return files


def _gguf_names(header: GgufHeader, wanted: Iterable[str], num_layers: int) -> dict[str, str]:
    """Map ggml's tensor names to those of the model's parameters."""
    architectures = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    mapping = gguf.get_tensor_name_map(architectures[header.architecture], num_layers)
    names = ((mapping.get_name(name, (".weight", ".bias")), name) for name in wanted)
    return {ggml_name: name for ggml_name, name in names if ggml_name is not None}


def _group(name: str) -> float:
    """Order: embedding, layers by number, final norm and head."""
    layer = _LAYER.match(name)
    if layer is not None:
        return float(layer[1])
    return -1.0 if name.startswith("token_embd") else float("inf")


def _processor(header: GgufHeader, model: Any) -> Any:
    kind = gguf_loader.TENSOR_PROCESSORS.get(header.architecture, gguf_loader.TensorProcessor)
    return kind(config=model.config.to_dict())  # type: ignore[no-untyped-call]


def write_weights(
    plan: Plan,
    source: Path,
    header: GgufHeader,
    model: Any,
    directory: Path,
    dtype: torch.dtype,
    on_tensor: Callable[[str, int, int], None] | None,
) -> None:
    """Write the planned files and their index into `directory`, a file's worth in memory.

    Raises:
        ConfigError: a tensor's shape is not that of its parameter.
    """
    data = np.memmap(source, dtype=np.uint8, mode="r")
    processor = _processor(header, model)
    shapes = {name: tuple(value.shape) for name, value in model_parameters(model).items()}
    total, done, num_bytes = sum(len(entries) for entries in plan), 0, 0
    weight_map: dict[str, str] = {}
    for index, entries in enumerate(plan, start=1):
        file = f"model-{index:05d}-of-{len(plan):05d}.safetensors"
        tensors: dict[str, torch.Tensor] = {}
        for tensor, name in entries:
            values = processor.process(weights=_unpack(data, tensor), name=tensor.name).weights
            if values.shape != shapes[name]:
                raise ConfigError(
                    f"{source}: tensor {tensor.name!r} has shape {values.shape}, "
                    f"{name!r} expects {shapes[name]}",
                    field=str(source),
                )
            # A copy in every case: float32 values may still be the file's own pages.
            tensors[name] = torch.from_numpy(np.array(values, copy=True)).to(dtype)
            num_bytes += tensors[name].nbytes
            weight_map[name] = file
            done += 1
            if on_tensor is not None:
                on_tensor(name, done, total)
        save_file(tensors, directory / file, metadata={"format": "pt"})
    index_json = {
        "metadata": {"total_size": num_bytes},
        "weight_map": dict(sorted(weight_map.items())),
    }
    (directory / INDEX_FILE).write_text(json.dumps(index_json, indent=2) + "\n", encoding="utf-8")


def _unpack(data: npt.NDArray[np.uint8], tensor: GgufTensor) -> npt.NDArray[np.float32]:
    """Unpack one tensor to float32 of its own shape."""
    stored = data[tensor.start : tensor.start + tensor.num_bytes]
    block, block_bytes = gguf.GGML_QUANT_SIZES[tensor.type]
    rows = stored.reshape(-1, tensor.shape[-1] // block * block_bytes)
    return np.asarray(gguf.dequantize(rows, tensor.type), np.float32).reshape(tensor.shape)
