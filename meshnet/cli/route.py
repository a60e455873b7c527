"""``meshnet route``: the route that a generation would take now."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from meshnet.cli.mesh import ControlUrl, ask, layers_text, to_json
from meshnet.cli.output import Json, console, print_json

__all__ = ["route"]


def route(
    model: Annotated[str, typer.Argument(help="Name of the model.")],
    control: ControlUrl = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="Id of a node not to use; may be repeated.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the route that a generation of MODEL would take now."""
    selected = ask(
        control, lambda client: client.select_route(f"models/{model}", exclude=exclude or ())
    )
    if as_json:
        print_json(to_json(selected))
        return
    table = Table("hop", "node", "layers", "address", box=None)
    for number, hop in enumerate(selected.hops, start=1):
        table.add_row(
            str(number), hop.node.removeprefix("nodes/"), layers_text(hop.layers), hop.endpoint.uri
        )
    console.print(table)
