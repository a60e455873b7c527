"""Model files that mean harm: nothing is run, nothing outside is read, every length is checked."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshnet.errors import ConfigError, MeshError
from meshnet.model_dir import read_model_dir
from meshnet.model_hub import parse_source, resolve_tokenizer
from meshnet.model_weights import INDEX_FILE, WEIGHTS_FILE, read_safetensors_header
from meshnet.topology import LayerRange
from meshnet_node.gguf_header import read_header
from meshnet_node.hf.load import load_shard
from meshnet_node.model_files import resolve_model
from tests.fuzz.targets.model_files import CONFIG, TENSORS, WEIGHTS

MARK = "import pathlib; pathlib.Path({!r}).write_text('ran')"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / WEIGHTS_FILE).write_bytes(WEIGHTS)
    return directory


def weights(header: Any, num_bytes: int = 80) -> bytes:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(num_bytes)


def moved(name: str, start: int, end: int) -> dict[str, Any]:
    return {**TENSORS, name: {**TENSORS[name], "data_offsets": [start, end]}}


LAST = "model.layers.1.a.weight"


def test_a_good_model_is_taken(model: Path, tmp_path: Path) -> None:
    assert resolve_model(str(model), cache_dir=tmp_path).num_layers == 2


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (weights(moved(LAST, 68, 76)), "overlaps the one before it, expected"),
        (weights(moved(LAST, 64, 72)), "overlaps"),
        (weights(moved(LAST, 80, 88), 88), "leaves bytes before it, expected"),
        (weights(TENSORS, 88), "tensors end at offset"),
        (weights(TENSORS, 72), "does not fit 72 bytes"),
        (weights(moved(LAST, 72, 1 << 62)), "does not fit"),
        (weights(moved(LAST, -8, 0)), "does not fit"),
        (weights(json.dumps(TENSORS).encode()[:-1] + b', "a": 1, "a": 2}'), "'a' is there twice"),
        (weights({**TENSORS, "x": {**TENSORS[LAST], "shape": [1 << 62] * 33}}), "does not fit"),
        (weights(b'{"a":' * 200 + b"1" + b"}" * 200), "nested too deeply"),
        (
            (1 << 40).to_bytes(8, "little") + b"{}",
            "header of 1099511627776 bytes, expected at most",
        ),
        (b"", "header of 0 bytes"),
    ],
)
def test_bad_weights_are_refused(model: Path, content: bytes, said: str) -> None:
    path = model / WEIGHTS_FILE
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        read_safetensors_header(path)
    assert caught.value.field == str(path)
    with pytest.raises(ConfigError):
        resolve_model(str(model))


@pytest.mark.parametrize(
    "file",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "sub/w.safetensors",
        "..safetensors/../w.safetensors",
        "pytorch_model.bin",
        ".safetensors",
        "w.safetensors\n",
        7,
    ],
)
def test_an_index_names_only_files_beside_it(model: Path, file: Any) -> None:
    (model.parent / "secret.safetensors").write_bytes(WEIGHTS)
    (model / INDEX_FILE).write_text(json.dumps({"weight_map": dict.fromkeys(TENSORS, file)}))
    with pytest.raises(ConfigError, match=r"expected the name of a \.safetensors file"):
        resolve_model(str(model))


@pytest.mark.parametrize("name", ["config.json", WEIGHTS_FILE, "tokenizer.json", "x.safetensors"])
def test_a_link_that_leads_out_is_refused(model: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes((model / name).read_bytes() if (model / name).exists() else b"{}")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(outside)
    for resolve in (resolve_model, resolve_tokenizer):
        with pytest.raises(ConfigError, match="outside of the model's directory"):
            resolve(str(model))


def test_links_within_and_of_the_hubs_cache_are_taken(model: Path, tmp_path: Path) -> None:
    (model / "real").write_bytes(WEIGHTS)
    (model / WEIGHTS_FILE).unlink()
    (model / WEIGHTS_FILE).symlink_to("real")
    resolve_model(str(model))
    repo = tmp_path / "models--a--b"
    (repo / "snapshots").mkdir(parents=True)
    (repo / "blobs").mkdir()
    snapshot = model.rename(repo / "snapshots" / "c0ffee")
    (snapshot / "real").rename(repo / "blobs" / "1")
    (snapshot / WEIGHTS_FILE).unlink()
    (snapshot / WEIGHTS_FILE).symlink_to("../../blobs/1")
    resolve_model(str(snapshot))
    (tmp_path / "blobs2").write_bytes(WEIGHTS)
    (snapshot / WEIGHTS_FILE).unlink()
    (snapshot / WEIGHTS_FILE).symlink_to(tmp_path / "blobs2")
    with pytest.raises(ConfigError, match="outside of the model's directory"):
        resolve_model(str(snapshot))


@pytest.mark.timeout(60)
def test_a_pipe_is_not_waited_for(model: Path) -> None:
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    with pytest.raises(ConfigError, match="not a regular file"):
        resolve_model(str(model))
    with pytest.raises(ConfigError, match="not a regular file"):
        read_model_dir(model)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "pytorch_model.bin.index.json"])
def test_pickle_is_named_and_never_read(model: Path, name: str) -> None:
    (model / WEIGHTS_FILE).unlink()
    (model / name).write_bytes(b"\x80\x04c__builtin__\nexit\n.")
    with pytest.raises(ConfigError, match=f"{name} may hold Python's pickle"):
        resolve_model(str(model))
    with pytest.raises(MeshError, match="weights in other formats are not read"):
        load_shard(model, read_model_dir(model), LayerRange(0, 2))
    if not name.endswith("json"):
        with pytest.raises(ConfigError, match="pickle can run code and is never read"):
            parse_source(str(model / name))


@pytest.mark.parametrize("model_type", ["llama", "own-code"])
def test_code_of_a_model_is_not_run(model: Path, tmp_path: Path, model_type: str) -> None:
    mark = tmp_path / "mark"
    for module in ("configuration_own", "modeling_own"):
        (model / f"{module}.py").write_text(MARK.format(str(mark)))
    auto_map = {
        "AutoConfig": "configuration_own.OwnConfig",
        "AutoModelForCausalLM": "modeling_own.OwnModel",
    }
    (model / "config.json").write_text(
        json.dumps({**CONFIG, "model_type": model_type, "auto_map": auto_map})
    )
    with pytest.raises(MeshError):  # the tiny file lacks most weights
        load_shard(model, read_model_dir(model), LayerRange(0, 2), allow_unverified=True)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_hidden_layers", 10**9), ("hidden_size", 10**12), ("vocab_size", 10**30)],
)
def test_dimensions_without_bound_are_refused(model: Path, field: str, value: int) -> None:
    (model / "config.json").write_text(json.dumps({**CONFIG, field: value}))
    with pytest.raises(ConfigError, match=f"{field} is {value}, expected a positive integer"):
        resolve_model(str(model))


def gguf(values: list[bytes], tensors: list[bytes], data: int) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values) + 1)
    head += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    head += b"".join(values) + b"".join(tensors)
    return head + bytes(-len(head) % 32 + data)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def tensor(name: str, offset: int) -> bytes:
    return text(name) + struct.pack("<IQIQ", 1, 8, 0, offset)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (gguf([], [tensor("a", 0), tensor("b", 16)], 64), "'b' at offset .* overlaps 'a'"),
        (gguf([], [tensor("a", 0), tensor("a", 32)], 64), "used twice"),
        (
            gguf([text("k") + struct.pack("<IB", 0, 1)] * 2, [], 0),
            "metadata key 'k' is there twice",
        ),
        (gguf([text("k") + struct.pack("<IIQ", 9, 0, 5_000_000)], [], 5_000_000), "of an array"),
        (gguf([], [tensor("a", 1 << 40)], 64), "truncated GGUF file"),
    ],
)
def test_bad_gguf_files_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_header(path)


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_a_gguf_file_is_a_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    path = tmp_path / "model.gguf"
    make(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_header(path)
