"""Which nodes a session can use, and which layers are left without one (pure)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
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
    if not _has_room(candidate, query):
        return "CACHE_FULL"
    spoken, wanted = candidate.wire_versions, query.wire_versions
    if spoken and wanted and not any(version in wanted for version in spoken):
        return "WIRE_VERSION"
    if query.route_class == "lan" and query.region not in ("", candidate.region):
        return "REGION"
    return ""


def _has_room(candidate: Candidate, query: RouteQuery) -> bool:
    """Tell whether the session's cache fits; a node that holds the session has it already."""
    free = candidate.free_tokens
    return free is None or free >= query.expected_tokens or candidate.node in query.prefer


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
    """Name the gaps of the digest that comes closest to being covered, and what they lack."""
    found = []
    for digest, layer_count in sorted({(c.digest, c.layer_count) for c in known}):
        served = [c for c in known if (c.digest, c.layer_count) == (digest, layer_count)]
        gaps = uncovered_layers([c for c in served if not why_not(c, query)], layer_count)
        found.append((sum(len(gap) for gap in gaps), gaps, digest))
    _, gaps, digest = min(found)
    name = repr(query.model) + (f" in digest {digest!r}" if len(found) > 1 else "")
    if gaps and query.expected_tokens and not _lacks_nodes(known, query):
        return _cache_full(gaps, name, query.expected_tokens)
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


def _lacks_nodes(known: Sequence[Candidate], query: RouteQuery) -> bool:
    """Tell whether layers would be uncovered too if every node had room for the session."""
    asked = replace(query, expected_tokens=0)
    served: dict[tuple[str, int], list[Candidate]] = {}
    for candidate in known:
        if not why_not(candidate, asked):
            served.setdefault((candidate.digest, candidate.layer_count), []).append(candidate)
    return all(uncovered_layers(shards, count) for (_, count), shards in served.items())


def _cache_full(gaps: Iterable[LayerRange], name: str, num_tokens: int) -> RouteError:
    layers = ", ".join(str(gap) for gap in gaps)
    return RouteError(
        Code.RESOURCE_EXHAUSTED,
        f"no node of layers {layers} of {name} has KV cache left for {num_tokens} tokens",
        field="expected_tokens",
        reason="CACHE_FULL",
        retry_after_s=RETRY_AFTER_S,
    )
