"""A node process: takes its port, registers, loads, serves, and leaves the mesh."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from meshnet.cli.serving import announce, split_address
from meshnet.compression import CompressionPolicies
from meshnet.control.enrolled import Enrolled
from meshnet.errors import ConfigError
from meshnet_node.app import Node
from meshnet_node.heartbeat import Heartbeat, Registration
from meshnet_node.settings import NodeSettings
from meshnet_node.shard_source import ShardSource

__all__ = ["Place", "node_process"]


@dataclass(frozen=True, slots=True)
class Place:
    """A node's place in a mesh.

    Attributes:
        control: where the control plane is, all its replicas with commas between.
        advertise: ``HOST:PORT`` that other nodes reach it at; None for where it listens.
        region: chosen by the operator; empty for none.
        zone: failure domain in the region; empty for none.
    """

    control: str
    advertise: str | None = None
    region: str = ""
    zone: str = ""


@asynccontextmanager
async def node_process(
    settings: NodeSettings,
    source: ShardSource,
    policies: CompressionPolicies,
    place: Place | None,
    *,
    enrolled: Enrolled | None,
    grace_s: float,
    as_json: bool,
) -> AsyncIterator[None]:
    """Serve a shard for as long as this context lasts, and say what happens.

    Args:
        settings: of the node.
        source: what it serves.
        policies: when bodies are compressed.
        place: where it registers; None runs it alone.
        enrolled: its membership, renewed meanwhile; None without one.
        grace_s: seconds that sessions get to move away at the end.
        as_json: say it as JSON.

    Raises:
        MeshError: it could not listen, register or load.
    """
    spec = source.spec
    served = Node(settings, source.open, policies)
    try:
        if enrolled is not None:
            enrolled.start()
        address = await served.listen()
        announce(
            "listening",
            f"node {settings.node}: listening on {address}",
            as_json=as_json,
            address=address,
        )
        heartbeat: Heartbeat | None = None
        if place is not None:
            registration = Registration(
                settings.node,
                spec,
                place.advertise or _public_address(address, place.control),
                place.region,
                place.zone,
                settings.tls,
                source.reference,
            )
            heartbeat = Heartbeat(place.control, registration, served, served.bandwidths)
            await heartbeat.start()
        try:
            await served.load()
            if heartbeat is not None:
                await heartbeat.beat()
            announce(
                "ready",
                f"node {settings.node}: serving layers {spec.layers} of {spec.model}",
                as_json=as_json,
                node=settings.node,
                address=address,
                layers=str(spec.layers),
                model=spec.model,
            )
            yield
            if heartbeat is not None:
                await heartbeat.drain(grace_s)
        finally:
            if heartbeat is not None:
                await heartbeat.close()
    finally:
        await served.close()
        if enrolled is not None:
            await enrolled.close()


def _public_address(address: str, control: str) -> str:
    """Give the address to register: the one listened on, or where that is any, one that routes.

    Raises:
        ConfigError: none can be found; ``--advertise`` gives it.
    """
    host, _, port = address.rpartition(":")
    if host not in ("0.0.0.0", "[::]"):  # noqa: S104 - compared, not bound
        return address
    target = control.split(",")[0].rpartition("//")[2]
    target_host, target_port = split_address(target, "--control", 7071)
    try:
        found = socket.getaddrinfo(target_host, target_port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[4])  # sends nothing: the system only chooses the way
            own = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(
            f"--advertise is needed: no own address found toward {target}: {error}",
            field="--advertise",
        ) from None
    return f"[{own}]:{port}" if ":" in own else f"{own}:{port}"
