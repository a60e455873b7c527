"""What the services need of a registry: nodes under leases, revisions, a watch."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

from meshnet.lease import Lease
from meshnet.topology import NodeId
from meshnet.v1 import node_service_pb2 as pb

__all__ = ["Event", "Heartbeat", "RegistryStore", "Snapshot"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All nodes at one revision, in order of name; the messages are not to be changed."""

    nodes: tuple[pb.Node, ...]
    revision: int


@dataclass(frozen=True, slots=True)
class Event:
    """One change.

    Attributes:
        revision: of the registry after it; that of the change before for a load report.
        node: as it is now, or was last if it is gone; not to be changed.
        models_before: models that the node served before.
        is_deleted: whether the node is gone.
        is_load: whether only the load changed.
    """

    revision: int
    node: pb.Node
    models_before: frozenset[str] = frozenset()
    is_deleted: bool = False
    is_load: bool = False


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Answer to a heartbeat: the lease, the state wanted, seconds left to drain, the revision."""

    lease: Lease
    desired_state: pb.NodeState
    drain_remaining_s: float | None
    revision: int


class RegistryStore(Protocol):
    """What the services need of a registry; every method raises MeshError alone."""

    async def register(
        self, node_id: NodeId, node: pb.Node, address: str, ttl_s: float
    ) -> tuple[pb.Node, Lease, int]:
        """Store `node` under a lease; gives it as stored, with the lease and the revision."""
        ...

    async def heartbeat(self, node_id: NodeId, request: pb.HeartbeatRequest) -> Heartbeat:
        """Renew a lease and take in the node's report."""
        ...

    async def update(
        self, node_id: NodeId, etag: str, change: Callable[[pb.Node], None]
    ) -> pb.Node:
        """Apply an operator's change if `etag` is empty or the node's."""
        ...

    async def drain(self, node_id: NodeId, etag: str, grace_s: float, reason: str) -> pb.Node:
        """Start draining a node; running sessions get `grace_s` seconds."""
        ...

    async def deregister(self, node_id: NodeId, etag: str) -> None:
        """Remove a node and end its lease."""
        ...

    async def get(self, node_id: NodeId) -> pb.Node:
        """Give one node."""
        ...

    async def snapshot(self) -> Snapshot:
        """Give all nodes."""
        ...

    def watch(self, after: int) -> AsyncGenerator[Event, None]:
        """Give each change after revision `after`, and load reports as they come."""
        ...
