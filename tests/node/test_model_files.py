"""Model directories: shapes, indexes, headers, digests, and the files of a shard."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from meshnet.errors import ConfigError
from meshnet.model_dir import read_model_dir
from meshnet.model_hub import HubModel, parse_source, resolve_tokenizer
from meshnet.model_weights import (
    StoredTensor,
    WeightIndex,
    model_digest,
    read_safetensors_header,
    read_weight_index,
)
from meshnet.topology import LayerRange
from meshnet_node.model_files import resolve_model, shard_files

NUM_LAYERS = 4
CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": NUM_LAYERS,
    "hidden_size": 8,
    "vocab_size": 16,
    "max_position_embeddings": 64,
    "dtype": "bfloat16",
}
INDEX = "model.safetensors.index.json"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with a weight file for each layer, and one each for both ends."""
    directory = tmp_path / "tiny"
    directory.mkdir()
    files = {
        "embed.safetensors": ["model.embed_tokens.weight"],
        **{
            f"layer{layer}.safetensors": [f"model.layers.{layer}.mlp.weight"]
            for layer in range(NUM_LAYERS)
        },
        "norm.safetensors": ["model.norm.weight"],
        "head.safetensors": ["lm_head.weight"],
    }
    for file, tensors in files.items():
        save_file({tensor: np.ones(4, np.float32) for tensor in tensors}, directory / file)
    weight_map = {tensor: file for file, tensors in files.items() for tensor in tensors}
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.json").write_text("{}")
    return directory


def test_shape(model: Path) -> None:
    shape = read_model_dir(model)
    assert (shape.name, shape.model_type, shape.dtype) == ("tiny", "llama", "bfloat16")
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size) == (NUM_LAYERS, 8, 16)
    assert shape.max_positions == 64


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "gpt2", "n_layer": 3, "n_embd": 5, "vocab_size": 7}, (3, 5, 7)),
        (
            {
                "model_type": "gemma3",
                "text_config": {"num_hidden_layers": 2, "hidden_size": 4, "vocab_size": 6},
            },
            (2, 4, 6),
        ),
    ],
)
def test_shapes_of_other_families(
    tmp_path: Path, config: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = read_model_dir(tmp_path)
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size) == expected


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "expected a Hugging Face model directory"),
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "expected an object"),
        ('{"model_type": 3}', "model_type 3, expected a name"),
        ('{"model_type": "a", "architectures": 1}', "architectures 1"),
        ('{"model_type": "a"}', "num_hidden_layers is None"),
        ('{"model_type": "a", "num_hidden_layers": -1}', "num_hidden_layers is -1"),
        ('{"model_type": "a", "num_hidden_layers": true}', "num_hidden_layers is True"),
    ],
)
def test_bad_config(tmp_path: Path, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=said) as caught:
        read_model_dir(tmp_path)
    assert caught.value.field == str(tmp_path / "config.json")


@pytest.mark.parametrize(
    "file",
    [
        "../secret.safetensors",
        "/etc/passwd",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "..",
        ".hidden.safetensors",
        "model.bin",
        "a\\b.safetensors",
        "",
        7,
        None,
    ],
)
def test_index_cannot_point_outside(model: Path, file: object) -> None:
    (model / INDEX).write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(ConfigError, match="in the same directory") as caught:
        read_weight_index(model)
    assert caught.value.field == str(model / INDEX)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_index_without_a_map(model: Path, content: str) -> None:
    (model / INDEX).write_text(content)
    with pytest.raises(ConfigError, match="weight_map is missing or empty"):
        read_weight_index(model)


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a model directory with safetensors weights"):
        read_weight_index(tmp_path)


def test_header_of_a_good_file(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    save_file({"a": np.zeros((2, 3), np.float32), "b": np.zeros(0, np.int8)}, path)
    header = read_safetensors_header(path)
    assert header["a"] == StoredTensor("F32", (2, 3), header["a"].start, 24)
    assert header["a"].start + 24 == path.stat().st_size
    assert header["b"].num_bytes == 0


def file_of(header: object, data: bytes = b"\0" * 8) -> bytes:
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(**change: object) -> dict[str, object]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **change}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "header of 0 bytes"),
        (b"\x02\0\0", "header of 2 bytes"),
        (struct.pack("<Q", 1 << 62) + b"{}", "header of 4611686018427387904 bytes"),
        (struct.pack("<Q", 3) + b"{}", "header of 3 bytes, expected at most 2"),
        (file_of([]), "expected an object"),
        (struct.pack("<Q", 2) + b"{'", "not JSON"),
        (file_of({"w": 1}), "tensor 'w'"),
        (file_of(entry(dtype="F31")), "F31"),
        (file_of(entry(dtype=4)), "tensor 'w'"),
        (file_of(entry(shape=[-2])), "tensor 'w'"),
        (file_of(entry(shape=[True, 2])), "tensor 'w'"),
        (file_of(entry(shape=[1 << 62, 1 << 62])), "tensor 'w'"),
        (file_of(entry(shape=[3])), "tensor 'w'"),
        (file_of(entry(data_offsets=[8, 0])), "tensor 'w'"),
        (file_of(entry(data_offsets=[-8, 0])), "tensor 'w'"),
        (file_of(entry(data_offsets=[1, 9])), "does not fit 8 bytes of data"),
        (file_of(entry(data_offsets=[0])), "tensor 'w'"),
    ],
)
def test_bad_headers(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "w.safetensors"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        read_safetensors_header(path)
    assert caught.value.field == str(path)


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none()
        | st.booleans()
        | st.integers()
        | st.text(max_size=8)
        | st.sampled_from(["F32", "w"]),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["w", "dtype", "shape", "data_offsets"]), inner, max_size=3
            )
        ),
        max_leaves=12,
    ).map(file_of)
)
def test_any_bytes_give_a_header_or_an_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "w.safetensors"
    path.write_bytes(content)
    try:
        header = read_safetensors_header(path)
    except ConfigError:
        return
    assert all(tensor.start + tensor.num_bytes <= len(content) for tensor in header.values())


FAMILIES = {
    "llama": (
        "model.embed_tokens.weight",
        "model.layers.{}.w",
        "model.norm.weight",
        "lm_head.weight",
    ),
    "gpt2": ("wte.weight", "h.{}.attn.w", "ln_f.weight", None),
    "gpt_neox": (
        "gpt_neox.embed_in.weight",
        "gpt_neox.layers.{}.w",
        "gpt_neox.final_layer_norm.weight",
        "embed_out.weight",
    ),
    "bloom": (
        "transformer.word_embeddings.weight",
        "transformer.h.{}.w",
        "transformer.ln_f.weight",
        None,
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_files_of_shards(family: str) -> None:
    embedding, layer, norm, head = FAMILIES[family]
    names = {embedding: "embed", norm: "norm"} | {layer.format(i): f"layer{i}" for i in range(12)}
    if head is not None:
        names[head] = "head"
    index = WeightIndex(names, b"")

    assert shard_files(index, LayerRange(0, 2), 12) == ("embed", "layer0", "layer1")
    assert shard_files(index, LayerRange(1, 3), 12) == ("layer1", "layer2")
    last = shard_files(index, LayerRange(10, 12), 12)
    # A head that is not stored is the embedding's other use.
    assert last == ("embed" if head is None else "head", "layer10", "layer11", "norm")
    assert set(shard_files(index, LayerRange(0, 12), 12)) == set(names.values())


BESIDE: dict[str, tuple[str, str, tuple[bool, bool, bool]]] = {
    "final norm": ("model.norm.weight", "model.layers", (False, False, True)),
    "bias of a final norm": ("ln_f.bias", "h", (False, False, True)),
    "learned positions": ("transformer.wpe.weight", "transformer.h", (True, False, False)),
    "norm of the embeddings": (
        "transformer.word_embeddings_layernorm.bias",
        "transformer.h",
        (True, False, False),
    ),
    # What is not told for sure is kept.
    "a final norm named otherwise": (
        "model.embedding_norm.weight",
        "model.layers",
        (True, True, True),
    ),
    "a norm that is of either end": (
        "model.decoder.layernorm_embedding.weight",
        "model.decoder.layers",
        (True, True, True),
    ),
    "a name that is not known": ("model.scale.weight", "model.layers", (True, True, True)),
    "a norm elsewhere": ("projector.norm.weight", "model.layers", (True, True, True)),
    "positions given to every layer": (
        "encoder.embed_positions.weight",
        "encoder.layer",
        (True, True, True),
    ),
}


@pytest.mark.parametrize("name", BESIDE)
def test_what_stands_beside_the_layers_goes_to_the_shard_that_needs_it(name: str) -> None:
    tensor, layers, expected = BESIDE[name]
    index = WeightIndex({tensor: "it"} | {f"{layers}.{i}.w": "layer" for i in range(3)}, b"")
    files = [shard_files(index, LayerRange(i, i + 1), 3) for i in range(3)]
    assert tuple("it" in each for each in files) == expected


@pytest.mark.parametrize(
    ("head", "tied"),
    [
        (("lm_head.dense.weight", "lm_head.bias"), True),
        (("lm_head.dense.weight", "lm_head.decoder.weight"), False),
        (("lm_head.weight", "lm_head.bias"), False),
        (("output.weight",), False),
    ],
    ids=str,
)
def test_a_head_without_its_matrix_is_tied(head: tuple[str, ...], *, tied: bool) -> None:
    embedding = "model.embed_tokens.weight"
    index = WeightIndex({name: name for name in (embedding, "model.layers.1.w", *head)}, b"")
    last = shard_files(index, LayerRange(1, 2), 2)
    assert set(last) == {"model.layers.1.w", *head, *([embedding] if tied else [])}
    assert not set(head) & set(shard_files(index, LayerRange(0, 1), 2))


def test_a_tower_of_another_modality_goes_to_every_shard() -> None:
    """Loading it is the model class's matter; the numbers of its layers are not the decoder's."""
    names = ("vision_tower.layers.0.w", "vision_tower.layers.7.w", "vision_tower.norm.weight")
    index = WeightIndex({name: name for name in names} | {"model.layers.1.w": "layer"}, b"")
    assert shard_files(index, LayerRange(1, 2), 4) == ("layer", *names)


def test_whole_directory_is_used_as_it_is(model: Path, tmp_path: Path) -> None:
    files = resolve_model(str(model), LayerRange(1, 2), cache_dir=tmp_path / "cache")
    assert files.directory == model
    assert files.weight_files == ("layer1.safetensors",)
    assert not (tmp_path / "cache").exists()


def test_partial_directory_gets_a_filtered_index(model: Path, tmp_path: Path) -> None:
    whole = resolve_model(str(model))
    for file in ("embed", "head", "norm", "layer0", "layer3"):
        (model / f"{file}.safetensors").unlink()
    before = {path.name: path.read_bytes() for path in model.iterdir()}

    files = resolve_model(str(model), LayerRange(1, 3), cache_dir=tmp_path / "cache")

    assert files.directory.is_relative_to(tmp_path / "cache")
    index = read_weight_index(files.directory)
    assert index.weight_map == {
        "model.layers.1.mlp.weight": "layer1.safetensors",
        "model.layers.2.mlp.weight": "layer2.safetensors",
    }
    assert {path.name for path in files.directory.iterdir()} == {
        *files.weight_files,
        "config.json",
        "tokenizer.json",
        INDEX,
    }
    assert all((files.directory / file).is_file() for file in files.weight_files)
    assert files.digest == whole.digest
    assert files.name == whole.name == "tiny"
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before


def test_view_is_made_once_and_mended(model: Path, tmp_path: Path) -> None:
    (model / "head.safetensors").unlink()
    cache = tmp_path / "cache"
    first = resolve_model(str(model), LayerRange(0, 1), cache_dir=cache)
    made = first.directory.stat().st_ino
    again = resolve_model(str(model), LayerRange(0, 1), cache_dir=cache)
    assert again == first
    assert again.directory.stat().st_ino == made
    (first.directory / "config.json").unlink()
    mended = resolve_model(str(model), LayerRange(0, 1), cache_dir=cache)
    assert (mended.directory / "config.json").is_file()
    assert len(list((cache / "views").iterdir())) == 1


def test_missing_file_is_named(model: Path) -> None:
    (model / "layer2.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"layer2\.safetensors: missing, but the shard needs it"):
        resolve_model(str(model), LayerRange(2, 3))


def test_file_without_its_tensor(model: Path) -> None:
    save_file({"other": np.ones(1, np.float32)}, model / "layer1.safetensors")
    with pytest.raises(ConfigError, match=r"no tensor 'model\.layers\.1\.mlp\.weight'"):
        resolve_model(str(model), LayerRange(1, 2))


def test_layers_outside_the_model(model: Path) -> None:
    with pytest.raises(ConfigError, match="layers 2-5: expected a part of 0-4"):
        resolve_model(str(model), LayerRange(2, 5))


def test_digest_survives_a_copy_and_missing_files(model: Path, tmp_path: Path) -> None:
    digest = model_digest(model)
    copy = tmp_path / "elsewhere"
    shutil.copytree(model, copy)
    (copy / "layer0.safetensors").unlink()
    (copy / "README.md").write_text("notes")
    assert model_digest(copy) == digest
    assert len(digest) == 64


def edit(file: str, content: bytes) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        (directory / file).write_bytes(content)

    return change


@pytest.mark.parametrize(
    "change",
    [
        edit("config.json", json.dumps({**CONFIG, "rope_theta": 5}).encode()),
        edit("tokenizer.json", b'{"a": 1}'),
        edit(INDEX, b'{"weight_map": {"w": "head.safetensors"}}'),
        lambda directory: (directory / "tokenizer.json").unlink(),
    ],
)
def test_digest_tells_models_apart(model: Path, change: Callable[[Path], None]) -> None:
    before = model_digest(model)
    change(model)
    assert model_digest(model) != before


def test_digest_of_a_lone_file_covers_its_header(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones(2, np.float32), "b": np.ones(3, np.float32)}, path)
    first = model_digest(tmp_path)
    save_file({"b": np.zeros(3, np.float32), "a": np.zeros(2, np.float32)}, path)
    assert model_digest(tmp_path) == first
    save_file({"a": np.ones(3, np.float32), "b": np.ones(2, np.float32)}, path)
    assert model_digest(tmp_path) != first


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("acme/tiny", HubModel("acme/tiny", "main")),
        ("acme/tiny-1.5B@v2.0", HubModel("acme/tiny-1.5B", "v2.0")),
        ("acme/tiny@refs/pr/3", HubModel("acme/tiny", "refs/pr/3")),
    ],
)
def test_hub_names(source: str, expected: HubModel) -> None:
    assert parse_source(source) == expected


@pytest.mark.parametrize(
    "source", ["", "tiny", "./acme/tiny", "/acme/tiny", "a/b/c", "acme/..", "acme/tiny@", "a b/c"]
)
def test_neither_directory_nor_hub_name(source: str) -> None:
    with pytest.raises(ConfigError, match="no such directory, and no hub name"):
        parse_source(source)


def test_gguf_file_is_pointed_to_import(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"meshnet model import .*model\.gguf DIR"):
        parse_source(str(tmp_path / "model.gguf"))


def test_tokenizer_of_a_directory(model: Path) -> None:
    files = resolve_tokenizer(str(model))
    assert (files.directory, files.name) == (model, "tiny")


def test_no_torch_is_imported(model: Path) -> None:
    code = (
        "import sys\n"
        "from meshnet_node.model_files import resolve_model\n"
        "resolve_model(sys.argv[1])\n"
        "heavy = {'torch', 'transformers', 'huggingface_hub'} & set(sys.modules)\n"
        "sys.exit(str(sorted(heavy)) if heavy else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(model)], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
