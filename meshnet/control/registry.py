"""What the services need of a registry: nodes under leases, revisions, a watch."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

from meshnet.control.lifecycle import Judge
from meshnet.errors import Code, MeshError
from meshnet.lease import Lease
from meshnet.topology import NodeId
from meshnet.v1 import node_service_pb2 as pb

__all__ = ["Event", "Heartbeat", "Snapshot", "Store", "StoreHealth", "away"]


@dataclass(frozen=True, slots=True)
class StoreHealth:
    """Whether a store answers.

    Attributes:
        is_connected: whether what it holds is current, and writes are taken.
        age_s: seconds since what it holds was last known to be current; 0 if it is.
        problem: why it is not connected, for people.
    """

    is_connected: bool = True
    age_s: float = 0.0
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All nodes at one revision, in order of name; the messages are not to be changed.

    Attributes:
        nodes: the nodes.
        revision: of the registry.
        unconfirmed: nodes that are not LOST as far as is known, but of which nothing was
            heard for longer than their lease: not to be routed to.
        health: of the store.
    """

    nodes: tuple[pb.Node, ...]
    revision: int
    unconfirmed: frozenset[NodeId] = frozenset()
    health: StoreHealth = StoreHealth()

    def explain(self, error: MeshError) -> MeshError:
        """Give the error to answer with where none of the confirmed nodes would do."""
        if not self.unconfirmed:
            return error
        return away(
            "the store",
            f"{self.health.problem or 'it was away'}; {len(self.unconfirmed)} nodes have not been "
            f"heard of for longer than their leases, and without them: {error.message}",
        )


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
    """Answer to a heartbeat: the lease, the state wanted, seconds left to drain, the revision.

    `verification` is what is known of the node's numbers.
    """

    lease: Lease
    desired_state: pb.NodeState
    drain_remaining_s: float | None
    revision: int
    verification: pb.Verification


class Store(Protocol):
    """A registry of nodes under leases; every method raises MeshError alone.

    A lease never ends before its time to live has passed since the last renewal, by a
    monotonic clock, and never comes back once it has ended. What was written through a
    store is in what is read from it next.
    """

    async def open(self) -> None:
        """Get ready to serve.

        Raises:
            MeshError: what is kept cannot be reached or read.
        """
        ...

    def stop(self) -> None:
        """End all watches; calls that run may go on."""
        ...

    async def close(self) -> None:
        """Free everything; may be called more than once, and without `open`."""
        ...

    def health(self) -> StoreHealth:
        """Tell whether the store answers."""
        ...

    async def register(
        self, node_id: NodeId, node: pb.Node, address: str, ttl_s: float
    ) -> tuple[pb.Node, Lease, int]:
        """Store `node` under a lease; gives it as stored, with the lease and the revision."""
        ...

    async def heartbeat(
        self, node_id: NodeId, request: pb.HeartbeatRequest, judge: Judge | None = None
    ) -> Heartbeat:
        """Renew a lease and take in the node's report, as `lifecycle.heartbeat` does."""
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


def away(what: str, problem: str) -> MeshError:
    """Make the error for a store that does not answer: others may, and it may soon."""
    return MeshError(
        Code.UNAVAILABLE,
        f"{what} does not answer: {problem}"[:500],
        reason="STORE_UNAVAILABLE",
        retry_after_s=1.0,
    )
