"""``python -m tests.fuzz``: fuzz all targets, or those named.

python -m tests.fuzz                          five minutes over all
python -m tests.fuzz --seconds 60 openai gguf
python -m tests.fuzz --runs 1000000 wire      that many executions of each
python -m tests.fuzz --input FILE wire        one input again, with its traceback
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.fuzz.runner import Outcome, run_target
from tests.fuzz.targets import TARGETS

NO_ATHERIS = (
    "fuzzing needs atheris, which has wheels for Linux on x86-64 with Python 3.11 to 3.13 only"
)


def main() -> int:
    """Fuzz; gives the exit status: 1 for findings, 2 where fuzzing cannot run."""
    arguments = _parse()
    targets = arguments.targets or list(TARGETS)
    if arguments.input is not None:
        for target in targets:
            importlib.import_module(f"tests.fuzz.targets.{target}").check(
                arguments.input.read_bytes()
            )
        return 0
    if importlib.util.find_spec("atheris") is None:
        print(NO_ATHERIS, file=sys.stderr)
        return 2
    seconds = None if arguments.runs else max(1, arguments.seconds // len(targets) * arguments.jobs)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = pool.map(
            lambda target: run_target(target, runs=arguments.runs, seconds=seconds), targets
        )
        return 0 if _report(outcomes) else 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Fuzz the parsers.")
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], metavar="TARGET")
    parser.add_argument("--seconds", type=int, default=300, help="in all, over all targets")
    parser.add_argument("--runs", type=int, help="executions of each target, instead of a time")
    parser.add_argument("--jobs", type=int, default=1, help="targets at once")
    parser.add_argument("--input", type=Path, help="run one file through the targets instead")
    return parser.parse_args()


def _report(outcomes: Iterable[Outcome]) -> bool:
    """Print a table as results come; tells whether there was no finding."""
    print(
        f"{'target':<12} {'executions':>10} {'seconds':>8} {'MB first':>8} {'MB peak':>8}  finding"
    )
    good = True
    for outcome in outcomes:
        finding = "none" if outcome.good else str(outcome.finding or "the fuzzer failed")
        print(
            f"{outcome.target:<12} {outcome.executions:>10,} {outcome.seconds:>8.1f}"
            f" {outcome.start_mb:>8} {outcome.peak_mb:>8}  {finding}",
            flush=True,
        )
        if not outcome.good:
            good = False
            print(outcome.output)
            print(f"again: python -m tests.fuzz --input {outcome.finding} {outcome.target}")
    return good


if __name__ == "__main__":
    sys.exit(main())
