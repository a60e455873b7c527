"""``meshnet bench wire``: a tensor there and back, beside the other ways to send it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from meshnet.cli.bench.echo import EchoStack, missing
from meshnet.cli.bench.measure import Series, interleave
from meshnet.cli.bench.ours import RAW_BODIES, Meshnet, MeshnetAio
from meshnet.cli.bench.placement import cpu_seconds, default_placement, placed
from meshnet.cli.bench.report import Advance, Report, Run, Table, format_ratio, format_us, progress
from meshnet.cli.bench.stacks import CLIENTS, Transport, time_round_trips
from meshnet.cli.bench.wire_cases import (
    LONG_BYTES,
    OURS,
    OURS_AIO,
    RAW,
    STACKS,
    WireCase,
    WirePlan,
    plan_cases,
    shape_of,
)
from meshnet.cli.processes import Children
from meshnet.errors import Code, MeshError

__all__ = ["measure_wire"]

_MESHNET: Final[dict[str, Callable[[str, npt.NDArray[Any]], Transport]]] = {
    OURS: Meshnet,
    OURS_AIO: MeshnetAio,
}
_CACHE_TOKENS: Final = 1 << 40
_WARM_UPS: Final = 4


@dataclass(frozen=True)
class _Server:
    address: str
    pid: int


@dataclass
class _Measured:
    """One stack in one case: its times in seconds, and what it took of the CPUs."""

    transport: Transport
    pid: int
    cpu_s: float | None = 0.0
    num_requests: int = 0

    async def take(self, count: int, pause_s: float) -> list[float]:
        """Measure a block of round trips."""
        before = self._clock()
        seconds = await time_round_trips(self.transport, count, pause_s)
        after = self._clock()
        if self.cpu_s is None or before is None or after is None:
            self.cpu_s = None
        else:
            self.cpu_s += after - before
        self.num_requests += count
        return seconds

    def cpu_s_per_gib(self, case: WireCase) -> float | None:
        """Give the CPU time of both processes for each GiB carried, either way.

        None after rests, in which a process also does other things, and where the system
        does not tell.
        """
        if self.cpu_s is None or case.pause_s:
            return None
        return self.cpu_s * (1 << 30) / (2 * case.num_bytes * self.num_requests)

    def _clock(self) -> float | None:
        server = cpu_seconds(self.pid)
        client = cpu_seconds(os.getpid())
        return None if server is None or client is None else server + client


async def measure_wire(plan: WirePlan, run: Run) -> Report:
    """Measure every case of the plan, with server processes of its own.

    Raises:
        MeshError: a server did not start, or a stack gave other bytes back.
        ConfigError: a size that no tensor has.
    """
    stacks = tuple(name for name in STACKS if name in (RAW, OURS, *plan.stacks))
    away = {name: reason for name in stacks if (reason := _missing(name)) is not None}
    present = tuple(name for name in stacks if name not in away)
    cases = plan_cases(plan, present, default_placement())
    report = Report("wire: a tensor there and back", _NOTES)
    total = sum(case.effort(run)[0] * len(case.stacks) for case in cases)
    async with Children() as children:
        servers = await _start(children, present, cases)
        with progress("wire", total) as advance:
            for case in cases:
                table = await _measure(case, servers, run, advance)
                if case.section == "results":
                    _add_missing(table, case, away)
                report.tables.append(table)
    return report


def _missing(name: str) -> str | None:
    return None if name in _MESHNET else missing(EchoStack(name))


async def _start(
    children: Children, stacks: Sequence[str], cases: Sequence[WireCase]
) -> dict[tuple[str, int, bool], _Server]:
    """Start a server for each stack; meshnet's are for one width each, idle or busy.

    Gives each by stack, width (0 for any) and whether it is busy.
    """
    started = {
        (name, 0, False): await children.start(name, "bench", "serve", name)
        for name in stacks
        if name not in _MESHNET
    }
    for width, busy in sorted({(shape_of(case.num_bytes)[2], case.busy) for case in cases}):
        options = ["--hidden-size", str(width), "--cache-tokens", str(_CACHE_TOKENS)]
        if busy:
            options.append("--stub-busy")
        node = ("node", "--backend", "stub", "--layers", "0:1", "--listen", "127.0.0.1:0")
        started[OURS, width, busy] = await children.start(
            "node", *node, "--id", "echo", *options, **RAW_BODIES
        )
    servers = {}
    for key, child in started.items():
        ready = await child.event("ready")
        servers[key] = _Server(ready["address"], child.pid)
    return servers


async def _measure(
    case: WireCase,
    servers: dict[tuple[str, int, bool], _Server],
    run: Run,
    advance: Advance,
) -> Table:
    random = np.random.default_rng(1)
    shape = shape_of(case.num_bytes)
    tensor = random.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
    num_rounds, per_round = case.effort(run)
    async with AsyncExitStack() as stack:
        measured: dict[str, _Measured] = {}
        for name in case.stacks:
            key = (OURS, shape[2], case.busy) if name in _MESHNET else (name, 0, False)
            server = servers[key]
            connect = _MESHNET.get(name) or CLIENTS[EchoStack(name)]
            transport = connect(server.address, tensor)
            stack.push_async_callback(transport.close)
            measured[name] = _Measured(transport, server.pid)
        pids = {measured[name].pid for name in case.stacks}
        with placed(case.placement, pids):
            for name, one in measured.items():
                await _warm_up(name, one.transport, tensor)
            blocks = {
                name: partial(one.take, per_round, case.pause_s) for name, one in measured.items()
            }
            series = await interleave(blocks, num_rounds, advance)
    return _table(case, series, measured)


async def _warm_up(name: str, transport: Transport, tensor: npt.NDArray[Any]) -> None:
    """Open the connection, fill caches, and see that the very bytes come back."""
    sent = tensor.tobytes()
    for _ in range(1 if len(sent) >= LONG_BYTES else _WARM_UPS):
        if await transport.round_trip() != sent:
            raise MeshError(Code.DATA_LOSS, f"{name} did not give back the bytes sent")


def _table(case: WireCase, series: dict[str, Series], measured: dict[str, _Measured]) -> Table:
    columns = (
        "stack",
        "p50",
        "quartiles",
        "p99",
        "added",
        "/ raw",
        "rounds",
        "/ meshnet",
        "CPU s/GiB",
    )
    table = Table(case.title(), columns, section=case.section)
    raw, ours = series[RAW], series[OURS]
    limit = measured[RAW].cpu_s_per_gib(case)
    for name, values in series.items():
        ratio = values.ratio_to(raw)
        cpu = measured[name].cpu_s_per_gib(case)
        row = {
            **_describe(case, name),
            "p50_us": values.median * 1e6,
            "p99_us": values.percentile(99) * 1e6,
            "added_us": values.added_to(raw) * 1e6,
            "ratio_to_raw": ratio.median,
            "cpu_s_per_gib": cpu,
            "p25_us": values.percentile(25) * 1e6,
            "p75_us": values.percentile(75) * 1e6,
            "ratio_low": ratio.low,
            "ratio_high": ratio.high,
            "cpu_ratio_to_raw": cpu / limit if cpu and limit else None,
            "ratio_to_meshnet": values.ratio_to(ours).median,
            "num_requests": len(values.values),
            "round_medians_us": [median * 1e6 for median in values.medians],
        }
        table.data.append(row)
        table.rows.append(
            (
                name,
                format_us(row["p50_us"]),
                f"{format_us(row['p25_us'])} to {format_us(row['p75_us'])}",
                format_us(row["p99_us"]),
                "" if name == RAW else format_us(row["added_us"]),
                format_ratio(ratio.median),
                f"{format_ratio(ratio.low)} to {format_ratio(ratio.high)}",
                format_ratio(row["ratio_to_meshnet"]),
                "" if cpu is None else f"{cpu:.2f}",
            )
        )
    return table


def _describe(case: WireCase, name: str) -> dict[str, Any]:
    return {
        "stack": name,
        "bytes": case.num_bytes,
        "placement": case.placement.value,
        "rest_ms": case.pause_s * 1e3,
        "busy": case.busy,
    }


def _add_missing(table: Table, case: WireCase, away: dict[str, str]) -> None:
    """Say in a row of its own which stack was not measured, and why."""
    figures = ("p50_us", "p99_us", "added_us", "ratio_to_raw", "cpu_s_per_gib")
    for name, reason in away.items():
        table.data.append(
            {**_describe(case, name), **dict.fromkeys(figures), "not_measured": reason}
        )
        table.rows.append((name, reason))


_NOTES: Final = (
    "raw is a TCP socket and one preallocated buffer at each end, without framing: the limit.",
    (
        "added and / raw compare the medians of the same round: the median of these, and the"
        " lowest and highest ratio. Below 1 is faster."
    ),
    (
        "CPU s/GiB is of both processes, for each GiB that crosses, both directions counted."
        " Compression is off."
    ),
)
