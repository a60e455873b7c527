"""How the reports of several benchmarks are printed."""

from __future__ import annotations

from typing import Any

from meshnet.cli.bench.report import Report, show_report, wide_console
from meshnet.cli.output import print_json

__all__ = ["print_reports", "print_reports_json"]


def print_reports(reports: dict[str, Report], machine: dict[str, Any]) -> None:
    """Print tables."""
    console = wide_console(machine)
    for report in reports.values():
        show_report(report, console)


def print_reports_json(reports: dict[str, Report], machine: dict[str, Any]) -> None:
    """Print one JSON document."""
    results = {
        name: {
            "title": report.title,
            "load_average": report.load,
            **report.describe(),
        }
        for name, report in reports.items()
    }
    print_json({"machine": machine, "results": results})
