"""Limits as an operator changes them: ``NAME=NUMBER`` for a field of a frozen dataclass (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Final

from meshnet.errors import ConfigError

__all__ = ["change_limits", "check_limits"]

_MOST: Final = 2**31 - 1
"""What C's int holds, by which libraries count bytes, calls and milliseconds."""


def change_limits(changes: Sequence[str], *groups: Any) -> list[Any]:
    """Apply changes to the groups that have the fields named; numbers keep their fields' types.

    Raises:
        ConfigError: one names no limit, or a number that it cannot have.
    """
    defaults = {
        item.name: value
        for group in groups
        for item in fields(group)
        if isinstance(value := getattr(group, item.name), int | float)
    }
    found: dict[str, int | float] = {}
    for text in changes:
        name, _, number = text.partition("=")
        if name not in defaults:
            raise ConfigError(
                f"--limit: {text[:200]!r}; expected NAME=NUMBER with one of"
                f" {', '.join(sorted(defaults))}",
                field="--limit",
            )
        try:
            value = float(number) if isinstance(defaults[name], float) else int(number)
        except ValueError:
            raise ConfigError(
                f"--limit: {text[:200]!r}; expected a number", field="--limit"
            ) from None
        found[name] = value
    changed: list[Any] = []
    for group in groups:
        names = {item.name for item in fields(group)}
        own: Any = {name: value for name, value in found.items() if name in names}
        check_limits(own)
        changed.append(replace(group, **own))
    return changed


def check_limits(values: dict[str, int | float]) -> None:
    """Refuse limits that let nothing through, or are no bounds: numbers, and times in seconds.

    Raises:
        ConfigError: naming the limit.
    """
    for name, value in values.items():
        least, most = (0.001, _MOST // 1000) if isinstance(value, float) else (1, _MOST)
        if not least <= value <= most:
            raise ConfigError(
                f"--limit: {name}={value}; expected {least} to {most}"[:200], field=name
            )
