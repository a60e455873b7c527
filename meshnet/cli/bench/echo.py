"""Servers that give back what they get, one for each stack that is compared with meshnet.

Each runs as a process of its own, ``meshnet bench serve STACK``, and does the least that its
stack allows: no header is read, nothing is checked.
"""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from enum import StrEnum
from functools import partial
from typing import Annotated, Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt
import typer

from meshnet.cli.output import Json
from meshnet.cli.serving import ExitWithParent, announce, serve
from meshnet.errors import ConfigError

__all__ = [
    "GRPC_METHOD",
    "GRPC_OPTIONS",
    "RAW_SIZE",
    "ZMQ_COPY_BYTES",
    "EchoStack",
    "missing",
    "pack_json",
    "receive_exactly",
    "serve_stack",
    "unpack_json",
]

GRPC_METHOD: Final = "/bench.Echo/Forward"
GRPC_OPTIONS: Final = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
RAW_SIZE: Final = struct.Struct("<Q")
"""What a raw client sends first: the bytes of each of its messages."""
ZMQ_COPY_BYTES: Final = 64 * 1024
"""Up to this, pyzmq is faster when it copies."""
_MAX_BODY_BYTES: Final = 1 << 30
_GRPC_THREADS: Final = 4
_grpc_aio_servers: list[asyncio.Task[bool]] = []
"""A server that is collected stops."""


class EchoStack(StrEnum):
    """A way to send bytes that is no meshnet."""

    RAW = "raw"
    AIOHTTP = "aiohttp"
    GRPC = "grpc"
    GRPC_AIO = "grpc_aio"
    ZMQ = "zmq"
    BASE64_JSON = "base64_json"


def missing(stack: EchoStack) -> str | None:
    """Say why a stack cannot be measured here, or None if it can."""
    if stack is EchoStack.ZMQ and importlib.util.find_spec("zmq") is None:
        return "pyzmq is not installed"
    return None


def pack_json(tensor: npt.NDArray[Any]) -> str:
    """Write a bfloat16 tensor as base64 in JSON: the form that the wire no longer takes."""
    data = base64.b64encode(tensor.tobytes()).decode("ascii")
    return json.dumps({"shape": list(tensor.shape), "dtype": "bfloat16", "data": data})


def unpack_json(text: str) -> npt.NDArray[Any]:
    """Read what `pack_json` writes."""
    body = json.loads(text)
    array = np.frombuffer(base64.b64decode(body["data"]), dtype=ml_dtypes.bfloat16)
    return array.reshape(body["shape"])


def receive_exactly(sock: socket.socket, view: memoryview) -> None:
    """Fill `view` from a blocking socket.

    Raises:
        ConnectionError: the other end closed before.
    """
    filled = 0
    while filled < len(view):
        count = sock.recv_into(view[filled:], 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionError("the other end closed the connection")
        filled += count


def serve_stack(
    stack: Annotated[EchoStack, typer.Argument(help="What to serve.")],
    as_json: Json = False,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Serve an echo for `meshnet bench` on a port of 127.0.0.1 that the system chooses."""
    if reason := missing(stack):
        raise ConfigError(f"{stack}: {reason}", field="STACK")

    @asynccontextmanager
    async def service() -> AsyncIterator[None]:
        port = await _start(stack)
        address = f"127.0.0.1:{port}"
        announce("ready", f"{stack}: {address}", as_json=as_json, address=address)
        yield

    serve(service, exit_with_parent=exit_with_parent)


async def _start(stack: EchoStack) -> int:
    """Start a server that lasts as long as the process; gives its port."""
    match stack:
        case EchoStack.RAW:
            return _start_raw()
        case EchoStack.AIOHTTP | EchoStack.BASE64_JSON:
            return await _start_aiohttp()
        case EchoStack.GRPC:
            return _start_grpc()
        case EchoStack.GRPC_AIO:
            return await _start_grpc_aio()
        case EchoStack.ZMQ:
            return _start_zmq()


def _start_raw() -> int:
    """Echo messages of one size from one preallocated buffer: no framing at all."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            sock, _ = listener.accept()
            _in_background(partial(_echo_raw, sock))

    _in_background(accept)
    return int(listener.getsockname()[1])


def _echo_raw(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    head = memoryview(bytearray(RAW_SIZE.size))
    with sock, suppress(ConnectionError):
        receive_exactly(sock, head)
        num_bytes = RAW_SIZE.unpack(head)[0]
        if num_bytes > _MAX_BODY_BYTES:
            return
        view = memoryview(bytearray(num_bytes))
        while True:
            receive_exactly(sock, view)
            sock.sendall(view)


async def _start_aiohttp() -> int:
    """Echo bodies, and the JSON's tensors on a path of their own."""
    from aiohttp import web

    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    async def echo_json(request: web.Request) -> web.Response:
        tensor = unpack_json(await request.text())
        return web.Response(text=pack_json(tensor), content_type="application/json")

    app = web.Application(client_max_size=2 * _MAX_BODY_BYTES)
    app.add_routes([web.post("/forward", echo), web.post("/json", echo_json)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return int(runner.addresses[0][1])


def _start_grpc() -> int:
    import grpc
    from google.protobuf.wrappers_pb2 import BytesValue

    def echo(request: BytesValue, _: grpc.ServicerContext) -> BytesValue:
        return BytesValue(value=request.value)

    server = grpc.server(ThreadPoolExecutor(_GRPC_THREADS), options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers([_grpc_handler(echo)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _in_background(server.wait_for_termination)
    return port


async def _start_grpc_aio() -> int:
    import grpc.aio
    from google.protobuf.wrappers_pb2 import BytesValue

    async def echo(request: BytesValue, _: grpc.aio.ServicerContext[Any, Any]) -> BytesValue:
        return BytesValue(value=request.value)

    server = grpc.aio.server(options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers([_grpc_handler(echo)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _grpc_aio_servers.append(asyncio.create_task(server.wait_for_termination()))
    return port


def _grpc_handler(echo: Callable[..., Any]) -> Any:
    import grpc
    from google.protobuf.wrappers_pb2 import BytesValue

    _, service, method = GRPC_METHOD.split("/")
    unary = grpc.unary_unary_rpc_method_handler(
        echo,
        request_deserializer=BytesValue.FromString,
        response_serializer=BytesValue.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(service, {method: unary})


def _start_zmq() -> int:
    import zmq

    sock: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
    port = sock.bind_to_random_port("tcp://127.0.0.1")

    def echo() -> None:
        while True:
            frame = sock.recv(copy=False)
            sock.send(frame, copy=len(frame) <= ZMQ_COPY_BYTES)

    _in_background(echo)
    return int(port)


def _in_background(work: Callable[[], object]) -> None:
    threading.Thread(target=work, daemon=True).start()
