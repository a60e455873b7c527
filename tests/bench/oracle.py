"""Processes for `transcoding`: the echo server (``grpc``), the JSON face (``face ADDRESS``)."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import grpc

from meshnet.control.http_face import HttpFace
from meshnet.control.transcode import Transcoder

ORACLE = Path(__file__).parents[1] / "control" / "oracle"


def load(name: str) -> Any:
    """Import one of the oracle's modules, which lie in no package."""
    spec = importlib.util.spec_from_file_location(f"oracle_{name}", ORACLE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


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
