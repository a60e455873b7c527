"""Names and places: node and session ids, layer ranges, hops, routes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NewType

__all__ = ["Hop", "LayerRange", "NodeId", "Route", "SessionId", "parse_layers", "parse_node_id"]

NodeId = NewType("NodeId", str)
"""1-63 of ``[a-z0-9-]``, a letter first: the last part of the resource name ``nodes/{id}``."""

SessionId = NewType("SessionId", str)
"""Canonical lower-case UUID of one generation's KV state across a route."""

_NODE_ID = re.compile(r"[a-z][a-z0-9-]{0,62}")
_LAYERS = re.compile(r"(0|[1-9][0-9]{0,5})[:-](0|[1-9][0-9]{0,5})")


@dataclass(frozen=True, slots=True, order=True)
class LayerRange:
    """Half-open range ``[start, end)`` of a model's layers, ``start < end``."""

    start: int
    end: int

    def __len__(self) -> int:
        """Give the number of layers."""
        return self.end - self.start

    def __str__(self) -> str:
        """Write as the wire does: ``start-end``."""
        return f"{self.start}-{self.end}"

    def contains(self, other: LayerRange) -> bool:
        """Tell whether every layer of `other` lies in this range."""
        return self.start <= other.start and other.end <= self.end


@dataclass(frozen=True, slots=True)
class Hop:
    """One node's part of a route.

    Attributes:
        node: id of the node.
        address: ``host:port`` of its activation plane (IPv6 in brackets).
        layers: the layers to run there.
    """

    node: NodeId
    address: str
    layers: LayerRange


Route = tuple[Hop, ...]
"""Ordered hops whose layers together cover a model once."""


def parse_layers(text: str) -> LayerRange:
    """Read ``0:10`` or ``0-10`` (half-open).

    Raises:
        ValueError: not of that form, or empty.
    """
    match = _LAYERS.fullmatch(text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ValueError(f"layers {text!r}: expected START:END with START < END, as in 0:10")
    return LayerRange(int(match[1]), int(match[2]))


def parse_node_id(text: str) -> NodeId:
    """Check a node id.

    Raises:
        ValueError: not 1 to 63 of ``[a-z0-9-]`` with a letter first.
    """
    if _NODE_ID.fullmatch(text) is None:
        raise ValueError(
            f"node id {text!r}: expected 1 to 63 of a-z, 0-9 and '-', beginning with a letter"
        )
    return NodeId(text)
