"""What a benchmark gives: tables and progress for people, rows for machines."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import rich.box
import rich.table
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from meshnet.cli.output import console, errors, print_json

__all__ = [
    "QUICK_DIVISOR",
    "Advance",
    "Report",
    "Run",
    "Table",
    "describe_machine",
    "format_ratio",
    "format_us",
    "print_report",
    "progress",
    "show_report",
    "wide_console",
]

Advance = Callable[[], None]
"""Called when one more block was measured."""

QUICK_DIVISOR: Final = 5
_QUICK_ROUNDS: Final = 5
_WIDTH: Final = 120


@dataclass(frozen=True)
class Run:
    """How much to measure.

    Attributes:
        num_rounds: of every comparison; None takes each benchmark's own.
        quick: a few rounds, to see that it works.
        model: directory of a real model, for the benchmarks that can use one.
    """

    num_rounds: int | None = None
    quick: bool = False
    model: Path | None = None

    @property
    def divisor(self) -> int:
        """What the numbers of requests in a round are divided by."""
        return QUICK_DIVISOR if self.quick else 1

    def rounds(self, default: int) -> int:
        """Give the number of rounds of a comparison that takes `default` of itself."""
        if self.num_rounds:
            return self.num_rounds
        return min(_QUICK_ROUNDS, default) if self.quick else default


@dataclass
class Table:
    """One comparison.

    Attributes:
        title: what is compared.
        columns: their heads; the first column holds names.
        rows: as shown.
        data: the same, and more, with names and without rounding.
        section: where `data` goes in the report's JSON object.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    data: list[dict[str, Any]] = field(default_factory=list)
    section: str = "results"


@dataclass
class Report:
    """One benchmark's result.

    Attributes:
        title: what was measured.
        notes: how to read it.
        tables: one for each comparison.
        load: processes that ran or waited before and after, by the last minute's average.
        facts: further members of the report's JSON object.
    """

    title: str
    notes: tuple[str, ...] = ()
    tables: list[Table] = field(default_factory=list)
    load: tuple[float, float] = (0.0, 0.0)
    facts: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        """Give the report's JSON object: the rows of each section, and the facts."""
        sections: dict[str, list[dict[str, Any]]] = {"results": []}
        for table in self.tables:
            sections.setdefault(table.section, []).extend(table.data)
        return {**sections, **self.facts}


def describe_machine() -> dict[str, Any]:
    """Say what the numbers were measured on."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
    }


def print_report(report: Report, machine: dict[str, Any], *, as_json: bool) -> None:
    """Print one report as its command does: tables, or one JSON object."""
    if as_json:
        facts = {"load_average": report.load, "machine": machine}
        print_json({**report.describe(), **facts})
        return
    show_report(report, wide_console(machine))


def wide_console(machine: dict[str, Any]) -> Console:
    """Give a console wide enough for every table, after naming the machine on it."""
    wide = Console(width=max(_WIDTH, console.width))
    wide.print(
        f"{machine['cpu']}, {machine['num_cpus']} CPUs, {machine['system']},"
        f" Python {machine['python']}",
        highlight=False,
    )
    return wide


def show_report(report: Report, target: Console) -> None:
    """Print the tables of a report."""
    target.rule(report.title)
    before, after = report.load
    target.print(
        f"Load average of the last minute: {before:.2f} before, {after:.2f} after.",
        *report.notes,
        sep="\n",
        highlight=False,
    )
    for table in report.tables:
        shown = rich.table.Table(title=table.title, title_justify="left", box=rich.box.SIMPLE_HEAD)
        for number, column in enumerate(table.columns):
            shown.add_column(column, justify="right" if number else "left", no_wrap=True)
        for row in table.rows:
            shown.add_row(*row)
        target.print(shown)


@contextmanager
def progress(title: str, total: int) -> Iterator[Advance]:
    """Show a bar on standard error while a benchmark runs, if that is a terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    hidden = not errors.is_terminal
    with Progress(*columns, console=errors, transient=True, disable=hidden) as bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)


def format_us(microseconds: float) -> str:
    """Write a time for people, in the unit that suits it, to about three digits."""
    size = abs(microseconds)
    if size < 999.5:
        return f"{microseconds:.0f} us"
    if size < 999.5e3:
        return f"{format_ratio(microseconds / 1e3)} ms"
    return f"{format_ratio(microseconds / 1e6)} s"


def format_ratio(ratio: float) -> str:
    """Write a ratio for people, to about three digits."""
    size = abs(ratio)
    return f"{ratio:.2f}" if size < 9.995 else f"{ratio:.1f}" if size < 99.95 else f"{ratio:.0f}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
