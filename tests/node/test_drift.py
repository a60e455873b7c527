"""What a node holds against its own numbers, without a reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from meshnet.probes import PartReport, Report, hidden_input, make_sketch
from meshnet_node.drift import Drift

HIDDEN = 64
_RNG = np.random.default_rng(0)
INPUT = hidden_input(3, HIDDEN).astype(np.float64)
ADDED = _RNG.standard_normal(INPUT.shape) * 1e-3
"""What the layer adds is small beside its input, as it is in the first layers of a model."""


def _part(added=ADDED, digest=b"a" * 32):
    return PartReport(digest, make_sketch(INPUT + added))


FIRST = {
    "embedding": PartReport(b"e" * 32),
    "layer.3": _part(),
    "head": PartReport(sketch=make_sketch(_RNG.standard_normal(100))),
    "whole": PartReport(sketch=make_sketch(INPUT), against=make_sketch(INPUT)),
}
OFF = make_sketch(_RNG.standard_normal(INPUT.shape))


@pytest.fixture
def drift():
    made = Drift(HIDDEN)
    assert made.find(FIRST) == ""
    return made


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"layer.3": _part(ADDED * 1.05)},  # a rounding, however bad
    ],
)
def test_what_is_as_before_is_let_pass(drift, changed):
    assert drift.find(FIRST | changed) == ""


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"layer.3": _part(digest=b"b" * 32)}, "the weights of layer.3 have changed in memory"),
        ({"embedding": PartReport(b"b" * 32)}, "the weights of embedding have changed in memory"),
        ({"adapter": PartReport(b"b" * 32)}, "the weights of adapter have changed in memory"),
        ({"layer.3": _part(ADDED * 1.3)}, "layer.3 computes something else than before: off by"),
        ({"layer.3": _part(ADDED * np.nan)}, "off by nan"),
        ({"head": PartReport(sketch=OFF)}, "head computes something else"),
        ({"whole": replace(FIRST["whole"], sketch=OFF)}, "whole computes something else"),
        ({"whole": replace(FIRST["whole"], against=OFF)}, "whole computes something else"),
    ],
)
def test_what_has_changed_is_named_until_it_is_trusted(drift, changed, said):
    found = FIRST | changed
    assert said in drift.find(found)
    if "nan" in said:
        return
    drift.trust(Report("bfloat16", found))
    assert drift.find(found) == ""
    if "adapter" not in changed:
        assert drift.find(FIRST) != ""
