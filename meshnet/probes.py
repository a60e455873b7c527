"""Probes: what a shard must compute of seeded inputs, and how a report is judged (pure).

Each layer is fed an input that anyone can make from its number, so that a node needs nothing
but its shard to be probed, and any range of layers can be. What comes out is reduced to a
sketch of fixed size (a count sketch: Charikar, Chen and Farach-Colton, 2002): the distance of
two sketches is about that of the outputs. What a report says is compared with a reference
that was made of the whole model; `judge` says what does not match.

Tokens differ in scale by a factor of 100, the smallest near the epsilon of norms: a wrong
epsilon shows as well as a wrong rotation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from meshnet.dtypes import BFLOAT16, numpy_dtype
from meshnet.topology import LayerRange

__all__ = [
    "HEAD",
    "PROBE_VERSION",
    "SKETCH_SIZE",
    "TOKENS",
    "WHOLE",
    "PartReference",
    "PartReport",
    "Reference",
    "Report",
    "Verdict",
    "hidden_input",
    "judge",
    "layer_part",
    "make_sketch",
    "part_reference",
    "token_input",
    "tolerance",
]

PROBE_VERSION: Final = 1
"""Of inputs, sketches and weight digests: reports and references of others are not compared."""

TOKENS: Final = 32
SKETCH_SIZE: Final = 64

HEAD: Final = "head"
"""The last layer, final norm and head on the last layer's input: logits of the last token."""

WHOLE: Final = "whole"
"""All layers of the shard at once, compared with the same layers one by one."""

_SMALLEST, _LARGEST = 1e-3, 1e-1
_NOISE_FACTOR: Final = 2.0
_WHOLE_TOLERANCE: Final = 0.1
_ROUNDING: Final = 2.0**-9
"""Most that rounding to bfloat16 changes a value by, as a part of it."""


@dataclass(frozen=True, slots=True)
class PartReport:
    """What a node found of one part of its shard.

    Attributes:
        digest: SHA-256 of its weights as they lie in memory; empty for a part without.
        sketch: of its output, float32 ``[SKETCH_SIZE]``; None for a part that computes nothing.
        against: sketch that `sketch` is to equal; only for `WHOLE`.
    """

    digest: bytes = b""
    sketch: npt.NDArray[np.float32] | None = None
    against: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """What a probe of a shard gave.

    Attributes:
        dtype: of the weights and the arithmetic: ``bfloat16`` or ``float32``.
        parts: by name: ``layer.N``, `HEAD`, `WHOLE`, and names of tensors beside the layers.
        version: `PROBE_VERSION` of the node.
        problem: without parts, why the probe could not be run; with parts, what the node itself
            found to have changed since an earlier one; else empty.
    """

    dtype: str
    parts: Mapping[str, PartReport] = field(default_factory=dict)
    version: int = PROBE_VERSION
    problem: str = ""


@dataclass(frozen=True, slots=True)
class PartReference:
    """What one part of the model is to give, for one dtype.

    Attributes:
        digest: as in `PartReport`.
        sketch: as in `PartReport`.
        scale: length of what the part adds to its input; deviations are parts of this.
        noise: deviation that computing in this dtype rather than in float32 makes.
        rounding: deviation that rounding the output to bfloat16 can make.
    """

    digest: bytes = b""
    sketch: npt.NDArray[np.float32] | None = None
    scale: float = 0.0
    noise: float = 0.0
    rounding: float = 0.0


@dataclass(frozen=True, slots=True)
class Reference:
    """What a model is to give.

    Attributes:
        model: its name, without ``models/``.
        model_digest: as `meshnet.model_weights.model_digest` gives it.
        num_layers: of the whole model.
        variants: parts by name, by dtype.
        version: `PROBE_VERSION` that it was made with.
    """

    model: str
    model_digest: str
    num_layers: int
    variants: Mapping[str, Mapping[str, PartReference]]
    version: int = PROBE_VERSION


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a comparison.

    Attributes:
        reason: empty if all matches; else WEIGHTS, NUMBERS, DTYPE, INCOMPLETE, VERSION or
            PROBE_FAILED.
        message: for people.
        worst: the largest deviation as a part of what is allowed; 0 if nothing was compared.
    """

    reason: str = ""
    message: str = ""
    worst: float = 0.0


def layer_part(layer: int) -> str:
    """Name the part of a layer."""
    return f"layer.{layer}"


def hidden_input(layer: int, hidden_size: int) -> npt.NDArray[Any]:
    """Make a layer's input: bfloat16 ``[1, TOKENS, hidden_size]``."""
    words = _words(1 + layer, (TOKENS, hidden_size))
    uniform = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53 - 0.5
    order = (np.arange(TOKENS) * 13 + 5) % TOKENS  # each scale once, without a trend
    scales = _SMALLEST * (_LARGEST / _SMALLEST) ** (order / (TOKENS - 1))
    values = uniform * np.sqrt(12.0) * scales[:, None]
    made: npt.NDArray[Any] = values[None].astype(numpy_dtype(BFLOAT16))
    return made


def token_input(vocab_size: int) -> npt.NDArray[np.int32]:
    """Make the first layer's input: token ids, int32 ``[1, TOKENS]``."""
    return (_words(0, (1, TOKENS)) % np.uint64(vocab_size)).astype(np.int32)


def make_sketch(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Reduce values to `SKETCH_SIZE` sums of them with signs, float32.

    Each value is in one sum; which one, and its sign, depend on its place alone.
    """
    flat = np.ravel(values).astype(np.float64)
    words = _words(1 << 32, flat.shape)
    signs = 1.0 - 2.0 * (words >> np.uint64(63)).astype(np.float64)
    places = ((words >> np.uint64(40)) % np.uint64(SKETCH_SIZE)).astype(np.int64)
    sums = np.bincount(places, weights=flat * signs, minlength=SKETCH_SIZE)
    return sums.astype(np.float32)


def part_reference(
    digest: bytes,
    output: npt.NDArray[Any],
    exact: npt.NDArray[Any],
    given: npt.NDArray[Any] | None,
) -> PartReference:
    """Make the reference of a part that computes.

    Args:
        digest: of its weights.
        output: of the part, in the dtype that the reference is of.
        exact: the same computed in float32.
        given: the input where it has the shape of the output, else None.
    """
    exact64 = np.asarray(exact, dtype=np.float64)
    added = exact64 if given is None else exact64 - np.asarray(given, dtype=np.float64)
    scale = float(np.linalg.norm(added)) or 1.0
    noise = float(np.linalg.norm(np.asarray(output, dtype=np.float64) - exact64)) / scale
    rounding = _ROUNDING * float(np.linalg.norm(exact64)) / scale
    return PartReference(digest, make_sketch(output), scale, noise, rounding)


def tolerance(part: PartReference) -> float:
    """Give the largest deviation allowed, as a part of the scale.

    Two machines that compute in the same dtype round at other places: what each is off by is
    about the noise, so that they differ by less than twice that; rounding the output comes on
    top. README states what was measured.
    """
    return _NOISE_FACTOR * part.noise + part.rounding


def judge(report: Report, reference: Reference, layers: LayerRange, *, head: bool) -> Verdict:
    """Compare a report with the reference of the same model digest.

    What the node itself found does not count beside a reference.

    Args:
        report: of the shard.
        reference: of the whole model.
        layers: that the shard is to hold.
        head: whether it is to give logits.
    """
    if report.version != reference.version:
        message = f"probes of version {report.version}; the reference is of {reference.version}"
        return Verdict("VERSION", message)
    if report.problem and not report.parts:
        return Verdict("PROBE_FAILED", f"the probe failed: {report.problem}")
    variant = reference.variants.get(report.dtype)
    if variant is None:
        known = " and ".join(sorted(reference.variants))
        return Verdict("DTYPE", f"computes in {report.dtype!r}; the reference is of {known}")
    wanted = [layer_part(layer) for layer in range(layers.start, layers.end)]
    needed = [*wanted, WHOLE, *([HEAD] if head else [])]
    for name in needed:
        found = report.parts.get(name)
        if found is None or found.sketch is None:
            return Verdict("INCOMPLETE", f"says nothing of {name}")
    worst = 0.0
    for name in [*needed, *sorted(report.parts.keys() - set(needed))]:
        verdict = _judge_part(name, report.parts[name], variant.get(name))
        worst = max(worst, verdict.worst)
        if verdict.reason:
            return Verdict(verdict.reason, verdict.message, worst)
    return Verdict(worst=worst)


def _judge_part(name: str, found: PartReport, expected: PartReference | None) -> Verdict:
    if name == WHOLE:
        return _judge_whole(found)
    if expected is None:
        return Verdict("WEIGHTS", f"has weights named {name}, which the model has not")
    if found.digest != expected.digest:
        return Verdict("WEIGHTS", f"the weights of {name} are not those of the model")
    if expected.sketch is None:
        return Verdict()
    if found.sketch is None:
        return Verdict("INCOMPLETE", f"says nothing of what {name} computes")
    off = _distance(found.sketch, expected.sketch) / expected.scale
    return _measured(name, off, tolerance(expected))


def _judge_whole(found: PartReport) -> Verdict:
    if found.sketch is None or found.against is None:
        return Verdict("INCOMPLETE", f"says nothing of {WHOLE}")
    scale = float(np.linalg.norm(found.against.astype(np.float64))) or 1.0
    off = _distance(found.sketch, found.against) / scale
    return _measured("the shard as a whole", off, _WHOLE_TOLERANCE)


def _measured(what: str, off: float, allowed: float) -> Verdict:
    # Numbers that are not finite compare as False.
    if off <= allowed:
        return Verdict(worst=off / allowed)
    message = f"{what} computes something else: off by {off:.3g}, where {allowed:.3g} is allowed"
    return Verdict("NUMBERS", message, off / allowed if np.isfinite(off) else float("inf"))


def _distance(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    if one.shape != other.shape:
        return float("nan")
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.linalg.norm(one.astype(np.float64) - other.astype(np.float64)))


def _words(seed: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint64]:
    """Give random words; numpy keeps the raw stream of a bit generator as it is (NEP 19)."""
    words: npt.NDArray[np.uint64] = np.random.PCG64(seed).random_raw(shape)
    return words
