"""What commands print: tables and progress for people, JSON for machines."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console

__all__ = ["Json", "console", "errors", "print_json"]

console = Console()
"""Standard output: results."""

errors = Console(stderr=True, soft_wrap=True)
"""Standard error: progress, warnings and errors."""

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
"""The flag that every command with a result has."""


def print_json(value: Any) -> None:
    """Print one JSON document on standard output."""
    print(json.dumps(value, indent=2, ensure_ascii=False))  # noqa: T201
