"""The ``meshnet`` command: its groups, its errors, its exit codes."""

from __future__ import annotations

import logging
import sys
from importlib.metadata import entry_points
from typing import Annotated

import typer

from meshnet import __version__, config
from meshnet.cli import (
    chat,
    control,
    demo,
    key,
    login,
    member,
    models,
    nodes,
    operator,
    references,
    route,
    status,
    token,
    up,
)
from meshnet.cli.given import want_values
from meshnet.cli.output import errors
from meshnet.errors import ConfigError, MeshError

__all__ = ["app", "main"]

app = typer.Typer(
    name="meshnet",
    help="Make several machines one language-model server.",
    epilog="Start with: meshnet demo",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"meshnet {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    log_level: Annotated[
        str | None,
        typer.Option("--log-level", help="debug, info, warning or error; else MESHNET_LOG."),
    ] = None,
) -> None:
    level = (log_level or config.load().log_level).upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ConfigError(
            f"--log-level: {log_level!r}; expected debug, info, warning or error",
            field="--log-level",
        )
    logging.basicConfig(
        level=level, stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )


def _add_commands() -> None:
    app.command()(demo.demo)
    app.command()(up.up)
    app.add_typer(control.app, name="control")
    app.command()(chat.chat)
    app.command()(route.route)
    app.command()(models.models)
    app.command()(status.status)
    app.add_typer(nodes.app, name="nodes")
    app.add_typer(token.app, name="token")
    app.add_typer(member.app, name="member")
    app.command()(login.login)
    app.add_typer(operator.app, name="operator")
    app.add_typer(references.app, name="references")
    app.add_typer(key.app, name="key")
    for entry in sorted(entry_points(group="meshnet.commands"), key=lambda entry: entry.name):
        command = entry.load()
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=entry.name)
        else:
            app.command(name=entry.name)(command)
    want_values(app)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; ends the process.

    Exit codes: 0 done, 1 failed, 2 wrong use (a flag, file, address or variable), 130
    interrupted. An error is one line on standard error.
    """
    _add_commands()
    try:
        app(args=arguments)
    except MeshError as error:
        errors.print(f"meshnet: error: {error.message}", markup=False, highlight=False)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
