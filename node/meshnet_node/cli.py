"""``meshnet node``: serve a shard of a model from this machine."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from meshnet import config
from meshnet.cli.join import Join, default_name, join_mesh
from meshnet.cli.output import Json, errors
from meshnet.cli.secured import Insecure
from meshnet.cli.serving import ExitWithParent, Limits, announce, serve, split_address
from meshnet.cli.tls import TlsCa, TlsCert, TlsKey, tls_credentials
from meshnet.control.reference_file import REFERENCE_FILE, read_reference_file
from meshnet.errors import ConfigError
from meshnet.identity import Role
from meshnet.limits import change_limits
from meshnet.plane.server import PlaneLimits
from meshnet.topology import LayerRange, parse_layers, parse_node_id
from meshnet.v1.reference_service_pb2 import Reference
from meshnet.wire import DEFAULT_LIMITS, WireLimits
from meshnet_node.app import Node, NodeSettings
from meshnet_node.backend import ShardBackend, ShardSpec
from meshnet_node.budget import SessionLimits
from meshnet_node.heartbeat import Heartbeat, Registration
from meshnet_node.journals import JournalLimits
from meshnet_node.model_files import ModelFiles, resolve_model
from meshnet_node.prober import PROBE_INTERVAL_S
from meshnet_node.stub import StubBackend

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
        float,
        typer.Option(
            min=0.0,
            help="Seconds between probes of what is computed here; 0 for none while serving.",
        ),
    ] = PROBE_INTERVAL_S,
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
    open_backend: Callable[[], ShardBackend]
    if backend is BackendName.STUB:
        # In a mesh a route must end in logits; alone, every chunk just passes through.
        stub = StubBackend(
            shard_layers,
            hidden_size=hidden_size,
            num_layers=_stub_layers(stub_layers, shard_layers),
            head=control is not None,
            delay_s=stub_delay_ms / 1e3,
            busy=stub_busy,
        )
        spec, open_backend, reference = stub.spec, lambda: stub, None
    else:
        spec, open_backend, reference = _transformers(
            settings, model, shard_layers, dtype, threads, allow_unverified=allow_unverified
        )
    plane, wire, sessions = _limits(
        limit or [], SessionLimits(cache_tokens=cache_tokens, idle_ttl_s=idle_ttl)
    )
    node_settings = NodeSettings(
        node=identity,
        host=host,
        port=port,
        sessions=sessions,
        plane=replace(plane, wire=wire),
        journals=JournalLimits(journal_bytes, journal_disk_bytes, journal_dir),
        probe_interval_s=probe_interval,
        tls=tls,
        insecure=insecure,
    )

    @asynccontextmanager
    async def service() -> AsyncIterator[None]:
        served = Node(node_settings, open_backend, settings.compression)
        try:
            if enrolled is not None:
                enrolled.start()
            address = await served.listen()
            announce(
                "listening",
                f"node {identity}: listening on {address}",
                as_json=as_json,
                address=address,
            )
            heartbeat: Heartbeat | None = None
            if control is not None:
                public = advertise or _public_address(address, control)
                registration = Registration(identity, spec, public, region, zone, tls, reference)
                heartbeat = Heartbeat(control, registration, served, served.bandwidths)
                await heartbeat.start()
            try:
                await served.load()
                if heartbeat is not None:
                    await heartbeat.beat()
                announce(
                    "ready",
                    f"node {identity}: serving layers {spec.layers} of {spec.model}",
                    as_json=as_json,
                    node=identity,
                    address=address,
                    layers=str(spec.layers),
                    model=spec.model,
                )
                yield
                if heartbeat is not None:
                    await heartbeat.drain(grace)
            finally:
                if heartbeat is not None:
                    await heartbeat.close()
        finally:
            await served.close()
            if enrolled is not None:
                await enrolled.close()

    serve(service, exit_with_parent=exit_with_parent)


def _limits(
    changes: list[str], sessions: SessionLimits
) -> tuple[PlaneLimits, WireLimits, SessionLimits]:
    plane, wire, held = change_limits(changes, PlaneLimits(), DEFAULT_LIMITS, sessions)
    return plane, wire, held


def _stub_layers(num_layers: int | None, layers: LayerRange) -> int | None:
    if num_layers is not None and num_layers < layers.end:
        raise ConfigError(
            f"--stub-layers: {num_layers}; expected at least {layers.end}, where --layers ends",
            field="--stub-layers",
        )
    return num_layers


def _transformers(
    settings: config.Config,
    model: str | None,
    layers: LayerRange,
    dtype: DtypeName,
    threads: int | None,
    *,
    allow_unverified: bool,
) -> tuple[ShardSpec, Callable[[], ShardBackend], Reference | None]:
    """Find the model's files; gives what the shard will hold, how to load it, its reference."""
    if model is None:
        raise ConfigError(
            "--model is missing; expected a model directory or a hub name", field="--model"
        )
    files = resolve_model(
        model,
        layers,
        endpoint=settings.hub_endpoint,
        cache_dir=settings.cache_dir,
        progress=errors.is_terminal,
    )
    spec = ShardSpec(
        model=files.name,
        digest=files.digest,
        layers=layers,
        num_layers=files.num_layers,
        hidden_size=files.hidden_size,
        vocab_size=files.vocab_size,
        holds_embedding=layers.start == 0,
        holds_head=layers.end == files.num_layers,
        cache_bytes_per_token=0,
    )

    def open_backend() -> ShardBackend:
        from meshnet_node.hf.shard import TransformersShard

        return TransformersShard(
            files.directory,
            layers,
            model=files.name,
            digest=files.digest,
            dtype=dtype.value,
            threads=threads,
            allow_unverified=allow_unverified,
        )

    return spec, open_backend, _reference(files)


def _reference(files: ModelFiles) -> Reference | None:
    """Give the reference that lies beside the weights, if it is of this model."""
    reference = read_reference_file(files.directory)
    if reference is not None and reference.model_digest != files.digest:
        errors.print(
            f"{files.directory}: {REFERENCE_FILE} is of another digest of the model and not used;"
            " meshnet model reference makes it anew",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
        return None
    if reference is not None:
        reference.model = f"models/{files.name}"
    return reference


def _parse(parse: Callable[[str], _T], text: str, flag: str) -> _T:
    try:
        return parse(text)
    except ValueError as error:
        raise ConfigError(f"{flag}: {error}", field=flag) from None


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
