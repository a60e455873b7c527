"""``meshnet nodes``: see and steer the nodes of the mesh."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from meshnet.cli.mesh import (
    ControlUrl,
    CredentialsDir,
    NodeArgument,
    ask,
    layers_text,
    to_json,
    to_node_id,
)
from meshnet.cli.output import Json, console, print_json
from meshnet.cli.watch import watch
from meshnet.control.client import ControlClient
from meshnet.errors import Code, ConfigError, MeshError
from meshnet.v1 import node_service_pb2 as nodes_pb2

__all__ = ["app"]

app = typer.Typer(help="See and steer the nodes of the mesh.", no_args_is_help=True)
app.command("watch")(watch)

_LEFT = (nodes_pb2.NODE_STATE_DRAINED, nodes_pb2.NODE_STATE_LOST)
_LABEL_TRIES = 3


@app.command("list")
def list_nodes(
    control: ControlUrl = None,
    credentials: CredentialsDir = None,
    model: Annotated[str | None, typer.Option(help="Only nodes of this model.")] = None,
    region: Annotated[str, typer.Option(help="Only nodes in this region.")] = "",
    as_json: Json = False,
) -> None:
    """List the nodes: their layers, state, load and address."""
    request = nodes_pb2.ListNodesRequest(model=f"models/{model}" if model else "", region=region)
    page = ask(control, credentials, lambda client: client.list_nodes_page(request))
    if as_json:
        print_json(to_json(page))
        return
    found = page.nodes
    if not found:
        console.print("No node is registered. Start one: meshnet node --help")
        return
    table = Table(
        "node", "state", "numbers", "model", "layers", "sessions", "queue", "address", box=None
    )
    for node in found:
        for shard in node.shards or [None]:
            table.add_row(
                node.name.removeprefix("nodes/"),
                state_text(node),
                numbers_text(node.verification),
                shard.model.removeprefix("models/") if shard else "",
                layers_text(shard.layers) if shard else "",
                str(node.load.active_sessions),
                str(node.load.queue_depth),
                node.endpoints[0].uri if node.endpoints else "",
            )
    console.print(table)


@app.command("get")
def get_node(
    node: NodeArgument,
    control: ControlUrl = None,
    credentials: CredentialsDir = None,
    as_json: Json = False,
) -> None:
    """Show everything known of one node."""
    node_id = to_node_id(node)
    found = ask(control, credentials, lambda client: client.get_node(node_id))
    if as_json:
        print_json(to_json(nodes_pb2.GetNodeResponse(node=found)))
    else:
        _show(found)


@app.command("drain")
def drain_node(
    node: NodeArgument,
    control: ControlUrl = None,
    credentials: CredentialsDir = None,
    reason: Annotated[str, typer.Option(help="Shown to other operators.")] = "",
    grace: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds after which sessions are cut off.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Keep new sessions off a node for good; gateways move those it holds to other nodes.

    The node is drained when it holds none, or when the grace is over; it can be stopped then.
    """
    node_id = to_node_id(node)
    drained = ask(
        control, credentials, lambda client: client.drain(node_id, reason=reason, grace_s=grace)
    )
    if as_json:
        print_json(to_json(nodes_pb2.DrainNodeResponse(node=drained)))
    else:
        console.print(f"node {node_id} is {state_text(drained)}", highlight=False)


@app.command("cordon")
def cordon_node(
    node: NodeArgument,
    control: ControlUrl = None,
    credentials: CredentialsDir = None,
    as_json: Json = False,
) -> None:
    """Keep a node out of new routes until it is uncordoned; what it holds goes on."""
    _cordon(node, control, credentials, as_json=as_json, cordoned=True)


@app.command("uncordon")
def uncordon_node(
    node: NodeArgument,
    control: ControlUrl = None,
    credentials: CredentialsDir = None,
    as_json: Json = False,
) -> None:
    """Let a cordoned node into new routes again."""
    _cordon(node, control, credentials, as_json=as_json, cordoned=False)


@app.command("label")
def label_node(
    node: NodeArgument,
    changes: Annotated[
        list[str], typer.Argument(help="KEY=VALUE sets a label, KEY- removes it.", metavar="LABEL")
    ],
    control: ControlUrl = None,
    credentials: CredentialsDir = None,
    as_json: Json = False,
) -> None:
    """Set and remove labels of a node.

    Example: meshnet nodes label node-1 rack=7 owner-
    """
    node_id = to_node_id(node)
    wanted = dict(_change(text) for text in changes)
    updated = ask(control, credentials, lambda client: _label(client, node_id, wanted))
    if as_json:
        print_json(to_json(nodes_pb2.UpdateNodeResponse(node=updated)))
    else:
        console.print(f"node {node_id}: {labels_text(updated) or 'no labels'}", highlight=False)


@app.command("remove")
def remove_node(
    node: NodeArgument,
    control: ControlUrl = None,
    credentials: CredentialsDir = None,
    force: Annotated[bool, typer.Option("--force", help="Even if it has not drained.")] = False,
    as_json: Json = False,
) -> None:
    """Forget a node that has drained or is lost. One that still runs registers again."""
    node_id = to_node_id(node)
    ask(control, credentials, lambda client: _remove(client, node_id, force=force))
    if as_json:
        print_json(to_json(nodes_pb2.DeregisterNodeResponse()))
    else:
        console.print(f"node {node_id} is removed", highlight=False)


def state_text(node: nodes_pb2.Node) -> str:
    """Write a node's state as people say it."""
    state = nodes_pb2.NodeState.Name(node.state).removeprefix("NODE_STATE_").lower()
    return f"{state}, cordoned" if node.cordoned else state


def numbers_text(found: nodes_pb2.Verification) -> str:
    """Say what is known of a node's numbers: ``verified``, or why it is not."""
    if found.state == nodes_pb2.Verification.STATE_UNSPECIFIED:
        return ""
    state = nodes_pb2.Verification.State.Name(found.state).removeprefix("STATE_").lower()
    return f"{state}: {found.message}" if found.message else state


def labels_text(node: nodes_pb2.Node) -> str:
    """Write a node's labels, in order of key."""
    return " ".join(f"{key}={value}" for key, value in sorted(node.labels.items()))


def _cordon(
    node: str, control: str | None, credentials: Path | None, *, as_json: bool, cordoned: bool
) -> None:
    node_id = to_node_id(node)
    wanted = nodes_pb2.Node(name=f"nodes/{node_id}", cordoned=cordoned)
    updated = ask(control, credentials, lambda client: client.update(wanted, ["cordoned"]))
    if as_json:
        print_json(to_json(nodes_pb2.UpdateNodeResponse(node=updated)))
    else:
        console.print(f"node {node_id} is {state_text(updated)}", highlight=False)


def _change(text: str) -> tuple[str, str | None]:
    """Read ``KEY=VALUE`` or ``KEY-``; gives the key and the value, None to remove it."""
    key, equals, value = text.partition("=")
    if equals and key:
        return key, value
    if not equals and len(key) > 1 and key.endswith("-"):
        return key[:-1], None
    raise ConfigError(f"{text!r}: expected KEY=VALUE, or KEY- to remove it", field="LABEL")


async def _label(
    client: ControlClient, node_id: str, wanted: dict[str, str | None]
) -> nodes_pb2.Node:
    """Change labels and keep the others; what another operator changed meanwhile stays."""
    for left in reversed(range(_LABEL_TRIES)):
        node = await client.get_node(node_id)
        labels = dict(node.labels)
        for key, value in wanted.items():
            labels.pop(key, None)
            if value is not None:
                labels[key] = value
        change = nodes_pb2.Node(name=node.name, etag=node.etag, labels=labels)
        try:
            return await client.update(change, ["labels"])
        except MeshError as error:
            if error.code is not Code.ABORTED or left == 0:
                raise
    raise AssertionError  # the last try gives or raises


async def _remove(client: ControlClient, node_id: str, *, force: bool) -> None:
    node = await client.get_node(node_id)
    if not force and node.state not in _LEFT:
        raise ConfigError(
            f"node {node_id} is {state_text(node)}: drain it first, or use --force", field="NODE"
        )
    await client.deregister(node_id)


def _show(node: nodes_pb2.Node) -> None:
    table = Table(show_header=False, box=None)
    table.add_row("node", node.name.removeprefix("nodes/"))
    table.add_row("state", state_text(node))
    if numbers := numbers_text(node.verification):
        table.add_row("numbers", numbers)
    if node.drain_reason:
        table.add_row("reason", node.drain_reason)
    for shard in node.shards:
        model = shard.model.removeprefix("models/")
        table.add_row("shard", f"{model}, layers {layers_text(shard.layers)}")
        table.add_row("digest", shard.model_digest)
    for endpoint in node.endpoints:
        table.add_row("address", endpoint.uri)
    if node.HasField("location"):
        table.add_row("region", f"{node.location.region} {node.location.zone}".strip())
    if node.labels:
        table.add_row("labels", labels_text(node))
    load = node.load
    table.add_row("sessions", str(load.active_sessions))
    table.add_row("queue", str(load.queue_depth))
    table.add_row("cache", f"{load.kv_cache_used_tokens} of {load.kv_cache_capacity_tokens} tokens")
    if load.layer_microseconds:
        table.add_row("layer", f"{load.layer_microseconds / 1000:.2f} ms a token")
    for link in load.links:
        speed = f", {link.bytes_per_second / 1e6:.0f} MB/s" if link.bytes_per_second else ""
        rtt_ms = link.round_trip_microseconds / 1000
        table.add_row(f"link to {link.node.removeprefix('nodes/')}", f"{rtt_ms:.2f} ms{speed}")
    table.add_row("version", node.software_version)
    table.add_row("registered", node.create_time.ToJsonString())
    table.add_row("heartbeat", node.heartbeat_time.ToJsonString())
    console.print(table)
