"""Processes for `transcoding`: the echo server (``grpc``), the JSON face (``face ADDRESS``)."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import tempfile
from pathlib import Path

import grpc

from meshnet.control.http_face import HttpFace
from meshnet.control.transcode import Transcoder
from tests.oracle_modules import load


async def _serve(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        server_module = load("server")
        service = server_module.load_service(Path(folder))
    if arguments[0] == "grpc":
        server = grpc.aio.server()
        server.add_generic_rpc_handlers((server_module.Oracle(service).handler(),))
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
    else:
        channel = grpc.aio.insecure_channel(arguments[1])
        listener = socket.create_server(("127.0.0.1", 0))
        await HttpFace(Transcoder(channel, [service]).handle, {}, 0.1).start(listener)
        address = f"127.0.0.1:{listener.getsockname()[1]}"
    print(json.dumps({"event": "ready", "address": address}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1:]))
