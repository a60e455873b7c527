"""The commands ``meshnet bench wire``, ``codec`` and ``hop``."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Annotated, Any

import typer

from meshnet.cli.bench.codec import measure_codec
from meshnet.cli.bench.hop import measure_hop
from meshnet.cli.bench.placement import Placement
from meshnet.cli.bench.report import Report, Run, describe_machine, print_report
from meshnet.cli.bench.wire import measure_wire
from meshnet.cli.bench.wire_cases import DEFAULT_SIZES, STACKS, WirePlan, shape_of
from meshnet.cli.bench.wire_plot import plot_wire
from meshnet.cli.output import Json
from meshnet.cli.tls import TlsCa, TlsCert, TlsKey, tls_credentials
from meshnet.errors import ConfigError

__all__ = ["Plot", "Quick", "Rounds", "codec", "hop", "measure", "wire", "write_plot"]

Quick = Annotated[
    bool,
    typer.Option("--quick", help="A few rounds, to see that it works: the figures mean little."),
]
"""The flag that every benchmark has."""

Rounds = Annotated[
    int | None,
    typer.Option(min=1, max=10_000, help="Of every comparison.", show_default="as suits each"),
]
"""The option that every benchmark has."""

Plot = Annotated[
    Path | None, typer.Option(help="Draw the ratios into this SVG file.", dir_okay=False)
]
"""The option of the benchmarks that can be drawn."""


def wire(
    sizes: Annotated[
        str, typer.Option(help="Bytes of a body each way, separated by commas.")
    ] = ",".join(map(str, DEFAULT_SIZES)),
    stacks: Annotated[
        str, typer.Option(help="What to compare; raw and meshnet always are.")
    ] = ",".join(STACKS),
    placement: Annotated[
        Placement | None,
        typer.Option(
            help="Cores of the client and the servers.", show_default="two-cores if there are"
        ),
    ] = None,
    main_only: Annotated[
        bool,
        typer.Option("--main-only", help="Leave out one core, rests and the busy node."),
    ] = False,
    quick: Quick = False,
    rounds: Rounds = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Time a tensor there and back between two processes of this machine, by every stack.

    Raw TCP is the limit; beside meshnet run aiohttp, gRPC, pyzmq and base64 in JSON.
    """
    plan = WirePlan(_sizes(sizes), placement, _stacks(stacks), extras=not main_only)
    report = measure(measure_wire(plan, Run(rounds, quick)))
    if plot is not None:
        write_plot(plot, plot_wire(report))
    print_report(report, describe_machine(), as_json=as_json)


def codec(
    files: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[FILE]...", help=".npy files of bfloat16 bits; else numbers drawn at random."
        ),
    ] = None,
    quick: Quick = False,
    rounds: Rounds = None,
    as_json: Json = False,
) -> None:
    """Measure ratio and speed of each encoding on activations, beside memcpy.

    Only real activations show what an encoding gives: random numbers have no structure.
    """
    report = measure(measure_codec(files or (), Run(rounds, quick)))
    print_report(report, describe_machine(), as_json=as_json)


def hop(
    url: Annotated[
        str, typer.Argument(help="A node, as http://127.0.0.1:7080, or https with TLS.")
    ],
    hidden_size: Annotated[
        int | None,
        typer.Option(min=1, max=1 << 20, help="Of its model.", show_default="what the node says"),
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
    quick: Quick = False,
    rounds: Rounds = None,
    as_json: Json = False,
) -> None:
    """Time chunks of three lengths to a running node: its computing, and what the way adds."""
    tls = tls_credentials(tls_cert, tls_key, tls_ca)
    report = measure(measure_hop(url, Run(rounds, quick), hidden_size, tls))
    print_report(report, describe_machine(), as_json=as_json)


def measure(benchmark: Coroutine[Any, Any, Report]) -> Report:
    """Run a benchmark, and note the load of the machine before and after."""
    before = os.getloadavg()[0]
    report = asyncio.run(benchmark)
    report.load = (before, os.getloadavg()[0])
    return report


def write_plot(path: Path, text: str) -> None:
    """Write an SVG file.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ConfigError(f"--plot: {path}: {error.strerror}", field="--plot") from None


def _sizes(text: str) -> tuple[int, ...]:
    sizes = []
    for part in text.split(","):
        word = part.strip()
        if not (word.isascii() and word.isdigit() and len(word) < 12):
            raise ConfigError(
                f"--sizes: {word!r}; expected whole numbers of bytes, as 1152,32768",
                field="--sizes",
            )
        shape_of(int(word))
        sizes.append(int(word))
    return tuple(dict.fromkeys(sizes))


def _stacks(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in STACKS:
            raise ConfigError(
                f"--stacks: {name!r}; expected some of {','.join(STACKS)}", field="--stacks"
            )
    return names
