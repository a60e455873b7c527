"""What commands that ask the control plane share: flags, arguments, the connection, words."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from meshnet import config
from meshnet.control.client import ClientSettings, ControlClient
from meshnet.control.joining import renew_if_due
from meshnet.credentials import Credentials
from meshnet.errors import ConfigError, MeshError
from meshnet.membership import OPERATOR_FOLDER, MembershipFolder
from meshnet.topology import parse_node_id
from meshnet.v1 import types_pb2

__all__ = [
    "ControlUrl",
    "CredentialsDir",
    "ModelArgument",
    "NodeArgument",
    "ask",
    "layers_text",
    "to_json",
    "to_node_id",
]

DEFAULT_CONTROL_URL: Final = "grpc://127.0.0.1:7071"

ControlUrl = Annotated[
    str | None,
    typer.Option(
        "--control",
        help="Control plane: grpc://HOST:PORT or http://HOST:PORT, several with commas; "
        "else MESHNET_CONTROL.",
        show_default=DEFAULT_CONTROL_URL,
    ),
]

_T = TypeVar("_T")
_COMPLETION = ClientSettings(timeout_s=1.0, attempt_timeout_s=1.0)


CredentialsDir = Annotated[
    Path | None,
    typer.Option(
        "--credentials",
        help="Directory of an operator's credentials, as DIR/admin of the control plane's "
        "--state DIR; else MESHNET_CREDENTIALS, else those of meshnet login.",
        exists=True,
        file_okay=False,
        show_default=False,
    ),
]


def ask(
    control_url: str | None,
    credentials: Path | None,
    question: Callable[[ControlClient], Awaitable[_T]],
    settings: ClientSettings | None = None,
) -> _T:
    """Connect, ask one thing, disconnect.

    Credentials of `meshnet login` are renewed first in the second half of their life, and say
    where the control plane is, unless that is said otherwise.

    Args:
        control_url: of the flag.
        credentials: of the flag.
        question: asked.
        settings: patience.

    Raises:
        MeshError: what the control plane answered, or that it could not be reached.
        ConfigError: an address or a file of the credentials cannot be used.
    """

    async def run() -> _T:
        environment = config.load()
        where, own = control_url or environment.control_url, None
        folder = _folder(where, credentials, environment)
        if folder is not None:
            membership = await renew_if_due(folder)
            own = Credentials(folder.files)
            if where is None and membership is not None:
                where = membership.control_url
        client = ControlClient(where or DEFAULT_CONTROL_URL, settings, own)
        try:
            return await question(client)
        finally:
            await client.close()

    return asyncio.run(run())


def _folder(
    where: str | None, credentials: Path | None, environment: config.Config
) -> MembershipFolder | None:
    """Give the credentials to use; None where nothing says that there are any.

    Those of `meshnet login` are for where that was, and for what is said to want some.
    """
    named = credentials or environment.credentials
    if named is not None:
        return MembershipFolder(named)
    kept = MembershipFolder(environment.state_dir / OPERATOR_FOLDER)
    is_meant = where is None or where.startswith(("grpcs://", "https://"))
    return kept if is_meant and kept.path.is_dir() else None


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


def _where(context: typer.Context) -> tuple[str | None, Path | None]:
    return context.params.get("control"), context.params.get("credentials")


def _complete_node(context: typer.Context, incomplete: str) -> list[str]:
    """Give the ids that begin as typed; none if the control plane is away."""
    try:
        nodes = ask(*_where(context), ControlClient.list_nodes, _COMPLETION)
    except MeshError:
        return []
    names = [node.name.removeprefix("nodes/") for node in nodes]
    return [name for name in names if name.startswith(incomplete)]


def _complete_model(context: typer.Context, incomplete: str) -> list[str]:
    try:
        models = ask(*_where(context), ControlClient.list_models, _COMPLETION)
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
