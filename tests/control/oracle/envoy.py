"""A real Envoy in front of the echo server: its transcoder is the second opinion."""

from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc_tools
from google.api import annotations_pb2
from grpc_tools import protoc

HERE = Path(__file__).parent
_START_S = 20.0


def find_envoy() -> Path:
    """Give Envoy's executable: beside this interpreter, else on PATH."""
    beside = Path(sys.executable).with_name("envoy")
    found = beside if beside.exists() else shutil.which("envoy")
    assert found, "no envoy: install the dev extra"
    return Path(found)


def write_descriptors(folder: Path) -> None:
    """Write the service with all that it imports, and the details that errors may carry."""
    wheels = Path(annotations_pb2.__file__).parents[2]
    status = protoc.main(
        [
            "protoc",
            f"-I{HERE / 'proto'}",
            f"-I{wheels}",
            f"-I{Path(grpc_tools.__file__).parent / '_proto'}",
            "--include_imports",
            f"--descriptor_set_out={folder / 'oracle.binpb'}",
            "oracle/v1/oracle.proto",
            "google/rpc/status.proto",
            "google/rpc/error_details.proto",
        ]
    )
    assert status == 0


@asynccontextmanager
async def envoy(grpc_port: int, folder: Path) -> AsyncIterator[Mapping[str, int]]:
    """Run Envoy; gives the ports of its listeners, ``strict`` and ``defaults``."""
    write_descriptors(folder)
    config = (HERE / "envoy.yaml").read_text().replace("18080", str(grpc_port))
    (folder / "envoy.yaml").write_text(config)
    admin = folder / "admin"
    with (folder / "envoy.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            find_envoy(),
            *("-c", "envoy.yaml", "--concurrency", "1", "--disable-hot-restart", "-l", "error"),
            *("--admin-address-path", str(admin)),
            cwd=folder,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        async with asyncio.timeout(_START_S):
            ports = await _ports(process, admin, folder / "envoy.log")
        yield ports
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _ports(process: asyncio.subprocess.Process, admin: Path, log: Path) -> Mapping[str, int]:
    """Wait until Envoy is live; another process can only be polled."""
    async with aiohttp.ClientSession() as session:
        while True:
            assert process.returncode is None, log.read_text()
            try:
                base = f"http://{admin.read_text()}"
                async with session.get(f"{base}/ready") as ready:
                    if ready.status == 200:
                        break
            except (OSError, aiohttp.ClientError, ValueError):
                pass
            await asyncio.sleep(0.02)
        async with session.get(f"{base}/listeners?format=json") as listeners:
            found = await listeners.json(content_type=None)
    return {
        status["name"]: status["local_address"]["socket_address"]["port_value"]
        for status in found["listener_statuses"]
    }
