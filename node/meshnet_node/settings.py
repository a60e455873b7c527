"""How a node runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from meshnet.credentials import Credentials
from meshnet.plane.handler import PlaneLimits
from meshnet.topology import NodeId
from meshnet_node.budget import SessionLimits
from meshnet_node.journals import JournalLimits

__all__ = ["HOP_TIMEOUT_S", "NodeSettings"]

HOP_TIMEOUT_S: Final = 120.0


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """How a node runs.

    Attributes:
        node: its id.
        host: address to listen on.
        port: port to listen on; 0 lets the system choose.
        hop_timeout_s: seconds that the hop after may take for a chunk.
        grace_s: seconds that requests in flight get when the node closes.
        sessions: limits of the session table.
        plane: limits of connections, heads and chunks.
        journals: limits of what is kept of sessions for the recovery of the next hop.
        probe_interval_s: between probes of the shard while it serves; 0 for none but at the
            start and after errors; None for one with each heartbeat.
        tls: credentials for callers' connections and those to the hops after; None for plain ones.
        insecure: whether it may listen where other machines reach it without knowing callers.
    """

    node: NodeId
    host: str = "127.0.0.1"
    port: int = 7080
    hop_timeout_s: float = HOP_TIMEOUT_S
    grace_s: float = 10.0
    sessions: SessionLimits = field(default_factory=SessionLimits)
    journals: JournalLimits = field(default_factory=JournalLimits)
    plane: PlaneLimits = field(default_factory=PlaneLimits)
    probe_interval_s: float | None = None
    tls: Credentials | None = None
    insecure: bool = False
