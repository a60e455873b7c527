"""What mutual TLS adds to a hop: a node with it beside one without, by both of our clients."""

from __future__ import annotations

import tempfile
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Final

import ml_dtypes
import numpy as np

from meshnet.cli.bench.measure import Series, interleave
from meshnet.cli.bench.ours import RAW_BODIES, Meshnet, MeshnetAio
from meshnet.cli.bench.placement import default_placement, placed
from meshnet.cli.bench.report import Advance, Report, Run, Table, format_ratio, format_us, progress
from meshnet.cli.bench.stacks import Transport, time_round_trips
from meshnet.cli.bench.wire_cases import shape_of
from meshnet.cli.processes import Children
from meshnet.credentials import Credentials
from meshnet.tls import TlsFiles
from tests.plane.certificates import make_authority

SIZES: Final = (1152, 32 * 1024, 4 << 20)
_CLIENTS: Final = {"node to node": Meshnet, "gateway to node": MeshnetAio}
_BLOCK_S: Final = 0.15
_NODE: Final = ("node", "--backend", "stub", "--layers", "0:1", "--listen", "127.0.0.1:0")
_COLUMNS: Final = ("client", "plain p50", "TLS p50", "TLS adds", "TLS / plain", "rounds")


async def run(options: Run) -> Report:
    """Measure every size."""
    report = Report("tls: a tensor there and back, plain and with mutual TLS", _NOTES)
    rounds = options.rounds(15)
    with tempfile.TemporaryDirectory() as directory:
        authority = make_authority(Path(directory))
        files = TlsFiles(authority.certificate, authority.key, authority.ca)
        flags = [
            *("--tls-cert", str(files.certificate), "--tls-key", str(files.key)),
            *("--tls-ca", str(files.ca)),
        ]
        async with Children() as children:
            with progress("tls", len(SIZES) * len(_CLIENTS) * rounds * 2) as advance:
                for num_bytes in SIZES:
                    width = str(shape_of(num_bytes)[2])
                    nodes = [
                        await children.start(
                            name, *_NODE, "--hidden-size", width, "--id", name, *more, **RAW_BODIES
                        )
                        for name, more in (("plain", ()), ("encrypted", flags))
                    ]
                    places = {
                        node.name: (node.pid, (await node.event("ready"))["address"])
                        for node in nodes
                    }
                    table = Table(f"{num_bytes:,} bytes each way", _COLUMNS)
                    report.tables.append(table)
                    for client, connect in _CLIENTS.items():
                        found = await _measure(num_bytes, places, connect, files, rounds, advance)
                        _add_row(table, num_bytes, client, found)
    return report


async def _measure(
    num_bytes: int,
    places: dict[str, tuple[int, str]],
    connect: type[Meshnet | MeshnetAio],
    files: TlsFiles,
    rounds: int,
    advance: Advance,
) -> dict[str, Series]:
    random = np.random.default_rng(1)
    tensor = random.standard_normal(shape_of(num_bytes), np.float32).astype(ml_dtypes.bfloat16)
    contexts = {"plain": None, "encrypted": Credentials(files)}
    async with AsyncExitStack() as stack:
        transports: dict[str, Transport] = {}
        for name, (_, address) in places.items():
            transports[name] = transport = connect(address, tensor, contexts[name])
            stack.push_async_callback(transport.close)
        with placed(default_placement(), [pid for pid, _ in places.values()]):
            for transport in transports.values():
                assert bytes(await transport.round_trip()) == tensor.tobytes()
                slow = max(await time_round_trips(transport, 3, 0.0))
            count = max(2, min(200, int(_BLOCK_S / slow)))
            blocks = {
                name: partial(time_round_trips, transport, count, 0.0)
                for name, transport in transports.items()
            }
            return await interleave(blocks, rounds, advance)


def _add_row(table: Table, num_bytes: int, client: str, found: dict[str, Series]) -> None:
    plain, encrypted = found["plain"], found["encrypted"]
    ratio = encrypted.ratio_to(plain)
    row = {
        "bytes": num_bytes,
        "client": client,
        "plain_p50_us": plain.median * 1e6,
        "tls_p50_us": encrypted.median * 1e6,
        "added_us": encrypted.added_to(plain) * 1e6,
        "ratio": ratio.median,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
    }
    table.data.append(row)
    table.rows.append(
        (
            client,
            format_us(row["plain_p50_us"]),
            format_us(row["tls_p50_us"]),
            format_us(row["added_us"]),
            format_ratio(ratio.median),
            f"{format_ratio(ratio.low)} to {format_ratio(ratio.high)}",
        )
    )


_NOTES: Final = (
    "Stub nodes, each a process; kept connections, so that no handshake is in the times.",
    "TLS adds and TLS / plain compare the medians of the same round.",
)
