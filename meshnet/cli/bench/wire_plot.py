"""The picture of a wire report: what each stack takes over raw TCP."""

from __future__ import annotations

from typing import Any

from meshnet.cli.bench.plot import Bar, BarGroup, draw_bars
from meshnet.cli.bench.report import Report, format_ratio, format_us

__all__ = ["plot_wire"]

_OURS = "meshnet"


def plot_wire(report: Report) -> str:
    """Draw the main rows of a wire report as SVG, one group for each size of body."""
    groups: dict[int, list[Bar]] = {}
    for row in report.describe()["results"]:
        groups.setdefault(row["bytes"], []).append(_bar(row))
    return draw_bars(
        "A bfloat16 tensor there and back",
        "Median time over raw TCP sockets with preallocated buffers (logarithmic; shorter is"
        " faster)",
        "raw TCP",
        [BarGroup(f"{_size(num_bytes)} each way", bars) for num_bytes, bars in groups.items()],
    )


def _bar(row: dict[str, Any]) -> Bar:
    if row["p50_us"] is None:
        return Bar(row["stack"], None, row["not_measured"])
    ratio = row["ratio_to_raw"]
    ours = row["stack"] == _OURS
    return Bar(row["stack"], ratio, f"{format_ratio(ratio)}x, {format_us(row['p50_us'])}", ours)


def _size(num_bytes: int) -> str:
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if num_bytes % unit == 0:
            return f"{num_bytes // unit} {name}"
    return f"{num_bytes:,} B"
