"""Seeded inputs, sketches, and how reports are judged."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from meshnet.probes import (
    HEAD,
    SKETCH_SIZE,
    TOKENS,
    WHOLE,
    PartReference,
    PartReport,
    Reference,
    Report,
    hidden_input,
    judge,
    layer_part,
    make_sketch,
    part_reference,
    token_input,
    tolerance,
)
from meshnet.topology import LayerRange

HIDDEN_INPUT = "68dfa679589ba698"
TOKEN_INPUT = "ae660e5e32312b20"
SKETCH = "99774bc2cf5f82f7"

WIDTH = 48
LAYERS = LayerRange(1, 3)


def _output(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((1, TOKENS, WIDTH)).astype(np.float32)


def _digest(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _rounded(values: np.ndarray) -> np.ndarray:
    return values.astype(ml_dtypes.bfloat16).astype(np.float32)


EXACT = {layer_part(layer): _output(layer) for layer in range(4)} | {HEAD: _output(9)}
REFERENCE = Reference(
    "tiny",
    "0" * 64,
    4,
    {
        dtype: {
            name: part_reference(
                b"" if name == HEAD else _digest(name),
                _rounded(values) if dtype == "bfloat16" else values,
                values,
                None,
            )
            for name, values in EXACT.items()
        }
        | {"embedding": PartReference(_digest("embedding"))}
        for dtype in ("bfloat16", "float32")
    },
)


def _report(layers: LayerRange = LAYERS, dtype: str = "bfloat16", **parts: PartReport) -> Report:
    names = [layer_part(layer) for layer in range(layers.start, layers.end)]
    names += [HEAD] if layers.end == 4 else []
    variant = REFERENCE.variants[dtype]
    found = {name: PartReport(variant[name].digest, variant[name].sketch) for name in names}
    found[WHOLE] = PartReport(sketch=make_sketch(EXACT[HEAD]), against=make_sketch(EXACT[HEAD]))
    return Report(dtype, found | {name.replace("_", "."): part for name, part in parts.items()})


def test_inputs_are_the_same_everywhere():
    # Nodes and references of other machines must agree on them for good.
    assert hashlib.sha256(hidden_input(7, 64).tobytes()).hexdigest()[:16] == HIDDEN_INPUT
    assert hashlib.sha256(token_input(128).tobytes()).hexdigest()[:16] == TOKEN_INPUT
    assert hashlib.sha256(make_sketch(np.arange(1000.0)).tobytes()).hexdigest()[:16] == SKETCH


def test_inputs_differ_by_layer_and_span_a_hundredfold():
    one, other = (hidden_input(layer, 64).astype(np.float32) for layer in (1, 2))
    assert one.shape == (1, TOKENS, 64)
    assert not np.array_equal(one, other)
    sizes = np.sqrt((one[0] ** 2).mean(axis=1))
    assert sizes.min() < 2e-3
    assert sizes.max() > 5e-2
    ids = token_input(100)
    assert ids.shape == (1, TOKENS)
    assert ids.dtype == np.int32
    assert ids.min() >= 0
    assert ids.max() < 100


@pytest.mark.parametrize("size", [1, 63, 5000])
def test_the_distance_of_sketches_is_that_of_what_they_are_of(size):
    rng = np.random.default_rng(size)
    ratios = []
    for _ in range(50):
        one, other = rng.standard_normal((2, size))
        distance = np.linalg.norm(make_sketch(one) - make_sketch(other))
        ratios.append(distance / np.linalg.norm(one - other))
    assert make_sketch(one).shape == (SKETCH_SIZE,)
    assert 0.85 < np.sqrt(np.mean(np.square(ratios))) < 1.15


def test_one_value_that_changed_shows_in_full():
    values = _output(1)
    changed = values.copy()
    changed[0, 3, 5] += 2.5
    assert np.linalg.norm(make_sketch(changed) - make_sketch(values)) == pytest.approx(2.5, 1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("layers", [LayerRange(0, 4), LAYERS, LayerRange(3, 4)])
def test_what_matches_is_let_pass(layers, dtype):
    verdict = judge(_report(layers, dtype), REFERENCE, layers, head=layers.end == 4)
    assert (verdict.reason, verdict.worst) == ("", 0.0)


def test_other_rounding_is_let_pass_and_its_share_is_told():
    part = REFERENCE.variants["bfloat16"]["layer.1"]
    values = EXACT["layer.1"]
    noise = np.random.default_rng(0).standard_normal(values.shape)
    off = values + noise * part.noise * np.sqrt(np.mean(values**2))
    found = PartReport(_digest("layer.1"), make_sketch(off))
    verdict = judge(_report(layer_1=found), REFERENCE, LAYERS, head=False)
    assert verdict.reason == ""
    assert 0.2 < verdict.worst < 0.95
    assert tolerance(part) < 0.02


BAD = PartReport(_digest("layer.1"), make_sketch(EXACT["layer.2"]))
NAN = PartReport(_digest("layer.1"), np.full(SKETCH_SIZE, np.nan, np.float32))
HUGE = PartReport(_digest("layer.1"), np.full(SKETCH_SIZE, 3e38, np.float32))
GOOD_SKETCH = REFERENCE.variants["bfloat16"]["layer.1"].sketch


@pytest.mark.parametrize(
    ("report", "reason", "message"),
    [
        (_report(layer_1=BAD), "NUMBERS", "layer.1 computes something else"),
        (_report(layer_1=NAN), "NUMBERS", "off by nan"),
        (_report(layer_1=HUGE), "NUMBERS", "layer.1"),
        (_report(layer_1=PartReport(_digest("x"), GOOD_SKETCH)), "WEIGHTS", "layer.1 are not"),
        (_report(layer_1=PartReport(b"", GOOD_SKETCH)), "WEIGHTS", "layer.1 are not"),
        (_report(layer_1=PartReport(_digest("layer.1"))), "INCOMPLETE", "layer.1"),
        (_report(LayerRange(2, 3)), "INCOMPLETE", "layer.1"),
        (_report(embedding=PartReport(_digest("x"))), "WEIGHTS", "embedding are not"),
        (_report(adapter=PartReport(_digest("x"))), "WEIGHTS", "named adapter"),
        (_report(whole=PartReport()), "INCOMPLETE", "whole"),
        (_report(whole=PartReport(sketch=GOOD_SKETCH)), "INCOMPLETE", "whole"),
        (
            _report(whole=PartReport(sketch=GOOD_SKETCH, against=make_sketch(_output(5)))),
            "NUMBERS",
            "the shard as a whole",
        ),
        (replace(_report(), dtype="float16"), "DTYPE", "'float16'"),
        (replace(_report(), version=99), "VERSION", "99"),
        (Report("bfloat16", problem="no memory"), "PROBE_FAILED", "no memory"),
    ],
)
def test_what_does_not_match_is_named(report, reason, message):
    verdict = judge(report, REFERENCE, LAYERS, head=False)
    assert verdict.reason == reason
    assert message in verdict.message


def test_what_a_node_holds_against_itself_does_not_count_beside_a_reference():
    assert judge(replace(_report(), problem="changed"), REFERENCE, LAYERS, head=False).reason == ""


def test_a_shard_with_a_head_must_show_it():
    verdict = judge(_report(LAYERS), REFERENCE, LAYERS, head=True)
    assert (verdict.reason, verdict.message) == ("INCOMPLETE", "says nothing of head")


def test_a_float32_node_is_held_to_less():
    bfloat16 = REFERENCE.variants["bfloat16"]["layer.1"].sketch
    found = PartReport(_digest("layer.1"), bfloat16 * np.float32(1.01))
    verdict = judge(_report(dtype="float32", layer_1=found), REFERENCE, LAYERS, head=False)
    assert verdict.reason == "NUMBERS"
