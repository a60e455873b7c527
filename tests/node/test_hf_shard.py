"""What a shard takes and gives, what it refuses, and what stays when it fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import JambaConfig

from meshnet.errors import Code, MeshError
from meshnet.grammar import Want
from meshnet.topology import LayerRange
from meshnet_node.hf.cache import SessionCache
from meshnet_node.hf.exact import save_random_model
from meshnet_node.hf.shard import TransformersShard
from meshnet_node.hf.tensor import from_torch, to_torch
from meshnet_node.hf.tiny import tiny_config
from tests.node.tiny import VOCAB, save_tiny

HIDDEN, LOGITS, NONE = Want("hidden"), Want("logits"), Want("none")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama-tied", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def whole(directory: Path) -> TransformersShard:
    return load(directory, 0, 5)


@pytest.fixture(scope="module")
def middle(directory: Path) -> TransformersShard:
    return load(directory, 1, 4)


def load(directory: Path, start: int, end: int, **options: Any) -> TransformersShard:
    return TransformersShard(
        directory, LayerRange(start, end), model="tiny", digest="d1", threads=1, **options
    )


def ids(count: int, start: int = 5) -> npt.NDArray[np.int32]:
    return np.arange(start, start + count, dtype=np.int32)[None] % VOCAB


def states(count: int, seed: int = 0) -> npt.NDArray[Any]:
    values = np.random.default_rng(seed).standard_normal((1, count, 64), np.float32)
    return values.astype(ml_dtypes.bfloat16)


def run(
    shard: TransformersShard, cache: SessionCache, tensor: npt.NDArray[Any], want: Want = HIDDEN
) -> Any:
    return shard.forward(cache, tensor, layers=shard.spec.layers, want=want)


# --- the spec ---------------------------------------------------------------------------


def test_spec_says_what_is_held(whole: TransformersShard, middle: TransformersShard) -> None:
    spec = middle.spec
    assert (spec.model, spec.digest, spec.layers) == ("tiny", "d1", LayerRange(1, 4))
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size) == (5, 64, 0)
    assert not spec.holds_embedding
    assert not spec.holds_head
    # 3 layers, keys and values, 2 heads of 16, 2 bytes
    assert spec.cache_bytes_per_token == 3 * 2 * 2 * 16 * 2
    assert whole.spec.vocab_size == VOCAB
    assert whole.spec.holds_embedding
    assert whole.spec.holds_head


@pytest.mark.parametrize(
    ("start", "end", "kept"), [(0, 2, True), (2, 4, False), (2, 5, True)], ids=str
)
def test_a_shard_has_only_its_layers_tensors(
    directory: Path, start: int, end: int, kept: bool
) -> None:
    shard = load(directory, start, end)
    names = {name for name, _ in shard._shard.model.named_parameters(remove_duplicate=False)}
    layers = {name.split(".")[2] for name in names if name.startswith("model.layers.")}
    assert layers == {str(index) for index in range(end - start)}
    assert ("model.embed_tokens.weight" in names) == kept


# --- the bfloat16 bridge ----------------------------------------------------------------


def test_numpy_to_torch_shares_memory() -> None:
    array = states(3)
    tensor = to_torch(array)
    assert tensor.data_ptr() == array.ctypes.data
    array[0, 1, 2] = 7.0
    assert float(tensor[0, 1, 2]) == 7.0


def test_torch_to_numpy_shares_memory() -> None:
    tensor = torch.randn(1, 3, 64).to(torch.bfloat16)
    array = from_torch(tensor)
    assert array.dtype == ml_dtypes.bfloat16
    assert array.ctypes.data == tensor.data_ptr()


def test_read_only_memory_is_never_handed_to_torch() -> None:
    array = np.frombuffer(states(3).tobytes(), ml_dtypes.bfloat16).reshape(1, 3, 64)
    tensor = to_torch(array)
    assert tensor.data_ptr() != array.ctypes.data
    assert torch.equal(tensor, to_torch(array.copy()))


# --- what a forward answers -------------------------------------------------------------


def test_each_want_has_its_shape(whole: TransformersShard) -> None:
    hidden, logits, nothing = (
        run(whole, whole.open_cache(), ids(7), want) for want in (HIDDEN, LOGITS, NONE)
    )
    assert (hidden.shape, hidden.dtype) == ((1, 7, 64), ml_dtypes.bfloat16)
    assert (logits.shape, logits.dtype) == ((1, 1, VOCAB), np.float32)
    assert nothing is None


def test_top_is_the_head_of_the_logits_and_their_log_sum(whole: TransformersShard) -> None:
    logits = run(whole, whole.open_cache(), ids(7), LOGITS)[0, 0]
    top = run(whole, whole.open_cache(), ids(7), Want("top", 5))
    assert (top.shape, top.dtype) == ((1, 6, 2), np.float32)
    order = np.argsort(-logits, kind="stable")[:5]
    assert sorted(top[0, :5, 0].astype(int)) == sorted(order)
    np.testing.assert_array_equal(top[0, :5, 1], logits[order])
    assert top[0, 5, 0] == -1
    np.testing.assert_allclose(top[0, 5, 1], np.log(np.exp(logits.astype(float)).sum()), rtol=1e-6)


def test_want_none_fills_the_cache_as_logits_do(whole: TransformersShard) -> None:
    caches = [whole.open_cache(), whole.open_cache()]
    run(whole, caches[0], ids(7), NONE)
    run(whole, caches[1], ids(7), LOGITS)
    assert [cache.length for cache in caches] == [7, 7]
    first, second = (run(whole, cache, ids(1, 40), LOGITS) for cache in caches)
    np.testing.assert_array_equal(first, second)


def test_want_none_does_not_run_the_head(directory: Path) -> None:
    shard = load(directory, 2, 5)
    calls: list[int] = []
    shard._shard.model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    cache = shard.open_cache()
    run(shard, cache, states(4), NONE)
    assert calls == []
    run(shard, cache, states(1), LOGITS)
    assert calls == [1]


def test_the_callers_array_is_left_as_it_was(middle: TransformersShard) -> None:
    given = states(6)
    before = given.copy()
    run(middle, middle.open_cache(), given)
    np.testing.assert_array_equal(given, before)


def test_float32_arithmetic_still_gives_bfloat16(directory: Path) -> None:
    exact, rounded = load(directory, 1, 4, dtype="float32"), load(directory, 1, 4)
    assert exact.spec.cache_bytes_per_token == 2 * rounded.spec.cache_bytes_per_token
    a, b = (run(shard, shard.open_cache(), states(5)) for shard in (exact, rounded))
    assert a.dtype == b.dtype == ml_dtypes.bfloat16
    error = np.abs(a.astype(np.float32) - b.astype(np.float32)).max()
    assert 0 < error < 0.1 * np.abs(b.astype(np.float32)).max()


# --- what a forward refuses, the cache unchanged ----------------------------------------

BAD_AT_START: dict[str, tuple[Any, LayerRange, Want, str]] = {
    "hidden states at layer 0": (states(2), LayerRange(0, 5), HIDDEN, "X-Meshnet-Dtype"),
    "int64 ids": (ids(2).astype(np.int64), LayerRange(0, 5), HIDDEN, "X-Meshnet-Dtype"),
    "batch of 2": (np.zeros((2, 3), np.int32), LayerRange(0, 5), HIDDEN, "X-Meshnet-Shape"),
    "one dimension": (np.zeros(3, np.int32), LayerRange(0, 5), HIDDEN, "X-Meshnet-Shape"),
    "no token": (np.zeros((1, 0), np.int32), LayerRange(0, 5), HIDDEN, "X-Meshnet-Shape"),
    "negative id": (-ids(2), LayerRange(0, 5), HIDDEN, "body"),
    "id past the vocabulary": (ids(1, 5) + VOCAB, LayerRange(0, 5), HIDDEN, "body"),
    "top-0": (ids(2), LayerRange(0, 5), Want("top", 0), "X-Meshnet-Want"),
    "top past the vocabulary": (ids(2), LayerRange(0, 5), Want("top", 129), "X-Meshnet-Want"),
    "logits before the end": (ids(2), LayerRange(0, 4), LOGITS, "X-Meshnet-Want"),
    "layers not held": (ids(2), LayerRange(0, 6), HIDDEN, "X-Meshnet-Layers"),
    "ids after layer 0": (ids(2), LayerRange(1, 5), HIDDEN, "X-Meshnet-Dtype"),
    "too narrow": (states(2)[..., :32], LayerRange(1, 5), HIDDEN, "X-Meshnet-Shape"),
}


@pytest.mark.parametrize("name", BAD_AT_START)
def test_bad_input_is_refused_by_name(name: str, whole: TransformersShard) -> None:
    tensor, layers, want, field = BAD_AT_START[name]
    cache = whole.open_cache()
    run(whole, cache, ids(3), NONE)
    with pytest.raises(MeshError) as caught:
        whole.forward(cache, tensor, layers=layers, want=want)
    assert (caught.value.code, caught.value.field) == (Code.INVALID_ARGUMENT, field)
    assert "expected" in caught.value.message
    assert cache.length == 3


def test_a_session_longer_than_the_model_takes_is_refused(whole: TransformersShard) -> None:
    cache = whole.open_cache()
    run(whole, cache, np.ones((1, 512), np.int32), NONE)
    with pytest.raises(MeshError, match="takes 512") as caught:
        run(whole, cache, ids(1), NONE)
    assert (caught.value.code, caught.value.reason) == (Code.OUT_OF_RANGE, "CONTEXT_FULL")
    assert cache.length == 512


def test_a_session_cannot_change_its_layers(middle: TransformersShard) -> None:
    cache = middle.open_cache()
    middle.forward(cache, states(2), layers=LayerRange(1, 3), want=HIDDEN)
    with pytest.raises(MeshError, match="of layers 1-3 here") as caught:
        middle.forward(cache, states(1), layers=LayerRange(2, 4), want=HIDDEN)
    assert caught.value.field == "X-Meshnet-Layers"
    cache.truncate(0)
    middle.forward(cache, states(1), layers=LayerRange(2, 4), want=HIDDEN)
    assert cache.length == 1


# --- the cache --------------------------------------------------------------------------


@pytest.mark.parametrize("length", [-1, 5])
def test_truncation_outside_the_cache_is_refused(middle: TransformersShard, length: int) -> None:
    cache = middle.open_cache()
    run(middle, cache, states(4))
    with pytest.raises(MeshError, match=f"of 4 tokens to {length}"):
        cache.truncate(length)
    assert cache.length == 4


def test_a_cache_grows_past_its_first_block(middle: TransformersShard) -> None:
    """One session in one piece, one in two with a truncation across the border of a block."""
    tensor = states(300)
    cache, other = middle.open_cache(), middle.open_cache()
    run(middle, cache, tensor[:, :200])
    run(middle, cache, tensor[:, 200:])
    run(middle, other, tensor[:, :200])
    run(middle, other, states(100, seed=9))
    other.truncate(200)
    run(middle, other, tensor[:, 200:])
    np.testing.assert_array_equal(
        run(middle, cache, states(1, 2)), run(middle, other, states(1, 2))
    )


def test_sessions_do_not_touch_each_other(middle: TransformersShard) -> None:
    alone, shared, other = (middle.open_cache() for _ in range(3))
    expected = [run(middle, alone, states(3, seed)) for seed in range(3)]
    for seed in range(3):
        given = run(middle, shared, states(3, seed))
        run(middle, other, states(5, seed + 10))
        np.testing.assert_array_equal(given, expected[seed])


def test_a_failed_forward_leaves_the_cache_unchanged(directory: Path) -> None:
    shard = load(directory, 1, 4)
    cache, untouched = shard.open_cache(), shard.open_cache()
    for each in (cache, untouched):
        run(shard, each, states(4))
    hook = shard._shard.model.model.layers[2].mlp.register_forward_hook(fail)
    with pytest.raises(MeshError, match="1-4 failed on 2 tokens at position 4") as caught:
        run(shard, cache, states(2, 1))
    assert (caught.value.code, caught.value.reason) == (Code.INTERNAL, "COMPUTE_FAILED")
    hook.remove()
    assert cache.length == 4
    np.testing.assert_array_equal(
        run(shard, cache, states(3, 2)), run(shard, untouched, states(3, 2))
    )


def fail(*_: Any) -> None:
    raise RuntimeError("planted")


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory: pytest.TempPathFactory) -> TransformersShard:
    """Jamba: most layers keep a state that has no earlier tokens to go back to."""
    directory = save_random_model(tiny_config(JambaConfig), tmp_path_factory.mktemp("jamba"))
    return load(directory, 2, 6)


def test_a_recurrent_state_cannot_be_truncated_but_to_nothing(
    recurrent: TransformersShard,
) -> None:
    cache = recurrent.open_cache()
    first = run(recurrent, cache, states(4))
    with pytest.raises(MeshError, match="from token 4 to 3") as caught:
        cache.truncate(3)
    assert caught.value.code is Code.FAILED_PRECONDITION
    assert caught.value.reason == "CACHE_NOT_TRUNCATABLE"
    assert cache.length == 4
    cache.truncate(0)
    np.testing.assert_array_equal(run(recurrent, cache, states(4)), first)


def test_a_failed_forward_empties_a_recurrent_cache(recurrent: TransformersShard) -> None:
    cache = recurrent.open_cache()
    first = run(recurrent, cache, states(4))
    hook = recurrent._shard.model.model.layers[3].register_forward_hook(fail)
    with pytest.raises(MeshError, match="planted"):
        run(recurrent, cache, states(1))
    hook.remove()
    assert cache.length == 0
    np.testing.assert_array_equal(run(recurrent, cache, states(4)), first)
