"""Round trips of POST /forward beside the other ways to send the same tensor there and back."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from tests.bench.measure import Series, interleave
from tests.bench.peers import CACHE_TOKENS
from tests.bench.processes import node_command, servers
from tests.bench.report import Report, Run, Table
from tests.bench.transports import (
    Aiohttp,
    Base64Json,
    Grpc,
    GrpcAio,
    Meshnet,
    RawSocket,
    Transport,
    time_round_trips,
)

OURS = "meshnet"
RAW = "raw TCP"
RAW_ONE_CORE = "raw TCP, one core"
RAW_TWO_CORES = "raw TCP, two cores"
_WARM_UPS = 5
_FEWEST = 4


@dataclass(frozen=True)
class Case:
    """One body size and rhythm.

    Attributes:
        name: for people.
        shape: of the bfloat16 hidden states.
        pause_s: rest before each request; 0 sends one after the other.
        per_round: requests of each transport in a round.
    """

    name: str
    shape: tuple[int, int, int]
    pause_s: float
    per_round: int

    @property
    def num_bytes(self) -> int:
        """Bytes of a body."""
        return math.prod(self.shape) * 2


CASES = (
    Case("decode, hidden 576", (1, 1, 576), 0.0, 100),
    Case("decode, hidden 16384", (1, 1, 16384), 0.0, 100),
    Case("prefill, 128 tokens of hidden 16384", (1, 128, 16384), 0.0, 8),
    Case("decode, hidden 576, every 30 ms", (1, 1, 576), 0.030, 10),
    Case("decode, hidden 16384, every 30 ms", (1, 1, 16384), 0.030, 10),
)


@dataclass(frozen=True)
class Contender:
    """A way to send a tensor.

    Attributes:
        server: the server process's arguments.
        connect: makes a client from the server's address and the tensor.
    """

    server: list[str]
    connect: Callable[[str, npt.NDArray[Any]], Transport]


async def run(options: Run) -> Report:
    """Measure all cases."""
    report = Report("forward: a tensor there and back", _NOTES)
    for case in CASES:
        per_round = max(_FEWEST, case.per_round // options.divisor)
        series = await _measure(case, options.rounds(20), per_round)
        report.tables.append(_table(case, series))
    return report


async def _measure(case: Case, num_rounds: int, per_round: int) -> dict[str, Series]:
    contenders = _contenders(case)
    random = np.random.default_rng(1)
    tensor = random.standard_normal(case.shape, np.float32).astype(ml_dtypes.bfloat16)
    with ExitStack() as stack:
        commands = [contender.server for contender in contenders.values()]
        addresses = stack.enter_context(servers(*commands))
        transports = {
            name: contender.connect(address, tensor)
            for (name, contender), address in zip(contenders.items(), addresses, strict=True)
        }
        try:
            for name, transport in transports.items():
                await _warm_up(name, transport, tensor)
            blocks = {
                name: partial(time_round_trips, transport, per_round, case.pause_s)
                for name, transport in transports.items()
            }
            return await interleave(blocks, num_rounds)
        finally:
            for transport in transports.values():
                await transport.close()


async def _warm_up(name: str, transport: Transport, tensor: npt.NDArray[Any]) -> None:
    """Open the connection, fill caches, and see that the very bytes come back."""
    for _ in range(_WARM_UPS):
        if bytes(await transport.round_trip()) != tensor.tobytes():
            raise RuntimeError(f"{name} did not give back the bytes sent")


def _contenders(case: Case) -> dict[str, Contender]:
    peer = ["-m", "tests.bench.peers"]
    raw = [*peer, "raw", "--num-bytes", str(case.num_bytes)]
    stub = ["--backend", "stub", "--hidden-size", str(case.shape[2])]
    node = node_command("echo", (0, 1), *stub, "--cache-tokens", str(CACHE_TOKENS))
    contenders = {
        OURS: Contender(node, Meshnet),
        f"{OURS}, plane alone": Contender([*peer, "plane"], Meshnet),
        RAW: Contender(raw, RawSocket),
    }
    cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cpus) > 1:
        for name, server_cpu in ((RAW_ONE_CORE, cpus[0]), (RAW_TWO_CORES, cpus[1])):
            pinned = partial(RawSocket, cpu=cpus[0])
            contenders[name] = Contender([*raw, "--cpu", str(server_cpu)], pinned)
    contenders["aiohttp"] = Contender([*peer, "aiohttp"], Aiohttp)
    contenders["gRPC"] = Contender([*peer, "grpc"], Grpc)
    contenders["gRPC aio"] = Contender([*peer, "grpc-aio"], GrpcAio)
    contenders["base64 JSON"] = Contender([*peer, "aiohttp"], Base64Json)
    return contenders


def _table(case: Case, series: dict[str, Series]) -> Table:
    columns = (
        "transport",
        "p50 ms",
        "p99 ms",
        "rounds' medians",
        "/ raw",
        "/ two cores",
        "/ meshnet",
    )
    table = Table(f"{case.name}: {case.num_bytes:,} B each way", columns)
    bases = [name for name in (RAW, RAW_ONE_CORE, RAW_TWO_CORES, OURS) if name in series]
    for name, values in series.items():
        ratios = {base: values.ratio_to(series[base]) for base in bases}
        p50, p99 = values.median * 1e3, values.percentile(99) * 1e3
        low, high = min(values.medians) * 1e3, max(values.medians) * 1e3
        to_ours = ratios[OURS]
        table.rows.append(
            (
                name,
                f"{p50:.3f}",
                f"{p99:.3f}",
                f"{low:.3f} to {high:.3f}",
                f"{ratios[RAW].median:.2f}",
                f"{ratios[RAW_TWO_CORES].median:.2f}" if RAW_TWO_CORES in ratios else "",
                f"{to_ours.median:.2f} ({to_ours.low:.2f} to {to_ours.high:.2f})",
            )
        )
        table.data.append(
            {
                "case": case.name,
                "num_bytes": case.num_bytes,
                "pause_s": case.pause_s,
                "transport": name,
                "num_requests": len(values.values),
                "p50_ms": p50,
                "p99_ms": p99,
                "round_medians_ms": [median * 1e3 for median in values.medians],
                "ratio_to": {base: asdict(ratio) for base, ratio in ratios.items()},
            }
        )
    return table


_NOTES = (
    "plane alone is our client and server without a node's sessions and computing thread.",
    "Ratios are medians over the rounds of the ratio of a round's medians; below 1 is faster.",
    (
        "raw TCP is one buffer each way without framing: the limit. Its small messages have two"
        " modes, as both ends share a core or not, so both are also measured pinned."
    ),
)
