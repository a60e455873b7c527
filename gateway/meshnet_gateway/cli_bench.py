"""``meshnet bench``: the benchmarks that people run, and the servers that they need."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshnet.cli.bench import commands
from meshnet.cli.bench.echo import serve_stack
from meshnet.cli.bench.plot import Bar, BarGroup, draw_bars
from meshnet.cli.bench.report import Report, Run, describe_machine, print_report
from meshnet.cli.output import Json
from meshnet.model_dir import read_model_dir
from meshnet_gateway.bench_pipeline import DEFAULT_PREFILLS, Prefill, measure_pipeline
from meshnet_gateway.window import MAX_WINDOW

__all__ = ["app", "plot_pipeline"]

app = typer.Typer(
    help="Measure this machine, its network and its nodes beside what is possible.",
    no_args_is_help=True,
)


def pipeline(
    stages: Annotated[
        int | None, typer.Option(min=1, max=16, help="Nodes; measures this one case.")
    ] = None,
    chunks: Annotated[int, typer.Option(min=1, max=256, help="Of the prompt.")] = 16,
    chunk_kib: Annotated[
        int, typer.Option(min=1, max=64 << 10, help="KiB of a chunk's hidden states.")
    ] = 1024,
    compute_ms: Annotated[
        float, typer.Option(min=0.1, max=60_000, help="That a stage takes for a chunk.")
    ] = 20.0,
    window: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_WINDOW,
            help="Chunks in flight.",
            show_default="from measured stage times, and 1 beside it",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="Model directory: also time its first token and decode steps."),
    ] = None,
    quick: commands.Quick = False,
    rounds: commands.Rounds = None,
    plot: commands.Plot = None,
    as_json: Json = False,
) -> None:
    """Time a prompt's chunks and decode steps through several node processes.

    The nodes are stubs that sleep a set time a chunk, so that what remains is the pipeline.
    Without --stages, four cases are measured.
    """
    if model is not None:
        read_model_dir(model)
    cases: tuple[Prefill, ...] = DEFAULT_PREFILLS
    if stages is not None:
        cases = (Prefill(stages, chunks, chunk_kib << 10, compute_ms),)
    windows = (None, 1) if window is None else (window,)
    report = commands.measure(measure_pipeline(cases, windows, Run(rounds, quick, model)))
    if plot is not None:
        commands.write_plot(plot, plot_pipeline(report))
    print_report(report, describe_machine(), as_json=as_json)


def plot_pipeline(report: Report) -> str:
    """Draw the prompts of a pipeline report as SVG, one group for each case."""
    groups: dict[str, list[Bar]] = {}
    for row in report.describe()["results"]:
        label = (
            f"{row['stages']} stages, {row['chunks']} chunks of"
            f" {row['chunk_bytes'] / (1 << 20):g} MiB, {row['compute_ms']:g} ms a stage"
        )
        ratio = row["ratio_to_ideal"]
        text = f"{ratio:.2f}x, {row['total_ms']:.0f} ms"
        overlapped = row["window"] != 1
        groups.setdefault(label, []).append(Bar(f"window {row['window']}", ratio, text, overlapped))
    return draw_bars(
        "A prompt through several nodes",
        "Time over (chunks + stages - 1) x a stage's time (logarithmic; shorter is faster)",
        "ideal",
        [BarGroup(label, bars) for label, bars in groups.items()],
    )


app.command()(commands.wire)
app.command()(commands.codec)
app.command()(commands.hop)
app.command()(pipeline)
app.command(name="serve", hidden=True)(serve_stack)
