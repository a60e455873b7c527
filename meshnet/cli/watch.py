"""``meshnet nodes watch``: the nodes' changes as they happen."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing
from typing import Annotated

import typer

from meshnet.cli.mesh import ControlUrl, CredentialsDir, ask, layers_text, to_json
from meshnet.cli.output import Json, console, errors
from meshnet.control.client import ControlClient
from meshnet.errors import Code, MeshError
from meshnet.v1 import node_service_pb2 as nodes_pb2

__all__ = ["Follower", "watch"]

_PAUSE_S = 1.0
_EXIT_INTERRUPTED = 130
_BOOKMARK = nodes_pb2.WatchNodesResponse.EVENT_TYPE_BOOKMARK
_DELETE = nodes_pb2.WatchNodesResponse.EVENT_TYPE_DELETE


def watch(
    control: ControlUrl = None,
    credentials: CredentialsDir = None,
    model: Annotated[str | None, typer.Option(help="Only nodes of this model.")] = None,
    revision: Annotated[
        int, typer.Option(min=0, help="Begin with the changes after it; 0: all nodes first.")
    ] = 0,
    load: Annotated[bool, typer.Option("--load", help="Show load reports too.")] = False,
    as_json: Json = False,
) -> None:
    """Show the nodes, then each change, until Ctrl-C; goes on after a lost connection.

    With --json each line is one WatchNodesResponse.
    """
    follower = Follower(f"models/{model}" if model else "", revision, load=load, as_json=as_json)
    try:
        ask(control, credentials, follower.run)
    except KeyboardInterrupt:
        raise typer.Exit(_EXIT_INTERRUPTED) from None


class Follower:
    """Watches, and watches again from the last revision seen.

    Args:
        model: resource name; empty for all.
        revision: to begin after; 0 begins with all nodes.
        load: whether load reports are shown.
        as_json: a WatchNodesResponse a line, instead of words.
    """

    def __init__(self, model: str, revision: int, *, load: bool, as_json: bool) -> None:
        self._model = model
        self._revision = revision
        self._load = load
        self._as_json = as_json

    async def run(self, client: ControlClient) -> None:
        """Watch for ever.

        Raises:
            MeshError: the control plane refused the watch, or was never reached.
        """
        was_reached = False
        while True:
            try:
                stream = client.watch_nodes(
                    start_revision=self._revision, model=self._model, include_load=self._load
                )
                async with aclosing(stream) as events:
                    async for event in events:
                        was_reached = True
                        self._revision = event.revision
                        self._print(event)
            except MeshError as error:
                if error.reason == "REVISION_COMPACTED":
                    errors.print(f"{error.message}: listing all nodes", highlight=False)
                    self._revision = 0
                    continue
                if not (was_reached and error.code is Code.UNAVAILABLE):
                    raise
                errors.print(f"{error.message}: watching again", highlight=False)
            await asyncio.sleep(_PAUSE_S)

    def _print(self, event: nodes_pb2.WatchNodesResponse) -> None:
        if self._as_json:
            print(json.dumps(to_json(event), ensure_ascii=False), flush=True)  # noqa: T201
            return
        if event.type == _BOOKMARK:
            return
        node = event.node
        name = node.name.removeprefix("nodes/")
        if event.type == _DELETE:
            console.print(f"{event.revision} {name} removed", highlight=False)
            return
        state = nodes_pb2.NodeState.Name(node.state).removeprefix("NODE_STATE_").lower()
        shards = ", ".join(
            f"{shard.model.removeprefix('models/')} {layers_text(shard.layers)}"
            for shard in node.shards
        )
        cordoned = ", cordoned" if node.cordoned else ""
        console.print(
            f"{event.revision} {name} {state}{cordoned}; {shards}; "
            f"{node.load.active_sessions} sessions, {node.load.queue_depth} waiting",
            highlight=False,
            soft_wrap=True,
        )
