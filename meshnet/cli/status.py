"""``meshnet status``: the health of the control plane and the coverage of models."""

from __future__ import annotations

import typer

from meshnet.cli.mesh import ControlUrl, CredentialsDir, ask, to_json
from meshnet.cli.models import models_table
from meshnet.cli.output import Json, console, print_json
from meshnet.control.client import ControlClient
from meshnet.v1 import route_service_pb2 as routes_pb2

__all__ = ["status"]


def status(
    control: ControlUrl = None, credentials: CredentialsDir = None, as_json: Json = False
) -> None:
    """Show whether the mesh can serve: nodes by state, models and their uncovered layers.

    Exit code 1 if a model has uncovered layers or the control plane does not serve.
    """
    found, models = ask(control, credentials, _ask_both)
    if as_json:
        print_json(to_json(found))
    else:
        _show(found, models)
    if not found.serving or found.uncovered_models:
        raise typer.Exit(1)


async def _ask_both(
    client: ControlClient,
) -> tuple[routes_pb2.GetStatusResponse, list[routes_pb2.Model]]:
    return await client.get_status(), await client.list_models()


def _show(found: routes_pb2.GetStatusResponse, models: list[routes_pb2.Model]) -> None:
    counts = ", ".join(
        f"{count} {state.removeprefix('NODE_STATE_').lower()}"
        for state, count in sorted(found.node_counts.items())
    )
    serving = "serving" if found.serving else "not serving"
    console.print(
        f"control plane {found.software_version}: {serving}; nodes: {counts or 'none'}",
        highlight=False,
    )
    if not models:
        return
    console.print(models_table(models))
