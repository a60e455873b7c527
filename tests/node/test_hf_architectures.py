"""Shards of real architectures give, bit for bit, what the model gives in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from meshnet.grammar import Want
from meshnet.topology import LayerRange
from meshnet_node.hf.exact import ShardedModel, WholeModel, find_difference, three_cuts
from meshnet_node.hf.layers import SlidingLayer
from meshnet_node.hf.skeleton import find_layers
from tests.node.tiny import TINY, VOCAB, save_tiny

CUTS = three_cuts(5)


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


def prompt(tokens: int = 40, seed: int = 3) -> torch.Tensor:
    return torch.randint(3, VOCAB, (1, tokens), generator=torch.Generator().manual_seed(seed))


def decode(model: Any, ids: torch.Tensor, steps: int) -> list[torch.Tensor]:
    """Feed a prompt in chunks of 16, then `steps` greedy tokens; gives the logits of each step."""
    logits = [model.step(chunk) for chunk in torch.split(ids, 16, dim=1)][-1:]
    for _ in range(steps):
        logits.append(model.step(logits[-1].argmax(-1)))
    return logits


@pytest.mark.parametrize("directory", TINY, indirect=True)
def test_three_shards_equal_the_whole_model(directory: Path) -> None:
    assert find_difference(directory, prompt_tokens=40, chunk_tokens=16, decode_steps=20) == ""


@pytest.mark.parametrize("directory", TINY, indirect=True)
def test_decoding_again_after_truncation_gives_the_same_logits(directory: Path) -> None:
    sharded = ShardedModel(directory, CUTS)
    logits = decode(sharded, prompt(), 10)
    sharded.truncate(45)
    assert [cache.length for cache in sharded.caches] == [45, 45, 45]
    again = [sharded.step(logits[index].argmax(-1)) for index in range(5, 10)]
    assert all(torch.equal(*pair) for pair in zip(again, logits[6:], strict=True))


def test_a_window_that_slid_past_can_be_cut_back_to_its_start(tmp_path: Path) -> None:
    directory = save_tiny("mistral", tmp_path)
    sharded, whole = ShardedModel(directory, CUTS), WholeModel(directory)
    decode(sharded, prompt(seed=4), 10)
    sharded.truncate(16)
    other = torch.cat([prompt(seed=4)[:, :16], prompt(seed=5)], 1)
    for chunk in torch.split(other[:, 16:], 16, dim=1):
        given = sharded.step(chunk)
    assert torch.equal(given, [whole.step(chunk) for chunk in torch.split(other, 16, dim=1)][-1])


def test_a_wrong_window_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_tiny("mistral", tmp_path)
    monkeypatch.setattr(SlidingLayer, "_first_visible", lambda self, start: max(0, start - 5))
    assert "differ" in find_difference(directory)


def test_wrong_weights_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = save_tiny("llama", tmp_path)
    step = ShardedModel.step

    def disturbed(self: ShardedModel, ids: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.shards[1]._shard.model.model.layers[0].mlp.up_proj.weight[0, 0] += 1
        return step(self, ids)

    monkeypatch.setattr(ShardedModel, "step", disturbed)
    assert "differ" in find_difference(directory)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "qwen3_moe"])
def test_float32_differs_from_the_whole_model_only_by_rounding_at_the_borders(
    family: str, tmp_path: Path
) -> None:
    directory = save_tiny(family, tmp_path, dtype=torch.float32)
    whole, rounded = (WholeModel(directory, torch.float32) for _ in range(2))
    _, owner, name = find_layers(rounded.model, 5)
    for layers in CUTS[:-1]:
        getattr(owner, name)[layers.end - 1].register_forward_hook(round_output)
    sharded = ShardedModel(directory, CUTS, dtype="float32")
    given, same, plain = (decode(model, prompt(), 0)[0] for model in (sharded, rounded, whole))
    assert torch.equal(given, same)
    assert not torch.equal(given, plain)
    assert kl_divergence(plain, given) < 1e-3


def round_output(_: torch.nn.Module, __: tuple[Any, ...], output: Any) -> Any:
    states = output[0] if isinstance(output, tuple) else output
    near = states.to(torch.bfloat16).to(states.dtype)
    return (near, *output[1:]) if isinstance(output, tuple) else near


def kl_divergence(reference: torch.Tensor, given: torch.Tensor) -> float:
    p, q = reference.log_softmax(-1), given.log_softmax(-1)
    return float((p.exp() * (p - q)).sum())


def test_overlapping_shards_run_any_sub_range_for_each_session(tmp_path: Path) -> None:
    """Two shards, 0-3 and 2-5, serve two routes at once, cut at different layers."""
    directory = save_tiny("gemma3", tmp_path)
    whole = WholeModel(directory)
    expected = decode(whole, prompt(), 6)
    shards = ShardedModel(directory, (LayerRange(0, 3), LayerRange(2, 5))).shards
    routes = [Route(shards, cut) for cut in (2, 3)]
    for chunk in torch.split(prompt(), 16, dim=1):
        given = [route.step(chunk) for route in routes]
    for index in range(6):
        assert all(torch.equal(logits, expected[index]) for logits in given)
        given = [route.step(expected[index].argmax(-1)) for route in routes]
    assert all(torch.equal(logits, expected[6]) for logits in given)


class Route(ShardedModel):
    """One session on two shards that already exist, cut at a layer that both may hold."""

    def __init__(self, shards: list[Any], cut: int) -> None:
        self.shards = shards
        self.caches = [shard.open_cache() for shard in shards]
        self.layers = (LayerRange(0, cut), LayerRange(cut, 5))

    def step(self, ids: torch.Tensor) -> torch.Tensor:
        values: Any = ids.numpy().astype("int32")
        for shard, cache, layers in zip(self.shards, self.caches, self.layers, strict=True):
            want = Want("logits" if layers.end == 5 else "hidden")
            values = shard.forward(cache, values, layers=layers, want=want)
        return torch.from_numpy(values)
