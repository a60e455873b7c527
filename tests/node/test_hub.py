"""Hub names: only the files of the shard's layers travel; the result loads."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from meshnet.errors import Code, ConfigError, MeshError
from meshnet.model_dir import read_model_dir
from meshnet.model_hub import resolve_tokenizer
from meshnet.topology import LayerRange
from meshnet_node.hf.load import load_shard
from meshnet_node.hf.shard import TransformersShard
from meshnet_node.model_files import resolve_model
from tests.node.fake_hub import FakeHub, serve_hub
from tests.node.tiny import save_tiny

REPO = "acme/tiny-llama"
NUM_LAYERS = 6


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama in the shape of a published model, several weight files."""
    directory = tmp_path_factory.mktemp("published")
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory, max_shard_size="80KB")
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "README.md").write_text("a model")
    assert len(list(directory.glob("*.safetensors"))) >= NUM_LAYERS
    return directory


@pytest.fixture
def hub(model_dir: Path) -> Iterator[FakeHub]:
    with serve_hub(REPO, model_dir) as server:
        yield server


def caches(root: Path) -> dict[str, Path]:
    """Keep what the test caches below `root`."""
    return {"cache_dir": root, "hub_cache": root / "hub"}


def files_of(model_dir: Path, *fragments: str) -> set[str]:
    """The weight files with a tensor whose name holds one of the fragments."""
    weight_map = resolve_index(model_dir)
    return {
        file for tensor, file in weight_map.items() if any(part in tensor for part in fragments)
    }


def resolve_index(model_dir: Path) -> dict[str, str]:
    index = json.loads((model_dir / "model.safetensors.index.json").read_text())
    weight_map: dict[str, str] = index["weight_map"]
    return weight_map


@pytest.mark.parametrize(
    ("layers", "fragments"),
    [
        (LayerRange(0, 2), ["embed_tokens", "layers.0.", "layers.1."]),
        (LayerRange(2, 4), ["layers.2.", "layers.3."]),
        (LayerRange(4, 6), ["layers.4.", "layers.5.", "model.norm", "lm_head"]),
    ],
)
def test_only_needed_weight_files_are_fetched(
    hub: FakeHub, model_dir: Path, tmp_path: Path, layers: LayerRange, fragments: list[str]
) -> None:
    files = resolve_model(REPO, layers, endpoint=hub.endpoint, **caches(tmp_path))

    expected = files_of(model_dir, *fragments)
    assert expected < set(resolve_index(model_dir).values())
    assert hub.fetched(".safetensors") == expected
    assert "README.md" not in hub.fetched()
    assert files.name == REPO
    assert set(files.weight_files) == expected
    assert files.digest == resolve_model(str(model_dir)).digest


def test_shards_load_from_what_was_fetched(hub: FakeHub, model_dir: Path, tmp_path: Path) -> None:
    whole = transformers.LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16)
    for layers in (LayerRange(0, 2), LayerRange(2, 4), LayerRange(4, 6)):
        files = resolve_model(REPO, layers, endpoint=hub.endpoint, **caches(tmp_path / str(layers)))
        shard = load_shard(
            files.directory, read_model_dir(files.directory), layers, allow_unverified=True
        )
        held = list(shard.decoder.layers)
        assert len(held) == len(layers)
        for layer, original in zip(
            held, whole.model.layers[layers.start : layers.end], strict=True
        ):
            for name, value in original.state_dict().items():
                assert torch.equal(layer.state_dict()[name], value)


def test_a_middle_shard_fetches_no_file_of_the_models_ends(
    hub: FakeHub, model_dir: Path, tmp_path: Path
) -> None:
    """The final norm is in the file of the last layer here, as it is in large models."""
    assert files_of(model_dir, "model.norm.") <= files_of(model_dir, "layers.5.")
    resolve_model(REPO, LayerRange(2, 4), endpoint=hub.endpoint, **caches(tmp_path))
    assert hub.fetched(".safetensors") == files_of(model_dir, "layers.2.", "layers.3.")


@pytest.mark.parametrize("family", ["gpt2", "gpt_neox"])
def test_shards_of_other_families_load_from_their_layers_files(family: str, tmp_path: Path) -> None:
    """Their learned positions and final norms have other names, and files of their own here."""
    published = save_tiny(family, tmp_path / "published")
    model = transformers.AutoModelForCausalLM.from_pretrained(published, dtype=torch.bfloat16)
    (published / "model.safetensors").unlink()
    model.save_pretrained(published, max_shard_size="1KB")
    every_layer = re.compile(r"\.(?:h|layers)\.([0-9]+)\.")
    expected = {
        file
        for tensor, file in resolve_index(published).items()
        if (layer := every_layer.search(tensor)) and layer[1] in "23"
    }
    layers = LayerRange(2, 4)
    with serve_hub(REPO, published) as hub:
        files = resolve_model(REPO, layers, endpoint=hub.endpoint, **caches(tmp_path))
        assert hub.fetched(".safetensors") == expected
    shard = TransformersShard(files.directory, layers, model="m", digest="", threads=1)
    assert shard.spec.layers == layers


def test_hub_cache_is_left_as_the_hub_client_made_it(hub: FakeHub, tmp_path: Path) -> None:
    files = resolve_model(REPO, LayerRange(2, 3), endpoint=hub.endpoint, **caches(tmp_path))

    assert files.directory.parent == tmp_path / "views"
    snapshot = tmp_path / "hub" / "models--acme--tiny-llama" / "snapshots" / hub.commit
    published = hub.directory / "model.safetensors.index.json"
    assert (snapshot / published.name).read_bytes() == published.read_bytes()
    assert {path.name for path in snapshot.glob("*.safetensors")} == set(files.weight_files)


def test_second_time_nothing_is_fetched(hub: FakeHub, tmp_path: Path) -> None:
    first = resolve_model(REPO, LayerRange(0, 1), endpoint=hub.endpoint, **caches(tmp_path))
    hub.log.clear()
    second = resolve_model(REPO, LayerRange(0, 1), endpoint=hub.endpoint, **caches(tmp_path))

    assert second == first
    assert hub.fetched() == set()


def test_cached_files_serve_without_a_connection(model_dir: Path, tmp_path: Path) -> None:
    with serve_hub(REPO, model_dir) as hub:
        online = resolve_model(REPO, LayerRange(1, 3), endpoint=hub.endpoint, **caches(tmp_path))
        endpoint = hub.endpoint
    assert resolve_model(REPO, LayerRange(1, 3), endpoint=endpoint, **caches(tmp_path)) == online


def test_unreachable_hub_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(MeshError) as caught:
            resolve_model(REPO, None, endpoint=endpoint, **caches(tmp_path))
    assert caught.value.code is Code.UNAVAILABLE
    assert endpoint in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("source", "said"),
    [("acme/no-such-model", "no such model"), (f"{REPO}@v9", "no revision 'v9'")],
)
def test_unknown_names(hub: FakeHub, tmp_path: Path, source: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve_model(source, None, endpoint=hub.endpoint, **caches(tmp_path))


def test_revision_is_passed_on(hub: FakeHub, tmp_path: Path) -> None:
    source = f"{REPO}@{hub.commit}"
    files = resolve_model(source, None, endpoint=hub.endpoint, **caches(tmp_path))
    assert files.name == REPO
    assert hub.fetched(".safetensors") == set(resolve_index(hub.directory).values())


def test_layers_past_the_end_fetch_no_weights(hub: FakeHub, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="layers 4-9"):
        resolve_model(REPO, LayerRange(4, 9), endpoint=hub.endpoint, **caches(tmp_path))
    assert hub.fetched(".safetensors") == set()


def test_single_file_model_is_fetched_whole(tmp_path: Path) -> None:
    published = tmp_path / "published"
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(published)
    with serve_hub("acme/one-file", published) as hub:
        files = resolve_model(
            "acme/one-file", LayerRange(0, 1), endpoint=hub.endpoint, **caches(tmp_path)
        )
    assert files.weight_files == ("model.safetensors",)
    assert hub.fetched(".safetensors") == {"model.safetensors"}
    assert files.digest == resolve_model(str(published)).digest


def test_tokenizer_alone(hub: FakeHub, tmp_path: Path) -> None:
    files = resolve_tokenizer(REPO, endpoint=hub.endpoint, hub_cache=tmp_path)
    assert (files.directory / "tokenizer.json").is_file()
    assert hub.fetched(".safetensors") == set()
