"""``meshnet gateway``: an OpenAI endpoint in front of the mesh."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer

from meshnet import config
from meshnet.authority import DEFAULT_LIFE_S
from meshnet.cli.join import Join, default_name, join_mesh
from meshnet.cli.output import Json, errors
from meshnet.cli.secured import (
    AdvertiseControl,
    CertificateLife,
    Insecure,
    RequireProbe,
    State,
)
from meshnet.cli.serving import ExitWithParent, Limits, announce, serve, split_address
from meshnet.cli.tls import TlsCa, TlsCert, TlsKey, tls_credentials
from meshnet.control.limits import DEFAULT_LIMITS as CONTROL_LIMITS
from meshnet.control.reference_file import read_reference_file
from meshnet.control.settings import ControlSettings
from meshnet.errors import ConfigError
from meshnet.identity import Role
from meshnet.limits import change_limits
from meshnet.model_hub import resolve_tokenizer
from meshnet.operations import RebuildMode
from meshnet.tls import TlsFiles
from meshnet.v1 import reference_service_pb2 as references_pb2
from meshnet_gateway.app import Gateway, GatewaySettings
from meshnet_gateway.limits import DEFAULT_LIMITS
from meshnet_gateway.model_text import ModelText
from meshnet_gateway.pipeline import PipelineSettings
from meshnet_gateway.recoveries import RecoverySettings
from meshnet_gateway.window import MAX_WINDOW

__all__ = ["gateway"]


def gateway(
    model: Annotated[
        list[str],
        typer.Option(help="Model directory or hub name, for tokenizer and template; repeatable."),
    ],
    listen: Annotated[str, typer.Option(help="HOST:PORT of the OpenAI endpoint.")] = (
        "127.0.0.1:8080"
    ),
    join: Join = None,
    name: Annotated[
        str | None,
        typer.Option(
            help="With --join, the gateway's name.", show_default="from host name and port"
        ),
    ] = None,
    control: Annotated[
        str | None,
        typer.Option(help="Control plane; without one, the gateway runs it inside."),
    ] = None,
    control_listen: Annotated[
        str, typer.Option(help="HOST:PORT of the inside control plane's JSON face.")
    ] = "127.0.0.1:7070",
    control_grpc_listen: Annotated[
        str, typer.Option(help="HOST:PORT of the inside control plane's gRPC face.")
    ] = "127.0.0.1:7071",
    region: Annotated[str, typer.Option(help="Region of the gateway, as eu-central.")] = "",
    window: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_WINDOW,
            help="Chunks of a prompt in flight; 1 is one after the other.",
            show_default="from measured stage times",
        ),
    ] = None,
    recovery: Annotated[
        RebuildMode,
        typer.Option(
            help="How a lost node's cache is computed again: in chunks of a prompt's length, or in"
            " the very steps of the first time, which gives the same bits in bfloat16 too."
        ),
    ] = RebuildMode.FAST,
    spare_wait: Annotated[
        float,
        typer.Option(
            min=0.0, help="Seconds that a session, new or broken, waits for nodes with its layers."
        ),
    ] = RecoverySettings().spare_wait_s,
    lease_ttl: Annotated[
        float, typer.Option(min=0.5, max=3600, help="Seconds that a node may be silent.")
    ] = 10.0,
    api_keys: Annotated[
        str | None,
        typer.Option(
            metavar="STORE",
            help="Store of the API keys that clients need, as `meshnet key --store`;"
            " else MESHNET_API_KEYS.",
            show_default="none: clients need no key",
        ),
    ] = None,
    require_grants: Annotated[
        bool,
        typer.Option(
            "--require-grants",
            help="Of the inside control plane: nodes take sessions only along routes that it"
            " has granted.",
        ),
    ] = False,
    require_probe: RequireProbe = None,
    https_cert: Annotated[
        Path | None, typer.Option(help="Certificate in PEM, for HTTPS to clients.")
    ] = None,
    https_key: Annotated[Path | None, typer.Option(help="Its key in PEM, no passphrase.")] = None,
    behind_tls_proxy: Annotated[
        bool,
        typer.Option(
            "--behind-tls-proxy",
            help="A proxy in front serves HTTPS to clients: listen where other machines can reach"
            " it, with plain HTTP, and let /metrics want a key from everybody.",
        ),
    ] = False,
    limit: Limits = None,
    state: State = None,
    advertise_control: AdvertiseControl = "",
    certificate_life: CertificateLife = DEFAULT_LIFE_S,
    insecure: Insecure = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    as_json: Json = False,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Serve models over the OpenAI API, from nodes that registered at the control plane.

    Example: meshnet gateway --model ./smollm2

    Then: curl http://127.0.0.1:8080/v1/models
    """
    settings = config.load()
    host, port = split_address(listen, "--listen", 8080)
    http_host, http_port = split_address(control_listen, "--control-listen", 7070)
    grpc_host, grpc_port = split_address(control_grpc_listen, "--control-grpc-listen", 7071)
    tls = tls_credentials(tls_cert, tls_key, tls_ca)
    member = name or default_name("gateway", port)
    enrolled = join_mesh(join, Role.GATEWAY, member, settings, has_tls=tls is not None)
    if enrolled is not None:
        tls, control = enrolled.credentials, control or enrolled.membership.control_url
    if state is not None and (control is not None or tls is not None):
        raise ConfigError(
            "--state is of a control plane inside the gateway: leave out --control, --join and "
            "--tls-*",
            field="--state",
        )
    if require_grants and control is not None:
        raise ConfigError(
            "--require-grants is of a control plane inside the gateway: with --control or --join"
            " that one decides",
            field="--require-grants",
        )
    # Without a control plane inside, a limit that is its alone is nobody's.
    inside = () if control is not None else (CONTROL_LIMITS,)
    limits, *control_limits = change_limits(limit or (), DEFAULT_LIMITS, *inside)
    https = None
    if https_cert is not None or https_key is not None:
        https = TlsFiles(https_cert, https_key, flags="--https")
    found = [_load(source, settings) for source in model]
    texts = {of: text for of, text, _ in found}
    if len(texts) < len(model):
        raise ConfigError("--model: two of them have the same name in the mesh", field="--model")
    gateway_settings = GatewaySettings(
        host=host,
        port=port,
        control_url=control,
        control=ControlSettings(
            http_host=http_host,
            http_port=http_port,
            grpc_host=grpc_host,
            grpc_port=grpc_port,
            lease_ttl_s=lease_ttl,
            require_grants=require_grants,
            limits=control_limits[0] if control_limits else CONTROL_LIMITS,
            state=state,
            advertise=advertise_control,
            certificate_life_s=certificate_life,
            insecure=insecure,
            require_probe=require_probe,
            references=tuple(reference for _, _, reference in found if reference is not None),
        ),
        region=region,
        api_keys=api_keys or settings.api_keys,
        behind_tls_proxy=behind_tls_proxy,
        insecure=insecure,
        tls=tls,
        limits=limits,
        https=https,
        recovery=RecoverySettings(mode=recovery, spare_wait_s=spare_wait),
        pipeline=PipelineSettings(chunk_tokens=settings.chunk_tokens, window=window),
    )

    scheme = "http" if https is None else "https"

    @asynccontextmanager
    async def service() -> AsyncIterator[None]:
        served = Gateway(gateway_settings, texts, settings.compression)
        try:
            if enrolled is not None:
                enrolled.start()
            address = await served.start()
            announce(
                "listening",
                f"gateway: {', '.join(texts)} on {scheme}://{address}/v1,"
                f" control plane {served.control_grpc}",
                as_json=as_json,
                http=f"{scheme}://{address}",
                control=served.control_grpc,
                control_http=served.control_http,
                models=list(texts),
            )
            yield
        finally:
            await served.close()
            if enrolled is not None:
                await enrolled.close()

    serve(service, exit_with_parent=exit_with_parent)


def _load(
    source: str, settings: config.Config
) -> tuple[str, ModelText, references_pb2.Reference | None]:
    """Find a model's text files; gives its name in the mesh, its tokenizer and its reference."""
    files = resolve_tokenizer(source, endpoint=settings.hub_endpoint, progress=errors.is_terminal)
    reference = read_reference_file(files.directory)
    if reference is not None:
        reference.model = f"models/{files.name}"
    return files.name, ModelText.load(files.directory), reference
