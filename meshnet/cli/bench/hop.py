"""``meshnet bench hop``: what a running node and the network to it take for a chunk."""

from __future__ import annotations

import json
import time
import uuid
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from meshnet.cli.bench.echo import EchoStack
from meshnet.cli.bench.measure import Series, interleave, median_of
from meshnet.cli.bench.ours import RAW_POLICIES
from meshnet.cli.bench.report import Report, Run, Table, format_us, progress
from meshnet.cli.bench.stacks import RawSocket, time_round_trips
from meshnet.cli.processes import Children
from meshnet.credentials import Credentials
from meshnet.dtypes import BFLOAT16, INT32
from meshnet.errors import Code, ConfigError, MeshError
from meshnet.grammar import Phase, Want
from meshnet.plane.client import PlaneClient
from meshnet.plane.links import LinkSettings
from meshnet.timing import parse_timings
from meshnet.tls import TLS_CA, TlsFiles
from meshnet.topology import NodeId, SessionId
from meshnet.wire import ChunkHeader

__all__ = ["TOKENS", "measure_hop", "node_address"]

TOKENS: Final = (1, 16, 128)
"""Token positions of a chunk: a decode step, a short prompt, a prompt's chunk."""

_TIMEOUT_S: Final = 120.0
_HEALTH_TIMEOUT_S: Final = 10.0
_MAX_HIDDEN: Final = 1 << 20
_WARM_UPS: Final = 2
_ROUND_S: Final = 0.3


@dataclass
class _Probe:
    """Chunks of one length to one node, each the first of the same session.

    Attributes:
        compute_us: what the node says that it computed, of each chunk.
        waiting_us: what it says that the chunk waited for the shard.
    """

    client: PlaneClient
    address: str
    node: NodeId
    tensor: npt.NDArray[Any]
    session: SessionId
    compute_us: list[float] = field(default_factory=list)
    waiting_us: list[float] = field(default_factory=list)
    rests: list[float] = field(default_factory=list)

    async def take(self, count: int) -> list[float]:
        """Send `count` chunks; gives the seconds of each."""
        num_tokens = self.tensor.shape[1]
        header = ChunkHeader(
            shape=self.tensor.shape,
            dtype=INT32 if self.tensor.dtype == np.int32 else BFLOAT16,
            session=self.session,
            position=0,
            phase=Phase.DECODE if num_tokens == 1 else Phase.PREFILL,
            want=Want("hidden"),
        )
        seconds = []
        for _ in range(count):
            started = time.perf_counter()
            answer = await self.client.forward(
                self.address, self.node, header, self.tensor, timeout_s=_TIMEOUT_S
            )
            seconds.append(time.perf_counter() - started)
            timings = parse_timings(answer.header.server_timing)
            self.compute_us.append(sum(hop.compute_ms for hop in timings) * 1e3)
            self.waiting_us.append(sum(hop.queue_ms for hop in timings) * 1e3)
            self.rests.append(seconds[-1] * 1e6 - self.compute_us[-1] - self.waiting_us[-1])
        return seconds


def node_address(url: str) -> tuple[str, bool]:
    """Take ``http[s]://HOST:PORT``, with or without a path, or ``HOST:PORT``.

    Gives ``HOST:PORT``, and whether it speaks TLS.

    Raises:
        ConfigError: anything else.
    """
    scheme, separator, rest = url.partition("://")
    address = (rest if separator else url).partition("/")[0]
    host, _, port = address.rpartition(":")
    good_scheme = not separator or scheme in ("http", "https")
    if not good_scheme or not host or not (port.isascii() and port.isdigit()):
        raise ConfigError(
            f"URL: {url!r}; expected http://HOST:PORT of a node, as http://127.0.0.1:7080",
            field="URL",
        )
    return address, scheme == "https"


async def measure_hop(
    url: str, run: Run, hidden_size: int | None = None, tls: Credentials | None = None
) -> Report:
    """Send chunks of three lengths to a node, beside a TCP echo of as many bytes on loopback.

    Args:
        url: of the node.
        run: how much to measure.
        hidden_size: of its hidden states, for a node whose /healthz does not say.
        tls: credentials for a node with TLS; None takes the system's authorities.

    Raises:
        MeshError: the node does not answer, or refuses the chunks; or a file cannot be used.
    """
    address, is_tls = node_address(url)
    if tls is not None and not is_tls:
        raise ConfigError(f"URL: {url!r}; expected https:// with {TLS_CA}", field="URL")
    if tls is None and is_tls:
        tls = Credentials(TlsFiles())
    async with AsyncExitStack() as stack:
        client = PlaneClient(LinkSettings(RAW_POLICIES, tls=tls))
        stack.push_async_callback(client.close)
        health = await _health(client, address)
        width = hidden_size or _hidden_size(health)
        children = await stack.enter_async_context(Children())
        echo = await children.start("raw", "bench", "serve", EchoStack.RAW.value)
        echo_address = (await echo.event("ready"))["address"]
        node = NodeId(str(health["node"]))
        takes_ids = await _takes_ids(client, address, node, width)
        report = Report(f"hop: node {health.get('node')} at {address}", _NOTES)
        report.facts["node"] = health
        given = "token ids" if takes_ids else "hidden states"
        table = Table(f"{given} in, hidden states of {width} out", _COLUMNS)
        report.tables.append(table)
        rounds = run.rounds(15)
        with progress("hop", len(TOKENS) * rounds * 2) as advance:
            for num_tokens in TOKENS:
                hidden = _hidden_states(num_tokens, width)
                tensor = np.zeros((1, num_tokens), np.int32) if takes_ids else hidden
                session = SessionId(str(uuid.uuid4()))
                probe = _Probe(client, address, node, tensor, session)
                raw = RawSocket(echo_address, hidden)
                try:
                    slow = max(await probe.take(_WARM_UPS))
                    await time_round_trips(raw, _WARM_UPS, 0.0)
                    count = min(40, max(1, int(_ROUND_S / slow))) // run.divisor or 1
                    for values in (probe.compute_us, probe.waiting_us, probe.rests):
                        values.clear()
                    blocks = {
                        "node": partial(probe.take, count),
                        "raw": partial(time_round_trips, raw, count, 0.0),
                    }
                    series = await interleave(blocks, rounds, advance)
                finally:
                    await raw.close()
                    await client.release(address, session, node=node)
                _add_row(table, hidden.nbytes, probe, series)
    return report


def _hidden_states(num_tokens: int, width: int) -> npt.NDArray[Any]:
    random = np.random.default_rng(1)
    return random.standard_normal((1, num_tokens, width), np.float32).astype(ml_dtypes.bfloat16)


async def _takes_ids(client: PlaneClient, address: str, node: NodeId, width: int) -> bool:
    """Try hidden states; a model's first shard takes token ids in their place.

    Raises:
        MeshError: the node refuses the chunk for another reason.
    """
    session = SessionId(str(uuid.uuid4()))
    probe = _Probe(client, address, node, _hidden_states(1, width), session)
    try:
        await probe.take(1)
    except MeshError as error:
        if error.field != "X-Meshnet-Dtype":
            raise
        return True
    finally:
        await client.release(address, session, node=node)
    return False


async def _health(client: PlaneClient, address: str) -> dict[str, Any]:
    status, body = await client.get(address, "/healthz", timeout_s=_HEALTH_TIMEOUT_S)
    try:
        health = json.loads(body)
    except ValueError:
        health = None
    if not isinstance(health, dict) or "node" not in health:
        raise MeshError(
            Code.FAILED_PRECONDITION,
            f"{address}: /healthz answered {status} and {body[:80]!r}; expected a node's JSON",
        )
    if health.get("status") != "ready":
        raise MeshError(
            Code.UNAVAILABLE,
            f"{address}: node {health['node']} is {health.get('status')}; expected ready",
        )
    return health


def _hidden_size(health: dict[str, Any]) -> int:
    width = health.get("hidden_size")
    if not isinstance(width, int) or not 0 < width <= _MAX_HIDDEN:
        raise ConfigError(
            f"--hidden-size is needed: /healthz of node {health['node']} says {width!r}",
            field="--hidden-size",
        )
    return width


def _add_row(table: Table, num_bytes: int, probe: _Probe, series: dict[str, Series]) -> None:
    node, raw = series["node"], series["raw"]
    row = {
        "tokens": probe.tensor.shape[1],
        "bytes": num_bytes,
        "bytes_in": probe.tensor.nbytes,
        "p50_us": node.median * 1e6,
        "p99_us": node.percentile(99) * 1e6,
        "compute_us": median_of(probe.compute_us),
        "waiting_us": median_of(probe.waiting_us),
        "overhead_us": median_of(probe.rests),
        "loopback_raw_us": raw.median * 1e6,
        "ratio_to_loopback_raw": median_of(probe.rests) / (raw.median * 1e6),
        "num_requests": len(node.values),
    }
    table.data.append(row)
    times = ("p50_us", "p99_us", "compute_us", "waiting_us", "overhead_us", "loopback_raw_us")
    table.rows.append(
        (
            f"{row['tokens']}",
            f"{row['bytes']:,}",
            *(format_us(row[name]) for name in times),
            f"{row['ratio_to_loopback_raw']:.1f}",
        )
    )


_COLUMNS: Final = (
    "tokens",
    "bytes",
    "p50",
    "p99",
    "compute",
    "waiting",
    "overhead",
    "TCP here",
    "/ TCP here",
)
_NOTES: Final = (
    (
        "overhead is the round trip less the computing and the waiting for the shard that the"
        " node reports: network, framing and handling."
    ),
    (
        "TCP here is an echo of as many bytes as the hidden states, between two processes of this"
        " machine: no network is as fast."
    ),
)
