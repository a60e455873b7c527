"""Which nodes a session can use, and which layers are left without one (pure)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Final

from meshnet.candidate import Candidate, RouteQuery
from meshnet.errors import Code, RouteError
from meshnet.topology import LayerRange, NodeId

__all__ = ["left_out", "uncovered_error", "uncovered_layers", "why_not"]

RETRY_AFTER_S: Final = 1.0


def why_not(candidate: Candidate, query: RouteQuery) -> str:
    """Say why a session cannot use a shard, as an upper-case word; empty if it can."""
    if not candidate.ready:
        return "NOT_READY"
    if candidate.node in query.exclude:
        return "EXCLUDED"
    if candidate.free_tokens is not None and candidate.free_tokens < query.expected_tokens:
        return "CACHE_FULL"
    spoken, wanted = candidate.wire_versions, query.wire_versions
    if spoken and wanted and not any(version in wanted for version in spoken):
        return "WIRE_VERSION"
    if query.route_class == "lan" and query.region not in ("", candidate.region):
        return "REGION"
    return ""


def left_out(candidates: Iterable[Candidate], query: RouteQuery) -> list[tuple[NodeId, str]]:
    """Give the nodes that a session cannot use, with the reason, in the order given."""
    reasons = [(candidate.node, why_not(candidate, query)) for candidate in candidates]
    return [(node, reason) for node, reason in reasons if reason]


def uncovered_layers(candidates: Sequence[Candidate], layer_count: int) -> list[LayerRange]:
    """Name the layers that no route over ready `candidates` of one digest can cover."""
    covered = [False] * layer_count
    for candidate in (c for c in candidates if c.ready):
        for layer in range(candidate.layers.start, min(candidate.layers.end, layer_count)):
            at_ends = (layer > 0 or candidate.embedding) and (
                layer < layer_count - 1 or candidate.lm_head
            )
            covered[layer] = covered[layer] or at_ends
    gaps = []
    for is_covered, run in itertools.groupby(range(layer_count), key=lambda layer: covered[layer]):
        layers = list(run)
        if not is_covered:
            gaps.append(LayerRange(layers[0], layers[-1] + 1))
    return gaps


def uncovered_error(known: Sequence[Candidate], query: RouteQuery) -> RouteError:
    """Name the gaps of the digest that comes closest to being covered."""
    found = []
    for digest, layer_count in sorted({(c.digest, c.layer_count) for c in known}):
        served = [c for c in known if (c.digest, c.layer_count) == (digest, layer_count)]
        gaps = uncovered_layers([c for c in served if not why_not(c, query)], layer_count)
        found.append((sum(len(gap) for gap in gaps), gaps, digest))
    _, gaps, digest = min(found)
    name = repr(query.model) + (f" in digest {digest!r}" if len(found) > 1 else "")
    if gaps:
        layers = ", ".join(str(gap) for gap in gaps)
        message = f"layers {layers} of {name} have no eligible node now"
    else:
        within = " inside one region" if query.route_class == "lan" else ""
        message = (
            f"each layer of {name} has an eligible node, but no chain of them{within} has "
            "the embedding first, the LM head last and one wire version"
        )
    return RouteError(
        Code.UNAVAILABLE,
        message,
        field="model",
        reason="LAYERS_UNCOVERED",
        retry_after_s=RETRY_AFTER_S,
    )
