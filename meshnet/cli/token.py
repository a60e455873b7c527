"""``meshnet token``: join tokens, by which nodes, gateways and operators are admitted."""

from __future__ import annotations

import time
from enum import StrEnum
from typing import Annotated

import typer
from rich.table import Table

from meshnet.cli.mesh import ControlUrl, CredentialsDir, ask, layers_text, to_json
from meshnet.cli.output import Json, console, errors, print_json
from meshnet.control.client import ControlClient
from meshnet.errors import Code, ConfigError, MeshError
from meshnet.join import JoinText
from meshnet.topology import parse_layers
from meshnet.v1 import enrollment_service_pb2 as pb
from meshnet.v1 import types_pb2

__all__ = ["app", "role_text", "until_text"]

app = typer.Typer(help="Make, list and delete join tokens.", no_args_is_help=True)

_WEEK_S = 7 * 24 * 3600


class RoleName(StrEnum):
    """What those who join may do."""

    NODE = "node"
    GATEWAY = "gateway"
    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"


@app.command("create")
def create(
    role: Annotated[RoleName, typer.Option(help="What those who join by it may do.")],
    model: Annotated[
        str, typer.Option(help="Of a node: the model to serve, ORG/NAME[@REVISION].")
    ] = "",
    layers: Annotated[
        str | None, typer.Option(help="Of a node: the layers to serve, START:END.")
    ] = None,
    name: Annotated[
        str, typer.Option(help="Names that may join, * for any characters, as gpu-eu-*.")
    ] = "",
    uses: Annotated[int, typer.Option(min=0, help="How many may join; 0 for any number.")] = 1,
    ttl: Annotated[
        float, typer.Option(min=1, max=_WEEK_S, help="Seconds for which it is good, up to 7 days.")
    ] = 3600.0,
    control: ControlUrl = None,
    credentials: CredentialsDir = None,
    as_json: Json = False,
) -> None:
    """Make a token and print it, this once: only its hash is kept.

    Example: meshnet token create --role node --model ORG/NAME --layers 0:10
    """
    wanted = pb.JoinToken(role=f"ROLE_{role.name}", name_pattern=name, max_uses=uses, model=model)
    wanted.ttl.FromMilliseconds(int(ttl * 1000))
    if layers is not None:
        try:
            parsed = parse_layers(layers)
        except ValueError as error:
            raise ConfigError(f"--layers: {error}", field="--layers") from None
        wanted.layers.CopyFrom(types_pb2.LayerRange(start=parsed.start, end=parsed.end))
    made = ask(control, credentials, lambda client: client.create_join_token(wanted))
    text = _text(made)
    if as_json:
        print_json({**to_json(made.join_token), "token": text})
        return
    console.print(text, markup=False, highlight=False, soft_wrap=True)
    times = {0: "Any number", 1: "One"}.get(uses, f"{uses}")
    command = "meshnet login" if role in ("read", "operate", "admin") else f"meshnet {role} --join"
    errors.print(
        f"{times} may join by it until {until_text(made.join_token.expire_time.ToSeconds())}: "
        f"{command} TOKEN. It is shown this once.",
        markup=False,
        highlight=False,
    )


@app.command("list")
def list_tokens(
    control: ControlUrl = None, credentials: CredentialsDir = None, as_json: Json = False
) -> None:
    """List the join tokens, without their secrets."""
    tokens = ask(control, credentials, ControlClient.list_join_tokens)
    if as_json:
        print_json({"joinTokens": [to_json(token) for token in tokens]})
        return
    if not tokens:
        console.print("There is no join token. Make one: meshnet token create --role node")
        return
    table = Table("token", "role", "names", "joined", "until", "model", "layers", box=None)
    for token in tokens:
        table.add_row(
            token.name.removeprefix("joinTokens/"),
            role_text(token.role),
            token.name_pattern or "any",
            f"{token.used} of {token.max_uses or 'any'}",
            until_text(token.expire_time.ToSeconds()),
            token.model,
            layers_text(token.layers) if token.HasField("layers") else "",
        )
    console.print(table)


@app.command("delete")
def delete(
    token: Annotated[str, typer.Argument(help="As `meshnet token list` shows.", metavar="TOKEN")],
    control: ControlUrl = None,
    credentials: CredentialsDir = None,
    as_json: Json = False,
) -> None:
    """Delete a token: nobody joins by it any more. Who did stays: see meshnet member remove."""
    public = token.removeprefix("joinTokens/")
    ask(control, credentials, lambda client: client.delete_join_token(public))
    if as_json:
        print_json(to_json(pb.DeleteJoinTokenResponse()))
    else:
        console.print(f"join token {public} is deleted", highlight=False)


def role_text(role: pb.Role) -> str:
    """Write a role as people say it."""
    return pb.Role.Name(role).removeprefix("ROLE_").lower()


def until_text(seconds: float) -> str:
    """Write seconds since 1970 in local time; ended if that is over."""
    text = time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
    return text if seconds > time.time() else f"ended {text}"


def _text(made: pb.CreateJoinTokenResponse) -> str:
    """Put a token together.

    Raises:
        MeshError: the control plane does not say where it is.
    """
    public, _, secret = made.token.partition(".")
    if not made.http_addresses:
        raise MeshError(
            Code.FAILED_PRECONDITION,
            "the control plane does not know where others reach it: start it with "
            "--advertise-control HOST",
        )
    return JoinText(public, secret, made.ca_spki_sha256, tuple(made.http_addresses)).text()
