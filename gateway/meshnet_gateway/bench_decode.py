"""Decode steps through node processes: what a hop adds to the computing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from meshnet.cli.bench.measure import Series, interleave, median_of
from meshnet.cli.bench.report import Advance, Report, Run, Table
from meshnet.grammar import Want
from meshnet.plane.client import PlaneClient
from meshnet.timing import parse_timings
from meshnet.topology import Route
from meshnet_gateway.pipeline import PipelineSettings, RoutePipeline

__all__ = ["DECODE_ROUNDS", "NOTHING", "measure_decode"]

DECODE_ROUNDS: Final = 15
"""Of each rhythm."""

NOTHING: Final = Want("none")
"""What is wanted of every chunk of a prompt but the last."""

_PAUSE_S: Final = 0.030


@dataclass
class _Steps:
    """Decode steps of one session, in milliseconds.

    Attributes:
        pipeline: of the session.
        want: of each step.
        pause_s: rest before each step.
    """

    pipeline: RoutePipeline
    want: Want
    pause_s: float
    step_ms: list[float] = field(default_factory=list)
    compute_ms: list[float] = field(default_factory=list)
    waiting_ms: list[float] = field(default_factory=list)

    async def take(self, count: int) -> list[float]:
        """Take `count` steps; gives of each what is not computing, per hop."""
        overheads = []
        token = np.array([[1]], dtype=np.int32)
        for _ in range(count):
            if self.pause_s:
                await asyncio.sleep(self.pause_s)
            started = time.perf_counter()
            answers = await self.pipeline.forward(token, self.want)
            step_ms = (time.perf_counter() - started) * 1e3
            timings = parse_timings(answers[-1].header.server_timing)
            compute_ms = sum(hop.compute_ms for hop in timings)
            self.step_ms.append(step_ms)
            self.compute_ms.append(compute_ms)
            self.waiting_ms.append(sum(hop.queue_ms for hop in timings))
            overheads.append((step_ms - compute_ms) / len(self.pipeline.route))
        return overheads


async def measure_decode(
    report: Report,
    name: str,
    client: PlaneClient,
    routes: Sequence[Route],
    want: Want,
    run: Run,
    advance: Advance,
) -> None:
    """Measure decode steps on each route, one after the other and after rests.

    ``decode`` of the report is the last route's, without rests.
    """
    table = Table("decode steps: milliseconds", _DECODE_COLUMNS, section="decode_steps")
    report.tables.append(table)
    prompt = np.ones((1, 16), dtype=np.int32)
    for pause_s, most in ((0.0, 20), (_PAUSE_S, 8)):
        async with AsyncExitStack() as stack:
            steps = {}
            for route in routes:
                pipeline = RoutePipeline(client, route, PipelineSettings())
                stack.push_async_callback(pipeline.close)
                await pipeline.forward(prompt, want, others=NOTHING)
                steps[str(len(route))] = _Steps(pipeline, want, pause_s)
            count = max(4, most // run.divisor)
            blocks = {hops: partial(taken.take, count) for hops, taken in steps.items()}
            series = await interleave(blocks, run.rounds(DECODE_ROUNDS), advance)
        for hops, taken in steps.items():
            _add_decode(table, name, taken, series[hops])
        if not pause_s:
            report.facts["decode"] = table.data[-1]


def _add_decode(table: Table, name: str, steps: _Steps, overhead: Series) -> None:
    num_hops = len(steps.pipeline.route)
    row = {
        "hops": num_hops,
        "overhead_per_hop_ms_p50": overhead.median,
        "overhead_per_hop_ms_p25": overhead.percentile(25),
        "overhead_per_hop_ms_p75": overhead.percentile(75),
        "overhead_per_hop_ms_p99": overhead.percentile(99),
        "step_ms_p50": median_of(steps.step_ms),
        "compute_ms_p50": median_of(steps.compute_ms),
        "waiting_per_hop_ms_p50": median_of(steps.waiting_ms) / num_hops,
        "rest_ms": steps.pause_s * 1e3,
        "nodes": name,
        "num_steps": len(overhead.values),
    }
    table.data.append(row)
    table.rows.append(
        (
            f"{name}, {num_hops} hop{'s' if num_hops > 1 else ''}",
            f"{steps.pause_s * 1e3:.0f}",
            f"{row['step_ms_p50']:.3f}",
            f"{row['compute_ms_p50']:.3f}",
            f"{overhead.median:.3f}",
            f"{overhead.percentile(25):.3f} to {overhead.percentile(75):.3f}",
            f"{overhead.percentile(99):.3f}",
            f"{row['waiting_per_hop_ms_p50']:.3f}",
        )
    )


_DECODE_COLUMNS: Final = (
    "nodes",
    "rest",
    "step",
    "compute",
    "overhead a hop",
    "quartiles",
    "p99",
    "of it waiting",
)
