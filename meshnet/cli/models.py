"""``meshnet models``: which models the mesh serves, and where their layers lack nodes."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from meshnet.cli.mesh import ControlUrl, CredentialsDir, ask, layers_text, to_json
from meshnet.cli.output import Json, console, print_json
from meshnet.control.client import ControlClient
from meshnet.v1 import route_service_pb2 as routes_pb2

__all__ = ["coverage_bar", "models", "models_table"]

_BAR_WIDTH = 40
_NONE, _ONE, _MORE = "·", "▄", "█"


def models(
    control: ControlUrl = None, credentials: CredentialsDir = None, as_json: Json = False
) -> None:
    """Show the models, each with a bar over its layers: how many nodes are ready for each."""
    found = ask(control, credentials, ControlClient.list_models)
    if as_json:
        print_json(to_json(routes_pb2.ListModelsResponse(models=found)))
    elif not found:
        console.print("No node serves a model. Start one: meshnet node --help")
    else:
        console.print(models_table(found))
        console.print(f"{_NONE} no node ready  {_ONE} one  {_MORE} more", highlight=False)


def models_table(found: Sequence[routes_pb2.Model]) -> Table:
    """Give models as a table with their coverage."""
    table = Table("model", "digest", "layers", "coverage", "replicas", "uncovered", box=None)
    for model in found:
        table.add_row(
            model.name.removeprefix("models/"),
            model.digest[:12],
            str(model.layer_count),
            coverage_bar(model),
            str(min(model.ready_replicas, default=0)),
            ", ".join(layers_text(layers) for layers in model.uncovered) or "none",
        )
    return table


def coverage_bar(model: routes_pb2.Model, width: int = _BAR_WIDTH) -> str:
    """Draw the layers from the first to the last; a cell shows the worst of its layers.

    A layer that no route can cover counts as one without a node.
    """
    replicas = list(model.ready_replicas)
    for gap in model.uncovered:
        replicas[gap.start : gap.end] = [0] * (gap.end - gap.start)
    width = min(width, len(replicas))
    cells = []
    for cell in range(width):
        layers = replicas[cell * len(replicas) // width : (cell + 1) * len(replicas) // width]
        cells.append((_NONE, _ONE, _MORE)[min(2, min(layers))])
    return "".join(cells)
