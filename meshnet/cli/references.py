"""``meshnet references``: what models are to compute, as nodes are judged by it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from meshnet.cli.mesh import ControlUrl, CredentialsDir, ask, to_json
from meshnet.cli.output import Json, console, print_json
from meshnet.control.client import ControlClient
from meshnet.control.reference_file import REFERENCE_FILE, read_reference_file
from meshnet.errors import ConfigError
from meshnet.v1 import reference_service_pb2 as pb

__all__ = ["app"]

app = typer.Typer(help="See and give what models are to compute.", no_args_is_help=True)


@app.command("list")
def list_references(
    control: ControlUrl = None, credentials: CredentialsDir = None, as_json: Json = False
) -> None:
    """List the models that have a reference: only nodes that match it serve them."""
    found = ask(control, credentials, ControlClient.list_references)
    if as_json:
        print_json(to_json(pb.ListReferencesResponse(references=found)))
        return
    if not found:
        console.print("No model has a reference: nodes serve unverified. See meshnet model --help")
        return
    table = Table("model", "digest", "layers", "computed in", "registered", box=None)
    for reference in found:
        table.add_row(
            reference.model.removeprefix("models/"),
            reference.model_digest,
            str(reference.layer_count),
            ", ".join(variant.dtype for variant in reference.variants),
            reference.create_time.ToJsonString(),
        )
    console.print(table)


@app.command("register")
def register(
    directory: Annotated[
        Path, typer.Argument(help=f"Model directory with {REFERENCE_FILE}.", metavar="DIR")
    ],
    control: ControlUrl = None,
    credentials: CredentialsDir = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Take the place of another one of the same digest.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Give the control plane a model's reference, as ``meshnet model reference`` made it."""
    reference = read_reference_file(directory)
    if reference is None:
        raise ConfigError(
            f"{directory}: no {REFERENCE_FILE}; make it with: meshnet model reference {directory}",
            field="DIR",
        )
    kept = ask(
        control, credentials, lambda client: client.put_reference(reference, replace=replace)
    )
    if as_json:
        print_json(to_json(pb.PutReferenceResponse(reference=kept)))
    else:
        name = kept.model.removeprefix("models/")
        console.print(f"{name} is served by nodes alone that match {kept.model_digest[:12]}")


@app.command("delete")
def delete(
    digest: Annotated[str, typer.Argument(help="Digest of the model, as listed.")],
    control: ControlUrl = None,
    credentials: CredentialsDir = None,
    as_json: Json = False,
) -> None:
    """Forget a reference; nodes of its digest are judged no more."""
    ask(control, credentials, lambda client: client.delete_reference(digest))
    if as_json:
        print_json(to_json(pb.DeleteReferenceResponse()))
    else:
        console.print(f"the reference of {digest[:12]} is deleted", highlight=False)
