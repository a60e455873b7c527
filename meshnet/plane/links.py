"""What the plane's clients, with an event loop or on threads, are told of the links to nodes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from meshnet.choosers import LinkChoosers
from meshnet.compression import CompressionPolicies
from meshnet.credentials import Credentials
from meshnet.grammar import Phase
from meshnet.wire import DEFAULT_LIMITS, WireLimits

__all__ = ["LinkSettings"]


@dataclass(frozen=True, slots=True)
class LinkSettings:
    """How a client reaches nodes, and what it takes of them.

    Attributes:
        policies: decide which bodies are compressed.
        route_condition: the policies' name for the links that lead to the nodes.
        limits: on answers, checked before anything is allocated for them.
        connect_timeout_s: for one attempt to connect, over all the addresses of a name.
        max_connections: to one address at a time; a further request waits its turn.
        max_idle_connections: to one address, kept for the next request.
        tls: credentials, where connections are to be encrypted.

    Raises:
        ValueError: the policies know no such `route_condition`.
    """

    policies: CompressionPolicies = field(default_factory=CompressionPolicies)
    route_condition: str = "lan"
    limits: WireLimits = DEFAULT_LIMITS
    connect_timeout_s: float = 5.0
    max_connections: int = 256
    max_idle_connections: int = 32
    tls: Credentials | None = None

    def __post_init__(self) -> None:
        """Refuse what the policies do not know."""
        for phase in Phase:
            self.policies.for_condition(self.route_condition, phase.value)

    def choosers(self) -> LinkChoosers:
        """Make the choosers of a client; any of its threads may use them."""
        return LinkChoosers(self.policies, self.route_condition, lock=threading.Lock())
