"""Node processes without a control plane, and sessions driven through them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from meshnet.cli.processes import Children
from meshnet.cli.up import even_shards
from meshnet.model_dir import read_model_dir
from meshnet.topology import Hop, LayerRange, NodeId, Route


@asynccontextmanager
async def node_processes(
    model: Path, shards: Sequence[LayerRange], *, dtype: str = "auto", threads: int = 1
) -> AsyncIterator[Route]:
    """Start a process for each shard; gives the route through them all."""
    async with Children() as children:
        nodes = []
        for number, shard in enumerate(shards, start=1):
            nodes.append(
                await children.start(
                    f"node-{number}",
                    "node",
                    *("--id", f"node-{number}", "--model", str(model)),
                    *("--layers", f"{shard.start}:{shard.end}", "--listen", "127.0.0.1:0"),
                    *("--dtype", dtype, "--threads", str(threads)),
                )
            )
        hops = []
        for shard, node in zip(shards, nodes, strict=True):
            ready = await node.event("ready")
            hops.append(Hop(NodeId(node.name), ready["address"], shard))
        yield tuple(hops)


def shards_of(model: Path, num_nodes: int) -> list[LayerRange]:
    """Cut a model's layers evenly."""
    return even_shards(read_model_dir(model).num_layers, num_nodes)
