"""What commands that ask the control plane share: flags, arguments, the connection, words."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from meshnet import config
from meshnet.control.client import ClientSettings, ControlClient
from meshnet.errors import ConfigError, MeshError
from meshnet.topology import parse_node_id
from meshnet.v1 import types_pb2

__all__ = [
    "ControlUrl",
    "ModelArgument",
    "NodeArgument",
    "ask",
    "layers_text",
    "to_json",
    "to_node_id",
]

ControlUrl = Annotated[
    str | None,
    typer.Option(
        "--control",
        help="Control plane: grpc://HOST:PORT or http://HOST:PORT, several with commas; "
        "else MESHNET_CONTROL.",
        show_default="grpc://127.0.0.1:7071",
    ),
]

_T = TypeVar("_T")
_COMPLETION = ClientSettings(timeout_s=1.0, attempt_timeout_s=1.0)


def ask(
    control_url: str | None,
    question: Callable[[ControlClient], Awaitable[_T]],
    settings: ClientSettings | None = None,
) -> _T:
    """Connect, ask one thing, disconnect.

    Raises:
        MeshError: what the control plane answered, or that it could not be reached.
    """

    async def run() -> _T:
        client = ControlClient(control_url or config.load().control_url, settings)
        try:
            return await question(client)
        finally:
            await client.close()

    return asyncio.run(run())


def to_json(message: Message) -> dict[str, Any]:
    """Write a message as the JSON face does."""
    return MessageToDict(message, always_print_fields_with_no_presence=True)


def layers_text(layers: types_pb2.LayerRange) -> str:
    """Write a layer range as the wire does."""
    return f"{layers.start}-{layers.end}"


def to_node_id(node: str) -> str:
    """Take an id or a resource name; gives the id.

    Raises:
        ConfigError: it is neither.
    """
    try:
        return parse_node_id(node.removeprefix("nodes/"))
    except ValueError as error:
        raise ConfigError(str(error), field="NODE") from None


def _complete_node(context: typer.Context, incomplete: str) -> list[str]:
    """Give the ids that begin as typed; none if the control plane is away."""
    try:
        nodes = ask(context.params.get("control"), ControlClient.list_nodes, _COMPLETION)
    except MeshError:
        return []
    names = [node.name.removeprefix("nodes/") for node in nodes]
    return [name for name in names if name.startswith(incomplete)]


def _complete_model(context: typer.Context, incomplete: str) -> list[str]:
    try:
        models = ask(context.params.get("control"), ControlClient.list_models, _COMPLETION)
    except MeshError:
        return []
    names = {model.name.removeprefix("models/") for model in models}
    return sorted(name for name in names if name.startswith(incomplete))


NodeArgument = Annotated[
    str,
    typer.Argument(
        help="Id of the node, as `meshnet nodes list` shows.", autocompletion=_complete_node
    ),
]

ModelArgument = Annotated[
    str, typer.Argument(help="Name of the model.", autocompletion=_complete_model)
]
