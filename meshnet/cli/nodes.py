"""``meshnet nodes``: see and steer the nodes of the mesh."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from meshnet.cli.mesh import ControlUrl, ask, layers_text, to_json
from meshnet.cli.output import Json, console, print_json
from meshnet.errors import ConfigError
from meshnet.topology import parse_node_id
from meshnet.v1 import node_service_pb2 as nodes_pb2

__all__ = ["app"]

app = typer.Typer(help="See and steer the nodes of the mesh.", no_args_is_help=True)

NodeArgument = Annotated[str, typer.Argument(help="Id of the node, as `meshnet nodes list` shows.")]


@app.command("list")
def list_nodes(
    control: ControlUrl = None,
    model: Annotated[str | None, typer.Option(help="Only nodes of this model.")] = None,
    as_json: Json = False,
) -> None:
    """List the nodes: their layers, state, load and address."""
    found = ask(control, lambda client: client.list_nodes(model=f"models/{model}" if model else ""))
    if as_json:
        print_json([to_json(node) for node in found])
        return
    if not found:
        console.print("No node is registered. Start one: meshnet node --help")
        return
    table = Table("node", "state", "model", "layers", "sessions", "queue", "address", box=None)
    for node in found:
        for shard in node.shards or [None]:
            table.add_row(
                node.name.removeprefix("nodes/"),
                state_text(node.state),
                shard.model.removeprefix("models/") if shard else "",
                layers_text(shard.layers) if shard else "",
                str(node.load.active_sessions),
                str(node.load.queue_depth),
                node.endpoints[0].uri if node.endpoints else "",
            )
    console.print(table)


@app.command("get")
def get_node(node: NodeArgument, control: ControlUrl = None, as_json: Json = False) -> None:
    """Show everything known of one node."""
    node_id = _node_id(node)
    found = ask(control, lambda client: client.get_node(node_id))
    _show(found, as_json)


@app.command("drain")
def drain_node(
    node: NodeArgument,
    control: ControlUrl = None,
    reason: Annotated[str, typer.Option(help="Shown to other operators.")] = "",
    as_json: Json = False,
) -> None:
    """Keep new sessions off a node; those it holds go on."""
    node_id = _node_id(node)
    drained = ask(control, lambda client: client.drain(node_id, reason=reason))
    if as_json:
        print_json(to_json(drained))
    else:
        console.print(f"node {node} is {state_text(drained.state)}", highlight=False)


def state_text(state: nodes_pb2.NodeState) -> str:
    """Write a state as people say it."""
    return nodes_pb2.NodeState.Name(state).removeprefix("NODE_STATE_").lower()


def _show(node: nodes_pb2.Node, as_json: bool) -> None:
    if as_json:
        print_json(to_json(node))
        return
    table = Table(show_header=False, box=None)
    table.add_row("node", node.name.removeprefix("nodes/"))
    table.add_row("state", state_text(node.state))
    for shard in node.shards:
        model = shard.model.removeprefix("models/")
        table.add_row("shard", f"{model}, layers {layers_text(shard.layers)}")
        table.add_row("digest", shard.model_digest)
    for endpoint in node.endpoints:
        table.add_row("address", endpoint.uri)
    if node.HasField("location"):
        table.add_row("region", node.location.region)
    table.add_row("sessions", str(node.load.active_sessions))
    table.add_row("queue", str(node.load.queue_depth))
    table.add_row(
        "cache", f"{node.load.kv_cache_used_tokens} of {node.load.kv_cache_capacity_tokens} tokens"
    )
    table.add_row("version", node.software_version)
    table.add_row("registered", node.create_time.ToJsonString())
    table.add_row("heartbeat", node.heartbeat_time.ToJsonString())
    console.print(table)


def _node_id(node: str) -> str:
    """Take an id or a resource name; gives the id."""
    try:
        return parse_node_id(node.removeprefix("nodes/"))
    except ValueError as error:
        raise ConfigError(str(error), field="NODE") from None
