"""``meshnet control``: the control plane as a process of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer

from meshnet import __version__
from meshnet.authority import AUTHORITY_FILE, DEFAULT_LIFE_S, DEFAULT_OVERLAP_S, Authority
from meshnet.cli.output import Json, console, print_json
from meshnet.cli.secured import (
    AdvertiseControl,
    CertificateLife,
    Insecure,
    RequireProbe,
    State,
)
from meshnet.cli.serving import ExitWithParent, Limits, announce, serve, split_address
from meshnet.control.app import API_TITLE, ControlServer
from meshnet.control.limits import DEFAULT_LIMITS
from meshnet.control.openapi import openapi
from meshnet.control.settings import ControlSettings
from meshnet.control.state import ADMIN_FOLDER
from meshnet.control.stubs import SERVICES
from meshnet.errors import ConfigError
from meshnet.limits import change_limits

__all__ = ["app"]

app = typer.Typer(invoke_without_command=True)


@app.callback()
def control(
    context: typer.Context,
    listen: Annotated[
        str, typer.Option(help="HOST:PORT of the JSON face, /healthz and /metrics.")
    ] = "127.0.0.1:7070",
    grpc_listen: Annotated[
        str, typer.Option(help="HOST:PORT of the gRPC face.")
    ] = "127.0.0.1:7071",
    lease_ttl: Annotated[
        float, typer.Option(min=0.5, max=3600, help="Seconds that a node may be silent.")
    ] = 10.0,
    store: Annotated[
        str,
        typer.Option(
            help="Where nodes are kept: memory, sqlite:PATH (outlives a restart), or "
            "etcd://HOST:PORT[,HOST:PORT...] (shared by replicas; etcds:// with TLS)."
        ),
    ] = "memory",
    require_grants: Annotated[
        bool,
        typer.Option(
            "--require-grants",
            help="Nodes take sessions only along routes that this control plane has granted.",
        ),
    ] = False,
    require_probe: RequireProbe = None,
    state: State = None,
    advertise_control: AdvertiseControl = "",
    certificate_life: CertificateLife = DEFAULT_LIFE_S,
    insecure: Insecure = False,
    limit: Limits = None,
    as_json: Json = False,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Run the control plane: nodes register here, gateways ask here for routes.

    Examples:
      meshnet control

      meshnet control --listen 0.0.0.0:7070 --grpc-listen 0.0.0.0:7071 --state DIR
        --advertise-control HOST
    """
    if context.invoked_subcommand is not None:
        return
    http_host, http_port = split_address(listen, "--listen", 7070)
    grpc_host, grpc_port = split_address(grpc_listen, "--grpc-listen", 7071)
    settings = ControlSettings(
        http_host=http_host,
        http_port=http_port,
        grpc_host=grpc_host,
        grpc_port=grpc_port,
        lease_ttl_s=lease_ttl,
        store=store,
        require_grants=require_grants,
        state=state,
        advertise=advertise_control,
        certificate_life_s=certificate_life,
        insecure=insecure,
        require_probe=require_probe,
        limits=change_limits(limit or [], DEFAULT_LIMITS)[0],
    )

    @asynccontextmanager
    async def service() -> AsyncIterator[None]:
        server = ControlServer(settings)
        http, grpc = server.urls(await server.start())
        admin = "" if state is None else f"; its operator's credentials: {state / ADMIN_FOLDER}"
        announce(
            "listening",
            f"control plane: JSON on {http}, gRPC on {grpc}{admin}",
            as_json=as_json,
            http=http,
            grpc=grpc,
        )
        try:
            yield
        finally:
            await server.close()

    serve(service, exit_with_parent=exit_with_parent)


@app.command("rotate-ca")
def rotate_ca(
    state: Annotated[
        Path,
        typer.Option(help="State directory of the control plane.", exists=True, file_okay=False),
    ],
    overlap: Annotated[
        float,
        typer.Option(min=0, help="Seconds for which the old root is trusted beside the new one."),
    ] = DEFAULT_OVERLAP_S,
) -> None:
    """Certify by a new key from now on; the mesh goes on without a break.

    A control plane that runs notices it within seconds. Members get the new root when they
    renew, and until then accept what it certifies by a proof of the old one. With --overlap 0,
    for a key that was stolen, everybody must join again.
    """
    if not (state / AUTHORITY_FILE).exists():
        raise ConfigError(f"--state: {state} holds no authority", field="--state")
    authority = Authority(state)
    authority.rotate(overlap)
    console.print(
        f"the new root's key has SHA-256 {authority.spki_sha256}", highlight=False, soft_wrap=True
    )


@app.command("openapi")
def print_openapi() -> None:
    """Print the JSON face as OpenAPI 3.1, as a running one answers at /openapi.json."""
    print_json(openapi(SERVICES, title=API_TITLE, version=__version__))
