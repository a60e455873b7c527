"""Prompts and decode steps through node processes: what the pipeline adds to the computing."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from meshnet.chunk import Answer
from meshnet.cli.bench.measure import Series, interleave
from meshnet.cli.bench.ours import RAW_BODIES, RAW_POLICIES
from meshnet.cli.bench.report import Advance, Report, Run, Table, progress
from meshnet.cli.processes import Children
from meshnet.errors import Code, MeshError
from meshnet.grammar import Want
from meshnet.model_dir import read_model_dir
from meshnet.plane.client import PlaneClient
from meshnet.plane.links import LinkSettings
from meshnet.topology import Hop, LayerRange, NodeId, Route
from meshnet_gateway.bench_decode import DECODE_ROUNDS, NOTHING, measure_decode
from meshnet_gateway.pipeline import PipelineSettings, RoutePipeline

__all__ = ["DEFAULT_PREFILLS", "Prefill", "measure_pipeline"]

_CHUNK_TOKENS: Final = 128
_DECODE_HOPS: Final = 3
_DECODE_HIDDEN: Final = 576
_PROMPT_TOKENS: Final = 2048
_HIDDEN: Final = Want("hidden")
_TOP: Final = Want("top", 32)


@dataclass(frozen=True)
class Prefill:
    """One prompt through stages that sleep in place of computing.

    Attributes:
        num_stages: nodes of the route.
        num_chunks: of the prompt.
        chunk_bytes: of a chunk's hidden states, over every hop, the first included.
        compute_ms: that every stage sleeps a chunk.
    """

    num_stages: int
    num_chunks: int
    chunk_bytes: int
    compute_ms: float

    @property
    def ideal_ms(self) -> float:
        """What no pipeline of such stages is below."""
        return (self.num_chunks + self.num_stages - 1) * self.compute_ms

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self.chunk_bytes // (2 * _CHUNK_TOKENS)


DEFAULT_PREFILLS: Final = (
    Prefill(3, 16, 1 << 20, 20.0),
    Prefill(5, 16, 1 << 20, 20.0),
    Prefill(3, 16, 4 << 20, 50.0),
    Prefill(3, 16, 4 << 20, 10.0),
)


async def measure_pipeline(
    prefills: Sequence[Prefill], windows: Sequence[int | None], run: Run
) -> Report:
    """Measure prompts through sleeping stages, then decode steps.

    Args:
        prefills: each is measured with every window, interleaved.
        windows: chunks in flight; None adapts.
        run: how much to measure; with a model, also its time to the first token, and its
            decode steps in place of the stub's.

    Raises:
        MeshError: a node does not start or fails, or gave other bytes back.
    """
    report = Report("pipeline: a prompt's chunks and decode steps through several nodes", _NOTES)
    table = Table("a prompt through stages that sleep", _PREFILL_COLUMNS)
    report.tables.append(table)
    rounds = run.rounds(7)
    total = len(prefills) * len(windows) * rounds
    if run.model is None:
        total += 2 * _DECODE_HOPS * run.rounds(DECODE_ROUNDS)
    else:
        total += len(windows) * run.rounds(5) + 2 * run.rounds(DECODE_ROUNDS)
    with progress("pipeline", total) as advance:
        for prefill in prefills:
            await _measure_prefill(prefill, windows, rounds, table, advance)
        if run.model is None:
            layers = [LayerRange(i, i + 1) for i in range(_DECODE_HOPS)]
            backend = ["--backend", "stub", "--hidden-size", str(_DECODE_HIDDEN)]
            async with _route(layers, backend) as (client, route):
                routes = [route[: i + 1] for i in range(_DECODE_HOPS)]
                await measure_decode(report, "stub", client, routes, _HIDDEN, run, advance)
        else:
            await _measure_model(report, run.model, windows, run, advance)
    return report


async def _measure_prefill(
    prefill: Prefill,
    windows: Sequence[int | None],
    rounds: int,
    table: Table,
    advance: Advance,
) -> None:
    random = np.random.default_rng(1)
    shape = (1, prefill.num_chunks * _CHUNK_TOKENS, prefill.hidden_size)
    tensor = random.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
    layers = [LayerRange(i, i + 1) for i in range(prefill.num_stages)]
    backend = ["--backend", "stub", "--hidden-size", str(prefill.hidden_size)]
    backend += ["--stub-delay-ms", str(prefill.compute_ms)]

    async with _route(layers, backend) as (client, route):

        async def prompt(window: int | None) -> list[float]:
            seconds, _ = await _forward(client, route, tensor, window, NOTHING)
            return [seconds]

        _, answers = await _forward(client, route, tensor, None, _HIDDEN)
        last = answers[-1].tensor
        if last is None or last.tobytes() != tensor[:, -_CHUNK_TOKENS:].tobytes():
            raise MeshError(Code.DATA_LOSS, "the stages did not give back the chunk sent")
        blocks = {str(window): partial(prompt, window) for window in windows}
        series = await interleave(blocks, rounds, advance)
    for window in windows:
        _add_prefill(table, prefill, window, series[str(window)])


async def _forward(
    client: PlaneClient,
    route: Route,
    tensor: npt.NDArray[Any],
    window: int | None,
    want: Want,
) -> tuple[float, list[Answer]]:
    """Send one prompt in a session of its own; gives its seconds and its answers."""
    settings = PipelineSettings(chunk_tokens=_CHUNK_TOKENS, window=window)
    pipeline = RoutePipeline(client, route, settings, max_tokens=tensor.shape[1])
    try:
        started = time.perf_counter()
        answers = await pipeline.forward(tensor, want, others=NOTHING)
        return time.perf_counter() - started, answers
    finally:
        await pipeline.close()


async def _measure_model(
    report: Report,
    directory: Path,
    windows: Sequence[int | None],
    run: Run,
    advance: Advance,
) -> None:
    """Measure a model's time to its first token, then its decode steps."""
    model = read_model_dir(directory)
    num_layers, name = model.num_layers, model.name
    cuts = [num_layers * i // _DECODE_HOPS for i in range(_DECODE_HOPS + 1)]
    layers = [LayerRange(start, end) for start, end in pairwise(cuts)]
    backend = ["--model", str(directory), "--threads", "1"]
    random = np.random.default_rng(1)
    prompt = random.integers(0, model.vocab_size, (1, _PROMPT_TOKENS), dtype=np.int32)
    async with _route(layers, backend) as (client, route):

        async def first_token(window: int | None) -> list[float]:
            return [(await _forward(client, route, prompt, window, _TOP))[0]]

        await first_token(None)
        blocks = {str(window): partial(first_token, window) for window in windows}
        series = await interleave(blocks, run.rounds(5), advance)
        await measure_decode(report, name, client, [route], _TOP, run, advance)
    table = Table(
        f"{name}: {_PROMPT_TOKENS} tokens to the first token over {len(route)} nodes",
        ("window", "ms", "lowest", "highest", "/ window 1"),
        section="first_token",
    )
    report.tables.append(table)
    for window in windows:
        values = series[str(window)]
        to_one = values.ratio_to(series["1"]).median if 1 in windows else None
        table.data.append(
            {
                "window": _window(window),
                "prompt_tokens": _PROMPT_TOKENS,
                "hops": len(route),
                "first_token_ms": values.median * 1e3,
                "ratio_to_sequential": to_one,
            }
        )
        low, high = min(values.values) * 1e3, max(values.values) * 1e3
        ratio = "" if to_one is None else f"{to_one:.2f}"
        table.rows.append(
            (str(_window(window)), f"{values.median * 1e3:.0f}", f"{low:.0f}", f"{high:.0f}", ratio)
        )


@asynccontextmanager
async def _route(
    layers: Sequence[LayerRange], backend: Sequence[str]
) -> AsyncIterator[tuple[PlaneClient, Route]]:
    """Start a node process for each range of layers; gives a client and the route over them."""
    async with AsyncExitStack() as stack:
        children = await stack.enter_async_context(Children())
        started = [
            await children.start(
                f"node-{i}",
                *("node", "--id", f"node-{i}", "--layers", f"{part.start}:{part.end}"),
                *("--listen", "127.0.0.1:0", *backend),
                **RAW_BODIES,
            )
            for i, part in enumerate(layers)
        ]
        hops = []
        for i, (child, part) in enumerate(zip(started, layers, strict=True)):
            ready = await child.event("ready")
            hops.append(Hop(NodeId(f"node-{i}"), ready["address"], part))
        client = PlaneClient(LinkSettings(RAW_POLICIES))
        stack.push_async_callback(client.close)
        yield client, tuple(hops)


def _add_prefill(table: Table, prefill: Prefill, window: int | None, series: Series) -> None:
    total_ms = series.median * 1e3
    ratio = total_ms / prefill.ideal_ms
    table.data.append(
        {
            "stages": prefill.num_stages,
            "chunks": prefill.num_chunks,
            "chunk_bytes": prefill.chunk_bytes,
            "compute_ms": prefill.compute_ms,
            "window": _window(window),
            "total_ms": total_ms,
            "ratio_to_ideal": ratio,
            "ideal_ms": prefill.ideal_ms,
            "total_ms_p25": series.percentile(25) * 1e3,
            "total_ms_p75": series.percentile(75) * 1e3,
            "num_prompts": len(series.values),
        }
    )
    table.rows.append(
        (
            f"{prefill.num_stages} stages",
            f"{prefill.num_chunks} x {prefill.chunk_bytes / (1 << 20):g} MiB",
            f"{prefill.compute_ms:g} ms",
            str(_window(window)),
            f"{total_ms:.0f} ms",
            f"{series.percentile(25) * 1e3:.0f} to {series.percentile(75) * 1e3:.0f}",
            f"{prefill.ideal_ms:.0f} ms",
            f"{ratio:.3f}",
        )
    )


def _window(window: int | None) -> int | str:
    """Write a window: one that follows the measured stage times has no number."""
    return "auto" if window is None else window


_PREFILL_COLUMNS: Final = (
    "route",
    "chunks",
    "a stage",
    "window",
    "total",
    "quartiles",
    "ideal",
    "/ ideal",
)
_NOTES: Final = (
    "ideal is (chunks + stages - 1) x a stage's time: no transfer takes any time.",
    (
        "overhead of a decode step is its time less the computing that the nodes report, divided"
        " by the hops. Compression is off."
    ),
)
