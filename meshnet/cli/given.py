"""Flags that are given have values: an empty one would mean, silently, that there is no flag.

``--join "$TOKEN"`` with a variable that nobody has set would start a node of an open mesh, and
``--state ""`` would keep an authority in whatever directory the shell is in.
"""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from meshnet.errors import ConfigError

__all__ = ["want_values"]


class _Command(TyperCommand):
    """A command that refuses flags with empty values."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _refuse_empty(self, ctx, args)
        return super().parse_args(ctx, args)


class _Group(TyperGroup):
    """A group of commands with the flags of its own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _refuse_empty(self, ctx, args)
        return super().parse_args(ctx, args)


def want_values(app: typer.Typer) -> None:
    """Have every command of `app`, and of its groups, refuse flags with empty values.

    They raise ConfigError then, naming the flag.
    """
    app.info.cls = _Group
    for command in app.registered_commands:
        command.cls = _Command
    for group in app.registered_groups:
        group.cls = _Group
        if group.typer_instance is not None:
            want_values(group.typer_instance)


def _refuse_empty(command: Any, ctx: Any, args: list[str]) -> None:
    """Look at what was typed, before it is converted: an empty path becomes the directory here.

    Raises:
        ConfigError: a flag's value is empty.
    """
    if ctx.resilient_parsing:  # completion, where words are still to be typed
        return
    typed, _, _ = command.make_parser(ctx).parse_args(args=list(args))
    for parameter in command.get_params(ctx):
        value = typed.get(parameter.name)
        values = value if isinstance(value, list) else [value]
        is_empty = any(isinstance(one, str) and not one.strip() for one in values)
        if is_empty and parameter.param_type_name == "option":
            flag = parameter.opts[0]
            raise ConfigError(
                f"{flag}: the value is empty; expected one, or no {flag} at all", field=flag
            )
