"""``meshnet operator``: people who run the mesh by bearer token, and who does no more."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer
from rich.table import Table

from meshnet.cli.mesh import ControlUrl, CredentialsDir, ask, to_json
from meshnet.cli.output import Json, console, errors, print_json
from meshnet.cli.token import role_text
from meshnet.control.client import ControlClient
from meshnet.v1 import operator_service_pb2 as pb

__all__ = ["app"]

app = typer.Typer(
    help="Make, list and revoke operators with a bearer token for the JSON face.",
    no_args_is_help=True,
)

NameArgument = Annotated[str, typer.Argument(help="Of the operator.", metavar="NAME")]


class OperatorRole(StrEnum):
    """What an operator may do: each of them may what those before it may."""

    READ = "read"
    OPERATE = "operate"
    ADMIN = "admin"


@app.command("create")
def create(
    name: NameArgument,
    role: Annotated[
        OperatorRole,
        typer.Option(help="see the mesh; steer nodes too; admit and remove others too."),
    ],
    control: ControlUrl = None,
    credentials: CredentialsDir = None,
    as_json: Json = False,
) -> None:
    """Make an operator and print the token, this once: only its hash is kept.

    Example: meshnet operator create prometheus --role read
    """
    wanted = pb.Operator(name=f"operators/{name}", role=f"ROLE_{role.name}")
    made = ask(control, credentials, lambda client: client.create_operator(wanted))
    if as_json:
        print_json(to_json(made))
        return
    console.print(made.token, markup=False, highlight=False, soft_wrap=True)
    errors.print(
        'It goes with requests to the JSON face as "Authorization: Bearer TOKEN". It is shown '
        "this once.",
        markup=False,
        highlight=False,
    )


@app.command("list")
def list_operators(
    control: ControlUrl = None, credentials: CredentialsDir = None, as_json: Json = False
) -> None:
    """List operators with a token, and those who were revoked."""
    found = ask(control, credentials, ControlClient.list_operators)
    if as_json:
        print_json(to_json(pb.ListOperatorsResponse(operators=found)))
        return
    if not found:
        console.print("No operator has a token. Make one: meshnet operator create --help")
        return
    table = Table("operator", "role", "created", box=None)
    for operator in found:
        table.add_row(
            operator.name.removeprefix("operators/"),
            "revoked" if operator.revoked else role_text(operator.role),
            operator.create_time.ToJsonString(),
        )
    console.print(table)


@app.command("revoke")
def revoke(
    name: NameArgument,
    control: ControlUrl = None,
    credentials: CredentialsDir = None,
    as_json: Json = False,
) -> None:
    """Refuse an operator at once: the token, and every certificate of this name.

    That goes for operators of `meshnet login` too.
    """
    revoked = ask(control, credentials, lambda client: client.revoke_operator(name))
    if as_json:
        print_json(to_json(pb.RevokeOperatorResponse(operator=revoked)))
    else:
        console.print(f"operator {name} is revoked", highlight=False)
