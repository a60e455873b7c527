"""Entry: ``python -m tests.chaos``; see README.md beside this file."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meshnet.cli.output import errors, print_json
from tests.chaos.mesh import MeshOptions, running_mesh
from tests.chaos.model import (
    CHUNK_TOKENS,
    NUM_REQUESTS,
    NUM_TOKENS,
    STAGES,
    prepare_requests,
    save_model,
)
from tests.chaos.report import print_outcomes, summary
from tests.chaos.run import Outcome, run_schedule
from tests.chaos.schedule import Schedule, make_schedule

app = typer.Typer(pretty_exceptions_enable=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.callback(invoke_without_command=True)
def chaos(
    context: typer.Context,
    seed: Annotated[int | None, typer.Option(min=0, help="Run this schedule alone.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Schedules to run, from seed 0.")] = 200,
    logs: Annotated[
        Path | None, typer.Option(help="Folder for the logs; else a temporary one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run faults against a mesh of real processes; exits with 1 where anything was wrong."""
    if context.invoked_subcommand is not None:
        return
    seeds = range(count) if seed is None else [seed]
    schedules = [
        make_schedule(one, num_requests=NUM_REQUESTS, num_tokens=NUM_TOKENS) for one in seeds
    ]
    with tempfile.TemporaryDirectory(prefix="meshnet-chaos-") as folder:
        outcomes = asyncio.run(_run(schedules, Path(folder), logs or Path(folder) / "logs"))
    if as_json:
        print_json(summary(outcomes))
    else:
        print_outcomes(outcomes)
    if any(outcome.wrong for outcome in outcomes):
        raise typer.Exit(1)


async def _run(schedules: Sequence[Schedule], folder: Path, logs: Path) -> list[Outcome]:
    """Run schedules one after another on one mesh, and show how it goes."""
    outcomes: list[Outcome] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=errors) as progress:
        task = progress.add_task("preparing", total=len(schedules))
        model = save_model(folder / "tiny")
        requests = prepare_requests(model, NUM_REQUESTS)
        options = MeshOptions(model, STAGES, chunk_tokens=CHUNK_TOKENS)
        async with running_mesh(options, logs) as mesh:
            for schedule in schedules:
                progress.update(task, description=f"seed {schedule.seed}")
                if len(schedules) == 1:
                    progress.print(str(schedule), markup=False)
                outcome = await run_schedule(mesh, schedule, requests)
                outcomes.append(outcome)
                if outcome.wrong:
                    progress.print(f"wrong: {schedule}", markup=False)
                    for line in (*outcome.wrong, *outcome.log):
                        progress.print(f"  {line}", markup=False)
                progress.advance(task)
    return outcomes


if __name__ == "__main__":
    app(prog_name="python -m tests.chaos")
