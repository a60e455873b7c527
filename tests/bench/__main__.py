"""Entry: ``python -m tests.bench [NAME ...] [--json] [--quick] [--rounds N] [--model DIR]``."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from meshnet.errors import MeshError
from meshnet.model_dir import read_model_dir
from tests.bench import adaptive, codec, forward, hops, routes, transcoding
from tests.bench.report import Report, Run, describe_machine, print_json, print_reports

BENCHMARKS: dict[str, Callable[[Run], Coroutine[Any, Any, Report]]] = {
    "forward": forward.run,
    "hops": hops.run,
    "codec": codec.run,
    "routes": routes.run,
    "transcoding": transcoding.run,
    "adaptive": adaptive.run,
}


def main() -> None:
    """Run the benchmarks named, all by default."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description="Benchmarks.")
    names = ", ".join(BENCHMARKS)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{names}; all by default")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--quick", action="store_true", help="see that it works, no more")
    parser.add_argument("--rounds", type=int, help="of every comparison")
    parser.add_argument("--model", type=Path, help="model directory, for hops of a real model")
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
        before = os.getloadavg()[0]
        report = asyncio.run(BENCHMARKS[name](options))
        report.load = (before, os.getloadavg()[0])
        reports[name] = report
    (print_json if arguments.json else print_reports)(reports, machine)


if __name__ == "__main__":
    main()
