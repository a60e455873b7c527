"""What a hop adds to a decode step: the step's time less what the shards computed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

from meshnet.grammar import Want
from meshnet.model_dir import read_model_dir
from meshnet.plane.client import PlaneClient
from meshnet.timing import HopTiming
from meshnet.topology import Hop, LayerRange, NodeId, Route
from meshnet_gateway.pipeline import PipelineSettings, RoutePipeline
from tests.bench.measure import Series, interleave, median_of
from tests.bench.processes import node_command, servers
from tests.bench.report import Report, Run, Table
from tests.bench.transports import RAW_POLICIES

HIDDEN_SIZES = (576, 8192)
NUM_HOPS = (1, 2, 3, 5)
MODEL_HOPS = (1, 2, 3)
PAUSE_S = 0.030
_WANT = Want("top", 32)
_PROMPT = tuple(range(1, 17))
_FEWEST = 4


@dataclass
class Steps:
    """Decode steps of one session on one route, all in milliseconds.

    Attributes:
        pipeline: of the session.
        pause_s: rest before each step.
        step: time of each step, as the pipeline's caller sees it.
        compute: of all hops of each step.
        waiting: of all hops for the session's turn and the thread that computes.
    """

    pipeline: RoutePipeline
    pause_s: float
    step: list[float] = field(default_factory=list)
    compute: list[float] = field(default_factory=list)
    waiting: list[float] = field(default_factory=list)

    async def take(self, count: int) -> list[float]:
        """Take `count` steps; gives the overhead of each: its time less the computing."""
        overheads = []
        for _ in range(count):
            if self.pause_s:
                await asyncio.sleep(self.pause_s)
            started = time.perf_counter()
            output = await self.pipeline.step([1], _WANT)
            step = (time.perf_counter() - started) * 1e3
            compute = _sum(output.timings, "compute_ms")
            self.step.append(step)
            self.compute.append(compute)
            self.waiting.append(_sum(output.timings, "queue_ms"))
            overheads.append(step - compute)
        return overheads


async def run(options: Run) -> Report:
    """Measure stub nodes, and a real model's where one is given."""
    report = Report("hops: what a hop adds to a decode step", _NOTES)
    for hidden_size in HIDDEN_SIZES:
        with _stub_routes(hidden_size) as routes:
            for pause_s, per_round in ((0.0, 40), (PAUSE_S, 8)):
                title = f"stub nodes, hidden {hidden_size}{_rhythm(pause_s)}"
                count = max(_FEWEST, per_round // options.divisor)
                report.tables.append(
                    await _measure(title, routes, options.rounds(20), count, pause_s)
                )
    if options.model is not None:
        with _model_routes(options.model) as routes:
            title = f"model {options.model.resolve().name}"
            count = max(_FEWEST, 10 // options.divisor)
            report.tables.append(await _measure(title, routes, options.rounds(10), count, 0.0))
    return report


@contextmanager
def _stub_routes(hidden_size: int) -> Iterator[list[Route]]:
    """Start stub nodes of one layer each; each ends a model, so that a route may end there."""
    stage = ["-m", "tests.bench.peers", "stage", "--hidden-size", str(hidden_size)]
    commands = [[*stage, "--layer", str(i)] for i in range(max(NUM_HOPS))]
    with servers(*commands) as addresses:
        hops = [
            Hop(NodeId(f"node-{i}"), address, LayerRange(i, i + 1))
            for i, address in enumerate(addresses)
        ]
        yield [tuple(hops[:num_hops]) for num_hops in NUM_HOPS]


@contextmanager
def _model_routes(directory: Path) -> Iterator[list[Route]]:
    """Start nodes that hold the whole model; each route cuts its layers evenly."""
    num_layers = read_model_dir(directory).num_layers
    backend = ["--model", str(directory), "--threads", "1"]
    longest = max(MODEL_HOPS)
    commands = [node_command(f"node-{i}", (0, num_layers), *backend) for i in range(longest)]
    with servers(*commands) as addresses:
        routes = []
        for num_hops in MODEL_HOPS:
            cuts = [num_layers * i // num_hops for i in range(num_hops + 1)]
            routes.append(
                tuple(
                    Hop(NodeId(f"node-{i}"), addresses[i], LayerRange(start, end))
                    for i, (start, end) in enumerate(pairwise(cuts))
                )
            )
        yield routes


async def _measure(
    title: str, routes: Sequence[Route], num_rounds: int, per_round: int, pause_s: float
) -> Table:
    async with AsyncExitStack() as stack:
        client = PlaneClient(policies=RAW_POLICIES)
        stack.push_async_callback(client.close)
        steps = {}
        for route in routes:
            pipeline = RoutePipeline(client, route, PipelineSettings())
            stack.push_async_callback(pipeline.close)
            await pipeline.step(_PROMPT, _WANT)
            await pipeline.step([1], _WANT)
            steps[str(len(route))] = Steps(pipeline, pause_s)
        blocks = {name: partial(taken.take, per_round) for name, taken in steps.items()}
        series = await interleave(blocks, num_rounds)
    return _table(title, steps, series, pause_s)


def _table(title: str, steps: dict[str, Steps], series: dict[str, Series], pause_s: float) -> Table:
    table = Table(
        f"{title}: milliseconds, medians",
        ("hops", "step", "compute", "overhead", "p99", "a hop", "of it waiting", "one hop more"),
    )
    first = next(iter(series.values()))
    for name, overheads in series.items():
        num_hops = int(name)
        taken = steps[name]
        per_hop = overheads.median / num_hops
        waiting = median_of(taken.waiting) / num_hops
        # Rounds are compared with the same round of the shortest route.
        pairs = zip(overheads.medians, first.medians, strict=True)
        more = median_of([(a - b) / (num_hops - 1) for a, b in pairs]) if num_hops > 1 else None
        table.rows.append(
            (
                name,
                f"{median_of(taken.step):.3f}",
                f"{median_of(taken.compute):.3f}",
                f"{overheads.median:.3f}",
                f"{overheads.percentile(99):.3f}",
                f"{per_hop:.3f}",
                f"{waiting:.3f}",
                "" if more is None else f"{more:.3f}",
            )
        )
        table.data.append(
            {
                "nodes": title,
                "pause_s": pause_s,
                "num_hops": num_hops,
                "num_steps": len(taken.step),
                "step_ms": median_of(taken.step),
                "compute_ms": median_of(taken.compute),
                "overhead_ms": overheads.median,
                "overhead_p99_ms": overheads.percentile(99),
                "overhead_per_hop_ms": per_hop,
                "waiting_per_hop_ms": waiting,
                "overhead_of_one_hop_more_ms": more,
            }
        )
    return table


def _sum(timings: Sequence[HopTiming], name: str) -> float:
    return float(sum(getattr(timing, name) for timing in timings))


def _rhythm(pause_s: float) -> str:
    return f", every {pause_s * 1e3:.0f} ms" if pause_s else ""


_NOTES = (
    (
        "A step sends one token through every node and brings 32 candidates back. Overhead is"
        " the step less the computing that the nodes report."
    ),
    (
        "Waiting is for the session's turn and for the thread that computes. One hop more is the"
        " slope over the route of one hop."
    ),
)
