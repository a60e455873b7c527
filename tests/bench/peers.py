"""Servers that the benchmarks need beside nodes: ``python -m tests.bench.peers NAME``."""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from meshnet.chunk import Answer, Chunk
from meshnet.compression import CompressionPolicies
from meshnet.plane.caller import Caller
from meshnet.plane.server import PlaneServer
from meshnet.topology import LayerRange, NodeId, SessionId
from meshnet.wire import AnswerHeader
from tests.bench.processes import READY_EVENT

GRPC_METHOD = "/bench.Echo/Forward"
GRPC_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
]
CACHE_TOKENS = 1 << 40
_MAX_BODY_BYTES = 1 << 30
_GRPC_THREADS = 4
_NAMES = ("plane", "stage", "raw", "aiohttp", "grpc", "grpc-aio")


def pack_json(tensor: npt.NDArray[Any]) -> str:
    """Write a bfloat16 tensor as the retired body did."""
    data = base64.b64encode(tensor.tobytes()).decode("ascii")
    return json.dumps({"shape": list(tensor.shape), "dtype": "bfloat16", "data": data})


def unpack_json(text: str) -> npt.NDArray[Any]:
    """Read what `pack_json` writes."""
    body = json.loads(text)
    array = np.frombuffer(base64.b64decode(body["data"]), dtype=ml_dtypes.bfloat16)
    return array.reshape(body["shape"])


def receive_exactly(sock: socket.socket, view: memoryview) -> None:
    """Fill `view` from a blocking socket."""
    filled = 0
    while filled < len(view):
        count = sock.recv_into(view[filled:], 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionError("the other end closed the connection")
        filled += count


def _serve_raw(num_bytes: int) -> None:
    """Echo messages of `num_bytes` bytes from one preallocated buffer: no framing at all."""
    listener = socket.create_server(("127.0.0.1", 0))
    _announce(listener.getsockname()[1])
    view = memoryview(bytearray(num_bytes))
    while True:
        sock, _ = listener.accept()
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with sock:
            try:
                while True:
                    receive_exactly(sock, view)
                    sock.sendall(view)
            except ConnectionError:
                continue


class _EchoHandler:
    """Answers hidden states as they came: a node without sessions or a thread that computes."""

    def forward(self, chunk: Chunk, caller: Caller) -> Answer:
        header = chunk.header
        return Answer(
            AnswerHeader(
                shape=header.shape,
                dtype=header.dtype,
                session=header.session,
                chunk_index=header.chunk_index,
                chunk_total=header.chunk_total,
            ),
            chunk.tensor,
        )

    def release(self, session: SessionId) -> None:
        """Hold nothing."""

    def get(self, path: str) -> None:
        """Serve nothing."""


async def _serve_plane() -> None:
    """Echo chunks by the plane's server alone."""
    server = PlaneServer(_EchoHandler(), policies=CompressionPolicies())
    _announce((await server.start("127.0.0.1", 0))[1])
    await asyncio.Event().wait()


async def _serve_stage(layer: int, hidden_size: int) -> None:
    """Run a node with a stub backend of one layer that ends its model, so that routes may too."""
    from meshnet_node.app import Node, NodeSettings
    from meshnet_node.session import SessionLimits
    from meshnet_node.stub import StubBackend

    layers = LayerRange(layer, layer + 1)
    limits = SessionLimits(cache_tokens=CACHE_TOKENS)
    node = Node(
        NodeSettings(node=NodeId(f"node-{layer}"), port=0, sessions=limits),
        lambda: StubBackend(layers, hidden_size=hidden_size, head=True),
        CompressionPolicies(),
    )
    address = await node.listen()
    await node.load()
    _announce(int(address.rpartition(":")[2]))
    await asyncio.Event().wait()


async def _serve_aiohttp() -> None:
    """Echo bodies, and the retired JSON's tensors on a path of their own."""
    from aiohttp import web

    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    async def echo_json(request: web.Request) -> web.Response:
        tensor = unpack_json(await request.text())
        return web.Response(text=pack_json(tensor), content_type="application/json")

    app = web.Application(client_max_size=_MAX_BODY_BYTES)
    app.add_routes([web.post("/forward", echo), web.post("/json", echo_json)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    _announce(runner.addresses[0][1])
    await asyncio.Event().wait()


def _serve_grpc() -> None:
    import grpc
    from google.protobuf.wrappers_pb2 import BytesValue

    def echo(request: BytesValue, _: grpc.ServicerContext) -> BytesValue:
        return BytesValue(value=request.value)

    server = grpc.server(ThreadPoolExecutor(_GRPC_THREADS), options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers([_grpc_handler(echo)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    _announce(port)
    server.wait_for_termination()


async def _serve_grpc_aio() -> None:
    import grpc.aio
    from google.protobuf.wrappers_pb2 import BytesValue

    async def echo(request: BytesValue, _: grpc.aio.ServicerContext[Any, Any]) -> BytesValue:
        return BytesValue(value=request.value)

    server = grpc.aio.server(options=GRPC_OPTIONS)
    server.add_generic_rpc_handlers([_grpc_handler(echo)])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _announce(port)
    await server.wait_for_termination()


def _grpc_handler(echo: Any) -> Any:
    import grpc
    from google.protobuf.wrappers_pb2 import BytesValue

    _, service, method = GRPC_METHOD.split("/")
    unary = grpc.unary_unary_rpc_method_handler(
        echo,
        request_deserializer=BytesValue.FromString,
        response_serializer=BytesValue.SerializeToString,
    )
    return grpc.method_handlers_generic_handler(service, {method: unary})


def _announce(port: int) -> None:
    print(json.dumps({"event": READY_EVENT, "address": f"127.0.0.1:{port}"}), flush=True)


def _exit_at_end_of_input() -> None:
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(prog="tests.bench.peers", description=__doc__)
    parser.add_argument("name", choices=_NAMES)
    parser.add_argument("--num-bytes", type=int, default=0, help="of a raw message")
    parser.add_argument("--layer", type=int, default=0, help="of a stage")
    parser.add_argument("--hidden-size", type=int, default=8, help="of a stage")
    parser.add_argument("--cpu", type=int, help="run on this CPU alone")
    arguments = parser.parse_args()
    if arguments.cpu is not None:
        os.sched_setaffinity(0, {arguments.cpu})
    threading.Thread(target=_exit_at_end_of_input, daemon=True).start()
    match arguments.name:
        case "plane":
            asyncio.run(_serve_plane())
        case "stage":
            asyncio.run(_serve_stage(arguments.layer, arguments.hidden_size))
        case "raw":
            _serve_raw(arguments.num_bytes)
        case "aiohttp":
            asyncio.run(_serve_aiohttp())
        case "grpc":
            _serve_grpc()
        case "grpc-aio":
            asyncio.run(_serve_grpc_aio())


if __name__ == "__main__":
    main()
