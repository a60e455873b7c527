"""What a benchmark gives: tables for people, rows for machines."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rich.box
import rich.table
from rich.console import Console

QUICK_DIVISOR = 5
_QUICK_ROUNDS = 5
_WIDTH = 120


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
        return self.num_rounds or (_QUICK_ROUNDS if self.quick else default)


@dataclass
class Table:
    """One comparison.

    Attributes:
        title: what is compared.
        columns: their heads; the first column holds names.
        rows: as shown.
        data: the same, and more, with names and without rounding.
    """

    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    data: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Report:
    """One benchmark's result.

    Attributes:
        title: what was measured.
        notes: how to read it.
        tables: one for each comparison.
        load: processes that ran or waited before and after, by the last minute's average.
    """

    title: str
    notes: tuple[str, ...] = ()
    tables: list[Table] = field(default_factory=list)
    load: tuple[float, float] = (0.0, 0.0)


def describe_machine() -> dict[str, Any]:
    """Say what the numbers were measured on."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu_model(),
        "num_cpus": os.cpu_count(),
        "load_average": os.getloadavg(),
    }


def print_reports(reports: dict[str, Report], machine: dict[str, Any]) -> None:
    """Print tables."""
    console = Console(width=max(_WIDTH, Console().width))
    console.print(
        f"{machine['cpu']}, {machine['num_cpus']} CPUs, {machine['system']},"
        f" Python {machine['python']}",
        highlight=False,
    )
    for report in reports.values():
        console.rule(report.title)
        before, after = report.load
        console.print(
            f"Load average of the last minute: {before:.2f} before, {after:.2f} after.",
            *report.notes,
            sep="\n",
            highlight=False,
        )
        for table in report.tables:
            shown = rich.table.Table(
                title=table.title, title_justify="left", box=rich.box.SIMPLE_HEAD
            )
            for number, column in enumerate(table.columns):
                shown.add_column(column, justify="right" if number else "left", no_wrap=True)
            for row in table.rows:
                shown.add_row(*row)
            console.print(shown)


def print_json(reports: dict[str, Report], machine: dict[str, Any]) -> None:
    """Print one JSON document."""
    results = {
        name: {
            "title": report.title,
            "load_average": report.load,
            "rows": [row for table in report.tables for row in table.data],
        }
        for name, report in reports.items()
    }
    print(json.dumps({"machine": machine, "results": results}, indent=2))


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
