"""Directories that a shard can and cannot be loaded from."""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma3Config,
    LlamaConfig,
    LlamaModel,
    MambaConfig,
    RobertaConfig,
)
from transformers.utils import logging

from meshnet.errors import Code, ConfigError, MeshError
from meshnet.topology import LayerRange
from meshnet_node.architectures import verified_model_types
from meshnet_node.hf.exact import save_random_model, three_cuts
from meshnet_node.hf.load import resolve_dtype
from meshnet_node.hf.shard import TransformersShard
from meshnet_node.hf.tiny import tiny_config
from meshnet_node.model_files import resolve_model
from tests.node.tiny import TINY, VOCAB, save_tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def directory(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def load(directory: Path, start: int = 1, end: int = 3, **options: Any) -> TransformersShard:
    return TransformersShard(
        directory, LayerRange(start, end), model="tiny", digest="", threads=1, **options
    )


def edit_config(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def remove(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def write(name: str, text: str) -> Callable[[Path], None]:
    def spoil(directory: Path) -> None:
        (directory / name).write_text(text)

    return spoil


def config(**values: Any) -> Callable[[Path], None]:
    return lambda directory: edit_config(directory, **values)


def to_pickle(directory: Path) -> None:
    torch.save(load_file(directory / "model.safetensors"), directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()


def drop_tensor(directory: Path) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, path, metadata={"format": "pt"})


def truncate_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


BAD: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (remove("config.json"), "no such file"),
    "config no JSON": (write("config.json", "{"), "not JSON"),
    "config no object": (write("config.json", "[1]"), "expected an object"),
    "no layer count": (config(num_hidden_layers="5"), "num_hidden_layers is '5'"),
    "negative width": (config(hidden_size=-64), "hidden_size is -64"),
    "no model type": (config(model_type=None), "model_type None"),
    "layers past the end": (config(num_hidden_layers=2), "has 2 layers"),
    "no weights": (remove("model.safetensors"), "no .safetensors file"),
    "pickled weights": (to_pickle, "weights in other formats are not read"),
    "tensor missing": (
        drop_tensor,
        "1 tensors are missing, the first is model.layers.1.mlp.up_proj.weight",
    ),
    "tensor of another shape": (config(intermediate_size=64), "6 tensors have another shape"),
    "weights cut short": (truncate_weights, "cannot load layers 1-3"),
    "quantized": (config(quantization_config={"quant_method": "gptq", "bits": 4}), "quantized"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_directory_is_refused_with_its_name(name: str, directory: Path) -> None:
    spoil, message = BAD[name]
    spoil(directory)
    with pytest.raises(ConfigError, match=re.escape(str(directory))) as caught:
        load(directory)
    assert message in caught.value.message


def test_code_in_the_directory_is_never_run(directory: Path, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    (directory / "evil.py").write_text(f"open({str(marker)!r}, 'w')\n")
    edit_config(directory, auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"})
    load(directory)
    edit_config(directory, model_type="evil")
    with pytest.raises(MeshError):
        load(directory, allow_unverified=True)
    assert not marker.exists()


# Runs in a fresh process, as a node does. The last one has a tensor missing.
LOAD = """
import sys
from pathlib import Path
from meshnet.errors import ConfigError
from meshnet.topology import LayerRange
from meshnet_node.hf.shard import TransformersShard

*good, bad = map(Path, sys.argv[1:])
for directory in good:
    for layers in (LayerRange(0, 2), LayerRange(2, 4)):
        TransformersShard(
            directory, layers, model="m", digest="", threads=1, allow_unverified=True
        )
try:
    TransformersShard(bad, LayerRange(0, 2), model="m", digest="", threads=1)
except ConfigError:
    print("refused")
"""


def test_loading_prints_nothing(saved: Path, directory: Path, tmp_path: Path) -> None:
    """No progress bar, no load report, no advice to install kernels or about padding."""
    padded = tmp_path / "padded"
    save_random_model(TINY["qwen3"](), padded)
    edit_config(padded, pad_token_id=VOCAB - 1)
    mamba = save_random_model(tiny_config(MambaConfig), tmp_path / "mamba")
    drop_tensor(directory)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *map(str, (saved, padded, mamba, directory))],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "refused\n", "")


def test_loading_leaves_the_settings_of_transformers(saved: Path) -> None:
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_info()
    logging.enable_progress_bar()
    try:
        load(saved)
        assert logging.get_verbosity() == logging.INFO
        assert logging.is_progress_bar_enabled()
    finally:
        logging.set_verbosity(verbosity)
        if not bars:
            logging.disable_progress_bar()


def test_an_encoder_is_refused(tmp_path: Path) -> None:
    directory = save_random_model(tiny_config(BertConfig), tmp_path)
    assert load(directory).spec.layers == LayerRange(1, 3)
    edit_config(directory, is_decoder=False)
    with pytest.raises(ConfigError, match="is_decoder: false, expected true"):
        load(directory)


def test_an_architecture_outside_the_verified_list_needs_a_flag(tmp_path: Path) -> None:
    assert "mamba" not in verified_model_types()
    directory = save_random_model(tiny_config(MambaConfig), tmp_path)
    with pytest.raises(MeshError, match="'mamba' is not among those verified") as caught:
        load(directory)
    assert caught.value.code is Code.UNIMPLEMENTED
    assert caught.value.reason == "ARCHITECTURE_NOT_VERIFIED"
    assert load(directory, allow_unverified=True).spec.layers == LayerRange(1, 3)


@pytest.mark.parametrize("family", TINY)
def test_the_verified_list_has_the_common_families(family: str) -> None:
    assert TINY[family]().model_type in verified_model_types()


@pytest.mark.parametrize("options", [{"threads": 0}, {"dtype": "float16"}], ids=str)
def test_a_bad_option_is_refused(saved: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected") as caught:
        TransformersShard(saved, LayerRange(0, 1), model="m", digest="", **options)
    assert caught.value.field in options


@pytest.mark.parametrize(
    ("name", "stored", "expected"),
    [
        ("auto", "bfloat16", torch.bfloat16),
        ("auto", "float16", torch.bfloat16),
        ("auto", "float32", torch.float32),
        ("auto", "", torch.bfloat16),
        ("float32", "bfloat16", torch.float32),
        ("bfloat16", "float32", torch.bfloat16),
    ],
)
def test_dtype_follows_the_weights_unless_said(
    name: str, stored: str, expected: torch.dtype
) -> None:
    assert resolve_dtype(name, stored) is expected


def test_a_shard_needs_only_the_files_with_its_layers(saved: Path, tmp_path: Path) -> None:
    """Many files and an index: the files of other layers may be absent with a filtered index."""
    model = AutoModelForCausalLM.from_pretrained(saved, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    kept = {
        name: file
        for name, file in index["weight_map"].items()
        if name.startswith(("model.layers.1.", "model.layers.2."))
    }
    path.write_text(json.dumps({**index, "weight_map": kept}))
    files = {file for file in tmp_path.glob("*.safetensors") if file.name not in kept.values()}
    assert files
    for file in files:
        file.unlink()
    assert load(tmp_path, 1, 3).spec.layers == LayerRange(1, 3)
    with pytest.raises(ConfigError, match=r"model.layers.3.*"):
        load(tmp_path, 1, 4)


@pytest.mark.parametrize(
    ("family", "start", "end", "left_out"),
    [
        ("llama", 0, 2, ["norm"]),
        ("llama", 2, 4, ["norm"]),
        ("llama", 2, 5, []),
        ("gpt2", 0, 2, ["ln_f"]),
        ("gpt2", 2, 4, ["ln_f", "wpe"]),
        ("gpt2", 2, 5, ["wpe"]),
        ("gpt_neox", 2, 4, ["final_layer_norm"]),
        ("opt", 2, 4, ["embed_positions", "final_layer_norm"]),
    ],
)
def test_parts_of_the_other_end_are_neither_read_nor_held(
    family: str, start: int, end: int, left_out: list[str], tmp_path: Path
) -> None:
    directory = save_tiny(family, tmp_path)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    beside = re.compile(rf"^(?!.*\.[0-9]+\.).*\b(?:{'|'.join(left_out) or '-'})\.")
    kept = {name: value for name, value in tensors.items() if not beside.search(name)}
    assert (len(kept) < len(tensors)) == bool(left_out)
    save_file(kept, path, metadata={"format": "pt"})
    shard = load(directory, start, end)
    assert sorted(shard._shard.left_out) == left_out
    for part in left_out:
        module = shard._shard.owner.get_submodule(part)
        assert list(module.parameters()) == []
        for value in module.buffers():
            assert value.untyped_storage().nbytes() == value.itemsize
            assert value.isnan().all()


def test_a_norm_that_is_not_the_last_thing_is_noticed(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A family unlike all known ones: `norm` is applied to the embeddings."""
    forward = LlamaModel.forward

    @functools.wraps(forward)
    def norm_first(self: Any, input_ids: Any = None, inputs_embeds: Any = None, **rest: Any) -> Any:
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        return forward(self, inputs_embeds=self.norm(inputs_embeds), **rest)

    monkeypatch.setattr(LlamaModel, "forward", norm_first)
    with pytest.raises(MeshError, match="give NaN without the weights of norm") as caught:
        load(saved, 0, 2)
    assert caught.value.code is Code.UNIMPLEMENTED
    assert load(saved, 2, 4).spec.layers == LayerRange(2, 4)
    assert load(saved, 0, 5).spec.layers == LayerRange(0, 5)


@pytest.mark.parametrize("config_class", [RobertaConfig, Gemma3Config, LlamaConfig])
def test_shards_load_from_the_files_chosen_for_them(config_class: Any, tmp_path: Path) -> None:
    """A head of several layers, a vision tower, neither: a file for nearly every tensor."""
    directory = save_random_model(tiny_config(config_class), tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    (directory / "model.safetensors").unlink()
    model.save_pretrained(directory, max_shard_size="1KB")
    for layers in three_cuts(8):
        part = Path(shutil.copytree(directory, tmp_path / str(layers)))
        chosen = resolve_model(str(directory), layers).weight_files
        for file in part.glob("*.safetensors"):
            if file.name not in chosen:
                file.unlink()
        files = resolve_model(str(part), layers, cache_dir=tmp_path / "cache")
        shard = load(files.directory, layers.start, layers.end)._shard
        if layers.end < 8:
            outside = set(shard.model.parameters()) - set(shard.decoder.parameters())
            assert not outside
