"""What a model of eight layers gives, and what nodes say of theirs, made without one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from meshnet.control.probe_messages import reference_message, report_message
from meshnet.probes import (
    HEAD,
    WHOLE,
    PartReference,
    PartReport,
    Reference,
    Report,
    layer_part,
    make_sketch,
)
from meshnet.v1 import node_service_pb2 as node_pb
from meshnet.v1 import reference_service_pb2 as pb

DIGEST = hashlib.sha256(b"model").hexdigest()
OTHER_DIGEST = hashlib.sha256(b"other").hexdigest()
NAME = "acme/tiny"
LAYERS = 8

_PARTS = (*(layer_part(layer) for layer in range(LAYERS)), HEAD)


def _sketch(name: str) -> np.ndarray:
    return make_sketch(np.random.default_rng(list(name.encode())).standard_normal(100))


def _digest(name: str) -> bytes:
    return b"" if name == HEAD else hashlib.sha256(name.encode()).digest()


def reference(
    digest: str = DIGEST, *, name: str = NAME, noise: float = 0.01, dtype: str = "bfloat16"
) -> pb.Reference:
    """Give a model's reference."""
    parts = {
        part: PartReference(_digest(part), _sketch(part), 10.0, noise, 0.01) for part in _PARTS
    }
    return reference_message(Reference(name, digest, LAYERS, {dtype: parts}))


def report(
    start: int = 0,
    end: int = LAYERS,
    *,
    change: Callable[[dict[str, PartReport]], None] | None = None,
    problem: str = "",
    name: str = NAME,
) -> node_pb.ProbeReport:
    """Give what a node says of these layers; as they should be, unless `change` changes them."""
    names = [*map(layer_part, range(start, end)), *([HEAD] if end == LAYERS else [])]
    parts = {name: PartReport(_digest(name), _sketch(name)) for name in names}
    parts[WHOLE] = PartReport(sketch=_sketch(WHOLE), against=_sketch(WHOLE))
    if change is not None:
        change(parts)
    return report_message(name, Report("bfloat16", parts, problem=problem))


def flip(parts: dict[str, PartReport]) -> None:
    """Let a layer have other weights."""
    parts["layer.2"] = replace(parts["layer.2"], digest=hashlib.sha256(b"flipped").digest())


def shift(parts: dict[str, PartReport]) -> None:
    """Let a layer compute what another one does."""
    parts["layer.2"] = replace(parts["layer.2"], sketch=parts["layer.3"].sketch)
