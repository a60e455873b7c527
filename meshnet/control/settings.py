"""How a control plane runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from meshnet.authority import DEFAULT_LIFE_S
from meshnet.control.grant_issuer import GrantTimes
from meshnet.control.limits import DEFAULT_LIMITS, ControlLimits
from meshnet.errors import ConfigError
from meshnet.listen import ANY_HOSTS
from meshnet.v1 import reference_service_pb2 as reference_pb

__all__ = ["ControlSettings"]


@dataclass(frozen=True, slots=True)
class ControlSettings:
    """Where a control plane listens and how long things last.

    Attributes:
        http_host: address of the JSON face.
        http_port: its port, 0 for any.
        grpc_host: address of the gRPC face.
        grpc_port: its port, 0 for any.
        lease_ttl_s: lease of a node that asks for no other.
        forget_after_s: how long a LOST node is still listed.
        drain_grace_s: how long a drained node's sessions may go on by default.
        bookmark_interval_s: how often a quiet watch says that it lives.
        close_grace_s: what running calls get when the server closes.
        replica_id: name of this replica; empty for a random one.
        store: where the registry is kept: ``memory``, ``sqlite:PATH``, or
            ``etcd://HOST:PORT[,HOST:PORT...]``, which several replicas share.
        require_grants: nodes take sessions only along routes that were granted to them.
        grants: how long grants and their keys last.
        state: directory of the authority, without which callers are nobody: with it both faces
            have TLS, callers may what `authz.RULES` says, and nodes want grants. Without it
            everybody may everything.
        advertise: host that others reach it at, for join tokens; empty for that of `http_host`.
        certificate_life_s: how long certificates are good.
        insecure: whether an open control plane may listen where other machines reach it.
        require_probe: leave nodes out whose model has no reference; None for those of a control
            plane with `state` alone.
        references: to be known from the start, where their digests have none.
        limits: of what callers send, and how slowly.
    """

    http_host: str = "127.0.0.1"
    http_port: int = 7070
    grpc_host: str = "127.0.0.1"
    grpc_port: int = 7071
    lease_ttl_s: float = 10.0
    forget_after_s: float = 600.0
    drain_grace_s: float = 600.0
    bookmark_interval_s: float = 10.0
    close_grace_s: float = 1.0
    replica_id: str = ""
    store: str = "memory"
    require_grants: bool = False
    grants: GrantTimes = field(default_factory=GrantTimes)
    state: Path | None = None
    advertise: str = ""
    certificate_life_s: float = DEFAULT_LIFE_S
    insecure: bool = False
    require_probe: bool | None = None
    references: tuple[reference_pb.Reference, ...] = ()
    limits: ControlLimits = DEFAULT_LIMITS

    def __post_init__(self) -> None:
        """Refuse times that cannot be, and an address that nobody can be told.

        Raises:
            ConfigError: naming the setting.
        """
        for name in ("lease_ttl_s", "forget_after_s", "drain_grace_s", "bookmark_interval_s"):
            seconds = getattr(self, name)
            if not 0 < seconds < math.inf:
                raise ConfigError(f"{name} {seconds}: expected a positive time", field=name)
        if self.state is not None and not self.advertise and self.http_host in ANY_HOSTS:
            raise ConfigError(
                f"listening on {self.http_host} says not where others reach this machine: "
                "--advertise-control HOST is needed, for join tokens",
                field="advertise",
            )
