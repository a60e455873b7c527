"""References and probe reports as messages of the schema, and back, checked."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from meshnet.control.validate import MAX_LAYERS, check_model, check_required, invalid
from meshnet.probes import SKETCH_SIZE, PartReference, PartReport, Reference, Report
from meshnet.v1 import node_service_pb2 as node_pb
from meshnet.v1 import reference_service_pb2 as pb

__all__ = [
    "check_reports",
    "reference_message",
    "reference_of",
    "report_message",
    "report_of",
]

MAX_PARTS: Final = 20_000
MAX_VARIANTS: Final = 8
MAX_REPORTS: Final = 64
_DIGEST_BYTES: Final = 32
_MAX_NAME: Final = 256
_MODEL_DIGEST: Final = re.compile(r"[0-9a-f]{64}")


def reference_message(reference: Reference) -> pb.Reference:
    """Write a reference."""
    return pb.Reference(
        name=f"references/{reference.model_digest}",
        model=f"models/{reference.model}",
        model_digest=reference.model_digest,
        layer_count=reference.num_layers,
        probe_version=reference.version,
        variants=[
            pb.ReferenceVariant(
                dtype=dtype,
                parts=[
                    pb.ReferencePart(
                        name=name,
                        digest=part.digest,
                        sketch=_numbers(part.sketch),
                        scale=part.scale,
                        noise=part.noise,
                        rounding=part.rounding,
                    )
                    for name, part in parts.items()
                ],
            )
            for dtype, parts in reference.variants.items()
        ],
    )


def reference_of(message: pb.Reference, field: str = "reference") -> Reference:
    """Read a reference.

    Raises:
        MeshError: INVALID_ARGUMENT, naming the field that cannot be.
    """
    check_required(message, f"{field}.")
    check_model(message.model, f"{field}.model")
    if not _MODEL_DIGEST.fullmatch(message.model_digest):
        raise invalid(
            f"{field}.model_digest",
            f"{message.model_digest[:80]!r}: expected 64 hex digits, as meshnet model makes them",
        )
    if message.layer_count > MAX_LAYERS:
        raise invalid(f"{field}.layer_count", f"{message.layer_count}: at most {MAX_LAYERS}")
    if not 0 < len(message.variants) <= MAX_VARIANTS:
        raise invalid(f"{field}.variants", f"expected 1 to {MAX_VARIANTS}")
    variants = {}
    for index, variant in enumerate(message.variants):
        path = f"{field}.variants[{index}]"
        _check_names([variant.dtype, *(part.name for part in variant.parts)], path)
        parts = {}
        for at, part in enumerate(variant.parts):
            where = f"{path}.parts[{at}]"
            numbers = (part.scale, part.noise, part.rounding)
            if not all(math.isfinite(number) and number >= 0 for number in numbers):
                raise invalid(where, f"scale, noise and rounding are {numbers}: expected 0 or more")
            sketch = _sketch(part.sketch, where)
            if sketch is not None and not (np.isfinite(sketch).all() and part.scale > 0):
                raise invalid(where, "expected finite numbers in sketch and a scale above 0")
            parts[part.name] = PartReference(_digest(part.digest, where), sketch, *numbers)
        variants[variant.dtype] = parts
    return Reference(
        message.model.removeprefix("models/"),
        message.model_digest,
        message.layer_count,
        variants,
        message.probe_version,
    )


def report_message(model: str, report: Report) -> node_pb.ProbeReport:
    """Write a report of a shard of `model`, named without ``models/``."""
    return node_pb.ProbeReport(
        model=f"models/{model}",
        probe_version=report.version,
        dtype=report.dtype,
        problem=report.problem[:1000],
        parts=[
            node_pb.ProbePart(
                name=name,
                digest=part.digest,
                sketch=_numbers(part.sketch),
                against=_numbers(part.against),
            )
            for name, part in report.parts.items()
        ],
    )


def report_of(message: node_pb.ProbeReport) -> Report:
    """Read a report that `check_reports` let pass."""
    return Report(
        dtype=message.dtype,
        parts={
            part.name: PartReport(
                part.digest, _sketch(part.sketch, "probes"), _sketch(part.against, "probes")
            )
            for part in message.parts
        },
        version=message.probe_version,
        problem=message.problem,
    )


def check_reports(reports: Sequence[node_pb.ProbeReport]) -> None:
    """Check the reports of a heartbeat; numbers may be any, judging them is not done here.

    Raises:
        MeshError: INVALID_ARGUMENT, naming the field that cannot be.
    """
    if len(reports) > MAX_REPORTS:
        raise invalid("probes", f"{len(reports)}: expected at most {MAX_REPORTS}")
    for index, report in enumerate(reports):
        path = f"probes[{index}]"
        check_model(report.model, f"{path}.model")
        if len(report.problem) > 1000:
            raise invalid(f"{path}.problem", "expected at most 1000 characters")
        _check_names([report.dtype or "-", *(part.name for part in report.parts)], path)
        for at, part in enumerate(report.parts):
            where = f"{path}.parts[{at}]"
            _digest(part.digest, where)
            _sketch(part.sketch, where)
            _sketch(part.against, where)


def _check_names(names: Sequence[str], path: str) -> None:
    if len(names) > MAX_PARTS:
        raise invalid(f"{path}.parts", f"{len(names)}: expected at most {MAX_PARTS}")
    if len(set(names)) < len(names):
        raise invalid(f"{path}.parts", "two have the same name")
    for name in names:
        if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
            raise invalid(f"{path}.parts", f"name {name[:_MAX_NAME]!r}: 1 to {_MAX_NAME} printable")


def _digest(digest: bytes, path: str) -> bytes:
    if len(digest) not in (0, _DIGEST_BYTES):
        raise invalid(f"{path}.digest", f"{len(digest)} bytes: expected {_DIGEST_BYTES}")
    return digest


def _numbers(sketch: npt.NDArray[np.float32] | None) -> Iterable[float]:
    return () if sketch is None else sketch.tolist()


def _sketch(numbers: Sequence[float], path: str) -> npt.NDArray[np.float32] | None:
    if len(numbers) not in (0, SKETCH_SIZE):
        raise invalid(f"{path}.sketch", f"{len(numbers)} numbers: expected {SKETCH_SIZE}")
    return np.array(numbers, dtype=np.float32) if numbers else None
