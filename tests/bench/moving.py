"""Time to move a session's KV cache from node to node, beside computing it again there."""

from __future__ import annotations

import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from meshnet.cache_wire import MoveHeader
from meshnet.cli.bench.measure import Block, interleave
from meshnet.cli.bench.report import Report, Run, Table
from meshnet.cli.processes import Children
from meshnet.grammar import Phase, Want
from meshnet.model_dir import read_model_dir
from meshnet.plane.client import PlaneClient
from meshnet.topology import Hop, LayerRange, NodeId, SessionId
from meshnet.wire import ChunkHeader

SIZES = (128, 1024, 4096)
QUICK_SIZES = (128,)
CHUNK_TOKENS = 128
TIMEOUT_S = 300.0
NONE = Want("none")


async def run(options: Run) -> Report:
    """Move sessions of several lengths there and back between two processes of one shard."""
    report = Report(
        "Moving a session",
        notes=(
            "move: POST /sessions/{id}/move, until the other node holds the cache.",
            f"prefill: the same tokens computed there in chunks of {CHUNK_TOKENS}, one thread.",
            "step: one token through the shard.",
        ),
    )
    table = Table(
        "float32, milliseconds",
        ("tokens", "MiB", "move p50", "move max", "step p50", "prefill p50", "move / prefill"),
    )
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or save_model(Path(folder) / "model")
        shape = read_model_dir(model)
        third = shape.num_layers // 3
        layers = LayerRange(third, 2 * third)
        async with Children() as processes:
            hops = []
            for name in ("here", "there"):
                node = await processes.start(
                    name,
                    "node",
                    *("--id", name, "--model", str(model), "--listen", "127.0.0.1:0"),
                    *("--layers", f"{layers.start}:{layers.end}", "--dtype", "float32"),
                    *("--threads", "1"),
                )
                ready = await node.event("ready")
                hops.append(Hop(NodeId(name), ready["address"], layers))
            client = PlaneClient()
            for tokens in QUICK_SIZES if options.quick else SIZES:
                pair = Pair(client, hops, shape.hidden_size, tokens)
                table.data.append(await pair.measure(options.rounds(5)))
            await client.close()
    for row in table.data:
        times = (row[name] for name in ("move", "move_max", "step", "prefill"))
        table.rows.append(
            (
                f"{row['tokens']:,}",
                f"{row['bytes'] / 2**20:.1f}",
                *(f"{value:.1f}" for value in times),
                f"{row['ratio']:.3f}",
            )
        )
    report.tables.append(table)
    return report


class Pair:
    """Two nodes of the same layers, and a session of some length on one of them."""

    def __init__(self, client: PlaneClient, hops: list[Hop], hidden: int, tokens: int) -> None:
        self._client = client
        self._here, self._there = hops
        self._hidden = hidden
        self._tokens = tokens
        self._session = SessionId(str(uuid.uuid4()))

    async def measure(self, num_rounds: int) -> dict[str, Any]:
        """Give the medians of all, and what moving is of computing."""
        await self._prefill()
        before = await self._taken()
        blocks: dict[str, Block] = {
            "move": self._move,
            "step": self._step,
            "prefill": self._prefill_other,
        }
        series = await interleave(blocks, num_rounds)
        moves, num_bytes = (now - was for now, was in zip(await self._taken(), before, strict=True))
        await self._client.release(self._here.address, self._session)
        return {
            "tokens": self._tokens,
            "bytes": num_bytes / moves,
            **{name: each.median for name, each in series.items()},
            "move_max": max(series["move"].values),
            "ratio": series["move"].ratio_to(series["prefill"]).median,
        }

    async def _taken(self) -> tuple[float, float]:
        """Give the caches that the first node took, and their bytes."""
        _, body = await self._client.get(self._here.address, "/metrics", timeout_s=TIMEOUT_S)
        lines = [line.split(" ") for line in body.decode().splitlines() if line[0] != "#"]
        figures = dict(line for line in lines if len(line) == 2)
        names = ("meshnet_caches_taken_total", "meshnet_caches_taken_bytes_total")
        return float(figures[names[0]]), float(figures[names[1]])

    async def _move(self) -> list[float]:
        times = []
        for source, target in ((self._here, self._there), (self._there, self._here)):
            asked = MoveHeader(self._session, (target,), self._tokens)
            times.append(
                await _timed(
                    self._client.move(source.address, source.node, asked, timeout_s=TIMEOUT_S)
                )
            )
        return times

    async def _step(self) -> list[float]:
        return [await _timed(self._send(self._session, self._tokens, 1)) for _ in range(3)]

    async def _prefill_other(self) -> list[float]:
        session = SessionId(str(uuid.uuid4()))
        elapsed = await _timed(self._prefill(session))
        await self._client.release(self._here.address, session)
        return [elapsed]

    async def _prefill(self, session: SessionId | None = None) -> None:
        for position in range(0, self._tokens, CHUNK_TOKENS):
            size = min(CHUNK_TOKENS, self._tokens - position)
            await self._send(session or self._session, position, size)

    async def _send(self, session: SessionId, position: int, size: int) -> None:
        tensor = np.full((1, size, self._hidden), 0.01, ml_dtypes.bfloat16)
        phase = Phase.DECODE if size == 1 else Phase.PREFILL
        header = ChunkHeader(
            tensor.shape, "bfloat16", session, position=position, want=NONE, phase=phase
        )
        await self._client.forward(
            self._here.address, self._here.node, header, tensor, timeout_s=TIMEOUT_S
        )


async def _timed(work: Any) -> float:
    started = time.perf_counter()
    await work
    return (time.perf_counter() - started) * 1e3


def save_model(directory: Path) -> Path:
    """Save random weights in the shape of a small model."""
    from transformers import LlamaConfig

    from meshnet_node.hf.exact import save_random_model

    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
    )
    return save_random_model(config, directory)
