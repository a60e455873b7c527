"""The JSON face beside a real Envoy: one unary call, in front of the same gRPC server."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import grpc
import yarl

from meshnet.cli.bench.measure import Block, interleave
from meshnet.cli.bench.report import Report, Run, Table
from tests.bench.processes import servers
from tests.oracle_modules import load

NUM_REQUESTS = 200
CALLS = {
    "GET, path": ("GET", "/v1/shelves/1", None),
    "GET, query": ("GET", "/v1/shelves?page_size=5&tags=a&tags=b&flag=true", None),
    "POST, body": ("POST", "/v1/shelves?shelf_id=s1", {"theme": "x", "big": "5"}),
}
_SERVER: Sequence[str] = ("-m", "tests.bench.oracle")


async def run(options: Run) -> Report:
    """Measure each call through both, in alternating rounds."""
    table = Table(
        "milliseconds", ("call", "gRPC p50", "ours p50", "p99", "Envoy p50", "p99", "ours / Envoy")
    )
    report = Report(
        "Transcoding a unary call",
        notes=(
            "One client, one connection, one call at a time; each server is a process.",
            "gRPC: GetShelf itself, from Python. ours / Envoy: of p50, round by round.",
        ),
        tables=[table],
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        servers([*_SERVER, "grpc"]) as (target,),
        servers([*_SERVER, "face", target]) as (face,),
    ):
        port = int(target.rpartition(":")[2])
        async with (
            load("envoy").envoy(port, Path(folder)) as ports,
            grpc.aio.insecure_channel(target) as channel,
            aiohttp.ClientSession() as session,
        ):
            envoy = f"127.0.0.1:{ports['strict']}"
            for name, (method, path, body) in CALLS.items():
                count = NUM_REQUESTS // options.divisor
                blocks: dict[str, Block] = {
                    "gRPC": _grpc_block(channel, count),
                    "ours": _http_block(session, face, method, path, body, count),
                    "Envoy": _http_block(session, envoy, method, path, body, count),
                }
                for block in blocks.values():
                    await block()
                series = await interleave(blocks, options.rounds(9))
                ratio = series["ours"].ratio_to(series["Envoy"])
                p50 = {key: each.median for key, each in series.items()}
                p99 = {key: each.percentile(99) for key, each in series.items()}
                table.rows.append(
                    (
                        name,
                        *(f"{value:.2f}" for value in (p50["gRPC"], p50["ours"], p99["ours"])),
                        *(f"{value:.2f}" for value in (p50["Envoy"], p99["Envoy"])),
                        f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})",
                    )
                )
                table.data.append({"call": name, "p50": p50, "p99": p99, "ratio": ratio.median})
    return report


def _http_block(
    session: aiohttp.ClientSession,
    address: str,
    method: str,
    path: str,
    body: object,
    count: int,
) -> Block:
    url = yarl.URL(f"http://{address}{path}", encoded=True)

    async def take() -> list[float]:
        times = []
        for _ in range(count):
            started = time.perf_counter()
            async with session.request(method, url, json=body) as response:
                assert response.status == 200, await response.text()
                await response.read()
            times.append((time.perf_counter() - started) * 1e3)
        return times

    return take


def _grpc_block(channel: grpc.aio.Channel, count: int) -> Block:
    call = channel.unary_unary("/oracle.v1.OracleService/GetShelf")

    async def take() -> list[float]:
        times = []
        for _ in range(count):
            started = time.perf_counter()
            await call(b"\x0a\x09shelves/1")
            times.append((time.perf_counter() - started) * 1e3)
        return times

    return take
