"""``meshnet member``: see who has joined the mesh, and remove somebody."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from meshnet.cli.mesh import ControlUrl, CredentialsDir, ask, to_json
from meshnet.cli.output import Json, console, print_json
from meshnet.cli.token import role_text, until_text
from meshnet.control.client import ControlClient
from meshnet.v1 import enrollment_service_pb2 as pb

__all__ = ["app"]

app = typer.Typer(help="See who has joined the mesh, and remove somebody.", no_args_is_help=True)


@app.command("list")
def list_members(
    control: ControlUrl = None, credentials: CredentialsDir = None, as_json: Json = False
) -> None:
    """List who has joined: nodes, gateways and operators."""
    members = ask(control, credentials, ControlClient.list_members)
    if as_json:
        print_json({"members": [to_json(member) for member in members]})
        return
    if not members:
        console.print("Nobody has joined. Make a token: meshnet token create --help")
        return
    table = Table("member", "role", "by token", "joined", "certificate until", box=None)
    for member in members:
        table.add_row(
            member.name.removeprefix("members/"),
            role_text(member.role),
            member.join_token.removeprefix("joinTokens/"),
            until_text(member.create_time.ToSeconds()).removeprefix("ended "),
            until_text(member.expire_time.ToSeconds()),
        )
    console.print(table)


@app.command("remove")
def remove(
    member: Annotated[
        str,
        typer.Argument(
            help="ROLE.NAME, as `meshnet member list` shows: node.gpu-1", metavar="MEMBER"
        ),
    ],
    control: ControlUrl = None,
    credentials: CredentialsDir = None,
    as_json: Json = False,
) -> None:
    """Remove a member: the control plane hears it no more, and its name is free for another key.

    Nodes take its certificate until that ends, a day at most by default.
    """
    name = member.removeprefix("members/")
    ask(control, credentials, lambda client: client.delete_member(name))
    if as_json:
        print_json(to_json(pb.DeleteMemberResponse()))
    else:
        console.print(f"{name} is removed", highlight=False)
