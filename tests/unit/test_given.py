"""A flag with an empty value is refused, whatever it would have meant: ``--join "$UNSET"``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from meshnet.cli import main
from meshnet.errors import ConfigError


@pytest.fixture(scope="module")
def root() -> Any:
    main._add_commands()
    return typer.main.get_command(main.app)


def commands(command: Any, *names: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield names, command
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, *names, name)


def test_no_flag_of_any_command_may_be_empty(root):
    checked = set()
    for names, command in commands(root):
        for option in command.params:
            if option.param_type_name != "option" or getattr(option, "is_flag", False):
                continue
            for typed in ([option.opts[0], ""], [f"{option.opts[0]}= "]):
                with pytest.raises(ConfigError, match="the value is empty") as caught:
                    root(args=[*names, *typed])
                assert caught.value.field == option.opts[0]
            checked.add((*names, option.opts[0]))
    assert {
        ("node", "--join"),
        ("gateway", "--join"),
        ("gateway", "--state"),
        ("gateway", "--api-keys"),
        ("gateway", "--https-key"),
        ("control", "--state"),
        ("node", "--tls-ca"),
        ("token", "create", "--name"),
        ("nodes", "list", "--credentials"),
        ("key", "create", "--store"),
    } <= checked


def test_flags_that_have_values_work_as_before(root, capsys):
    with pytest.raises(SystemExit) as ended:
        root(args=["control", "--lease-ttl", "nothing"])
    assert ended.value.code == 2
    assert "lease-ttl" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        root(args=["control", "openapi"])
    assert ended.value.code in (0, None)
    assert "openapi" in capsys.readouterr().out
