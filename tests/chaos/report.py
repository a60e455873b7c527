"""What many runs showed, as a table and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.table import Table

from meshnet.cli.output import console
from tests.chaos.run import Outcome

__all__ = ["describe_pauses", "print_outcomes", "quantiles", "summary"]


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    """Give p50 and p95, rounded to a millisecond, and how many there were."""
    if not seconds:
        return {"count": 0}
    p50, p95 = np.quantile(seconds, (0.5, 0.95))
    return {"count": len(seconds), "p50_s": round(float(p50), 3), "p95_s": round(float(p95), 3)}


def describe_pauses(outcomes: Sequence[Outcome]) -> dict[str, dict[str, float]]:
    """Give the pauses of all faults, and of each kind of fault."""
    by_kind: dict[str, list[float]] = {}
    for outcome in outcomes:
        for kind, pause in outcome.pauses:
            by_kind.setdefault(kind, []).append(pause)
    every = [pause for pauses in by_kind.values() for pause in pauses]
    return {"all": quantiles(every)} | {
        kind: quantiles(pauses) for kind, pauses in sorted(by_kind.items())
    }


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Give everything that was seen, for JSON."""
    return {
        "schedules": len(outcomes),
        "good": sum(not outcome.wrong for outcome in outcomes),
        "sessions": sum(len(outcome.schedule.requests) for outcome in outcomes),
        "faults": sum(len(outcome.schedule.faults) for outcome in outcomes),
        "recovered": sum(outcome.recovered for outcome in outcomes),
        "refused": sum(outcome.refused for outcome in outcomes),
        "over_more_nodes": sum(outcome.over_more_nodes for outcome in outcomes),
        "pause": describe_pauses(outcomes),
        "wrong": [
            {
                "seed": outcome.schedule.seed,
                "schedule": str(outcome.schedule),
                "wrong": outcome.wrong,
            }
            for outcome in outcomes
            if outcome.wrong
        ],
    }


def print_outcomes(outcomes: Sequence[Outcome]) -> None:
    """Print a table of pauses, and the seeds that failed."""
    seen = summary(outcomes)
    table = Table("fault", "times", "p50", "p95", title="The longest pause that a stream had by it")
    for kind, figures in seen["pause"].items():
        times = [f"{figures[name]:.2f} s" if name in figures else "" for name in ("p50_s", "p95_s")]
        table.add_row(kind, str(figures["count"]), *times)
    console.print(table)
    console.print(
        f"{seen['good']} of {seen['schedules']} schedules as they must be: {seen['sessions']}"
        f" sessions, {seen['faults']} faults, {seen['recovered']} recoveries"
    )
    for failed in seen["wrong"]:
        console.print(f"[red]{failed['schedule']}[/red]")
        for line in failed["wrong"]:
            console.print(f"  {line}", markup=False)
        console.print(f"  again: python -m tests.chaos --seed {failed['seed']}")
