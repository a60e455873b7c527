"""``meshnet node``: serve a shard of a model from this machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from meshnet import config
from meshnet.cli.join import Join, default_name, join_mesh
from meshnet.cli.output import Json
from meshnet.cli.secured import Insecure
from meshnet.cli.serving import ExitWithParent, Limits, serve, split_address
from meshnet.cli.tls import TlsCa, TlsCert, TlsKey, tls_credentials
from meshnet.errors import ConfigError
from meshnet.identity import Role
from meshnet.limits import change_limits
from meshnet.plane.server import PlaneLimits
from meshnet.topology import LayerRange, parse_layers, parse_node_id
from meshnet.wire import DEFAULT_LIMITS, WireLimits
from meshnet_node.budget import SessionLimits
from meshnet_node.journals import JournalLimits
from meshnet_node.process import Place, node_process
from meshnet_node.settings import HOP_TIMEOUT_S, NodeSettings
from meshnet_node.shard_source import model_source, stub_source

__all__ = ["node"]

_T = TypeVar("_T")
_DEFAULT_LISTEN = {False: "127.0.0.1:7080", True: "0.0.0.0:7080"}
"""Where to listen: a node that joins a mesh is there for others, whom it knows."""


class BackendName(StrEnum):
    """What computes the shard."""

    TRANSFORMERS = "transformers"
    STUB = "stub"


class DtypeName(StrEnum):
    """What the shard computes in; the wire is bfloat16 in any case."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


def node(
    layers: Annotated[
        str | None,
        typer.Option(
            help="Layers to serve, half-open: START:END, as 0:10.",
            show_default="those of the join token",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Model directory, or a hub name ORG/NAME[@REVISION].",
            show_default="that of the join token",
        ),
    ] = None,
    join: Join = None,
    backend: Annotated[BackendName, typer.Option(help="What computes.")] = BackendName.TRANSFORMERS,
    control: Annotated[
        str | None,
        typer.Option(
            help="Control plane to register at, all replicas with commas; without, it runs alone."
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(
            help="HOST:PORT of the activation plane.",
            show_default="127.0.0.1:7080; with --join 0.0.0.0:7080",
        ),
    ] = None,
    advertise: Annotated[
        str | None, typer.Option(help="HOST:PORT that other nodes reach this one at.")
    ] = None,
    node_id: Annotated[
        str | None, typer.Option("--id", help="Id of the node; else from host name and port.")
    ] = None,
    region: Annotated[str, typer.Option(help="Region, as eu-central.")] = "",
    zone: Annotated[str, typer.Option(help="Failure domain inside the region.")] = "",
    dtype: Annotated[DtypeName, typer.Option(help="What to compute in.")] = DtypeName.AUTO,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads to compute with; else torch's choice.")
    ] = None,
    cache_tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of KV cache over all sessions.")
    ] = SessionLimits().cache_tokens,
    idle_ttl: Annotated[
        float, typer.Option(min=1.0, help="Seconds after which an idle session is forgotten.")
    ] = SessionLimits().idle_ttl_s,
    grace: Annotated[
        float,
        typer.Option(min=0.0, help="Seconds that sessions get to move away when told to end."),
    ] = 30.0,
    hop_timeout: Annotated[
        float,
        typer.Option(min=1.0, help="Seconds that the node after this one may take for a chunk."),
    ] = HOP_TIMEOUT_S,
    journal_bytes: Annotated[
        int,
        typer.Option(
            min=0, help="Memory for what sessions sent on, to replace a lost next node; 0 for none."
        ),
    ] = JournalLimits().memory_bytes,
    journal_disk_bytes: Annotated[
        int, typer.Option(min=0, help="Bytes of a temporary file for what that has no room for.")
    ] = JournalLimits().disk_bytes,
    journal_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory of that file.",
            file_okay=False,
            exists=True,
            show_default="the system's for temporary files",
        ),
    ] = None,
    hidden_size: Annotated[int, typer.Option(min=1, max=1 << 20, help="Of the stub backend.")] = 8,
    stub_layers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Layers of the model that the stub backend is part of.",
            show_default="the end of --layers",
        ),
    ] = None,
    stub_delay_ms: Annotated[
        float,
        typer.Option(min=0, max=60_000, help="Milliseconds that the stub backend sleeps a chunk."),
    ] = 0.0,
    stub_busy: Annotated[
        bool,
        typer.Option("--stub-busy", help="Keep a thread of the stub backend computing in Python."),
    ] = False,
    insecure: Insecure = False,
    probe_interval: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Seconds between probes of what is computed here; 0 for none while serving.",
            show_default="with each heartbeat",
        ),
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    allow_unverified: Annotated[
        bool,
        typer.Option(help="Serve an architecture that is not known to run exactly in shards."),
    ] = False,
    limit: Limits = None,
    as_json: Json = False,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Serve layers of a model: load only these, answer POST /forward, send on along the route.

    Examples:
      meshnet node --model ./smollm2 --layers 0:10 --control grpc://127.0.0.1:7071

      meshnet node --join TOKEN

      meshnet node --backend stub --hidden-size 8 --layers 0:1
    """
    settings = config.load()
    tls = tls_credentials(tls_cert, tls_key, tls_ca, serves=True)
    joins = join is not None or settings.join is not None
    host, port = split_address(listen or _DEFAULT_LISTEN[joins], "--listen", 7080)
    identity = _parse(parse_node_id, node_id or default_name("node", port), "--id")
    enrolled = join_mesh(join, Role.NODE, identity, settings, has_tls=tls is not None)
    given: LayerRange | None = None
    if enrolled is not None:
        tls, membership = enrolled.credentials, enrolled.membership
        control, model = control or membership.control_url, model or membership.model or None
        given = membership.layers
    shard_layers = _parse(parse_layers, layers, "--layers") if layers is not None else given
    if shard_layers is None:
        raise ConfigError(
            "--layers is missing; expected START:END, as 0:10, or a join token with layers",
            field="--layers",
        )
    if backend is BackendName.STUB:
        # In a mesh a route must end in logits; alone, every chunk just passes through.
        source = stub_source(
            shard_layers,
            hidden_size=hidden_size,
            num_layers=stub_layers,
            head=control is not None,
            delay_s=stub_delay_ms / 1e3,
            busy=stub_busy,
        )
    else:
        source = model_source(
            model,
            shard_layers,
            hub_endpoint=settings.hub_endpoint,
            cache_dir=settings.cache_dir,
            dtype=dtype.value,
            threads=threads,
            allow_unverified=allow_unverified,
        )
    plane, wire, sessions = _limits(
        limit or [], SessionLimits(cache_tokens=cache_tokens, idle_ttl_s=idle_ttl)
    )
    node_settings = NodeSettings(
        node=identity,
        host=host,
        port=port,
        hop_timeout_s=hop_timeout,
        sessions=sessions,
        plane=replace(plane, wire=wire),
        journals=JournalLimits(journal_bytes, journal_disk_bytes, journal_dir),
        probe_interval_s=probe_interval,
        tls=tls,
        insecure=insecure,
    )
    place = None if control is None else Place(control, advertise, region, zone)
    process = partial(
        node_process,
        node_settings,
        source,
        settings.compression,
        place,
        enrolled=enrolled,
        grace_s=grace,
        as_json=as_json,
    )
    serve(process, exit_with_parent=exit_with_parent)


def _limits(
    changes: list[str], sessions: SessionLimits
) -> tuple[PlaneLimits, WireLimits, SessionLimits]:
    plane, wire, held = change_limits(changes, PlaneLimits(), DEFAULT_LIMITS, sessions)
    return plane, wire, held


def _parse(parse: Callable[[str], _T], text: str, flag: str) -> _T:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}", field=flag) from None
