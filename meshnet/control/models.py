"""The models of a registry, and which of their layers are covered (pure)."""

from __future__ import annotations

from collections import defaultdict

from meshnet.candidate import Candidate
from meshnet.control.candidates import candidates_of
from meshnet.control.registry import Snapshot
from meshnet.coverage import uncovered_layers
from meshnet.v1 import route_service_pb2 as pb
from meshnet.v1 import types_pb2

__all__ = ["models_in"]


def models_in(snapshot: Snapshot) -> list[pb.Model]:
    """Give each model with its coverage, in order of name, digest and layer count."""
    shards: dict[tuple[str, str, int], list[Candidate]] = defaultdict(list)
    for candidate in (c for node in snapshot.nodes for c in candidates_of(node)):
        shards[candidate.model, candidate.digest, candidate.layer_count].append(candidate)
    models = []
    for (name, digest, layer_count), served in sorted(shards.items(), key=lambda item: item[0]):
        replicas = [0] * layer_count
        for candidate in (c for c in served if c.ready):
            for layer in range(candidate.layers.start, candidate.layers.end):
                replicas[layer] += 1
        uncovered = [
            types_pb2.LayerRange(start=gap.start, end=gap.end)
            for gap in uncovered_layers(served, layer_count)
        ]
        models.append(
            pb.Model(
                name=name,
                digest=digest,
                layer_count=layer_count,
                ready_replicas=replicas,
                uncovered=uncovered,
            )
        )
    return models
