"""Entry: ``python -m tests.bench [NAME ...]``; README.md beside this file has the options."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from meshnet.cli.bench.commands import measure
from meshnet.cli.bench.report import Report, Run, describe_machine
from meshnet.cli.bench.wire import measure_wire
from meshnet.cli.bench.wire_cases import WirePlan
from meshnet.cli.bench.wire_plot import plot_wire
from meshnet.errors import MeshError
from meshnet.model_dir import read_model_dir
from meshnet_gateway.bench_pipeline import DEFAULT_PREFILLS, measure_pipeline
from meshnet_gateway.cli_bench import plot_pipeline
from tests.bench import adaptive, codec, moving, probes, routes, tls, transcoding
from tests.bench.report import print_reports, print_reports_json

BENCHMARKS: dict[str, Callable[[Run], Coroutine[Any, Any, Report]]] = {
    "wire": lambda run: measure_wire(WirePlan(), run),
    "pipeline": lambda run: measure_pipeline(DEFAULT_PREFILLS, (None, 1), run),
    "codec": codec.run,
    "routes": routes.run,
    "transcoding": transcoding.run,
    "adaptive": adaptive.run,
    "tls": tls.run,
    "moving": moving.run,
    "probes": probes.run,
}
PLOTS: dict[str, Callable[[Report], str]] = {"wire": plot_wire, "pipeline": plot_pipeline}


def main() -> None:
    """Run the benchmarks named, all by default."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Benchmarks.")
    names = ", ".join(BENCHMARKS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{names}; all by default")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--quick", action="store_true", help="see that it works, no more")
    parser.add_argument("--rounds", type=int, help="of every comparison")
    parser.add_argument("--model", type=Path, help="model directory, for pipeline and moving")
    parser.add_argument("--plots", type=Path, help="draw wire.svg and pipeline.svg in this folder")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark {unknown[0]!r}; expected one of: {names}")
    if arguments.rounds is not None and arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}; expected 1 or more")
    if arguments.model is not None:
        try:
            read_model_dir(arguments.model)
        except MeshError as error:
            parser.error(f"--model: {error}")
    options = Run(arguments.rounds, arguments.quick, arguments.model)
    machine = describe_machine()
    reports = {}
    for name in arguments.names or BENCHMARKS:
        print(f"{name} ...", file=sys.stderr)
        report = reports[name] = measure(BENCHMARKS[name](options))
        if arguments.plots is not None and name in PLOTS:
            (arguments.plots / f"{name}.svg").write_text(PLOTS[name](report), "utf-8")
    (print_reports_json if arguments.json else print_reports)(reports, machine)


if __name__ == "__main__":
    main()
