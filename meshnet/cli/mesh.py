"""What commands that ask the control plane share: the flag, the connection, the words."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, TypeVar

import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from meshnet import config
from meshnet.control.client import ControlClient
from meshnet.v1 import types_pb2

__all__ = ["ControlUrl", "ask", "layers_text", "to_json"]

ControlUrl = Annotated[
    str | None,
    typer.Option(
        "--control",
        help="Control plane: grpc://HOST:PORT or http://HOST:PORT; else MESHNET_CONTROL.",
        show_default="grpc://127.0.0.1:7071",
    ),
]

_T = TypeVar("_T")


def ask(control_url: str | None, question: Callable[[ControlClient], Awaitable[_T]]) -> _T:
    """Connect, ask one thing, disconnect.

    Raises:
        MeshError: what the control plane answered, or that it could not be reached.
    """

    async def run() -> _T:
        client = ControlClient(control_url or config.load().control_url)
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
