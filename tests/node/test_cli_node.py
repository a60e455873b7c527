"""What ``meshnet node`` makes of its flags."""

from __future__ import annotations

from typing import Any

import pytest
from typer import Typer
from typer.testing import CliRunner

from meshnet_node import cli
from meshnet_node.settings import NodeSettings

STUB = ("--backend", "stub", "--layers", "0:1")


@pytest.fixture
def settings_of(monkeypatch) -> Any:
    """Give the settings of the node that flags would start, and the command's exit status."""
    served: list[Any] = []
    monkeypatch.setattr(cli, "serve", lambda process, **_: served.append(process))
    app = Typer()
    app.command()(cli.node)

    def run(*flags: str) -> tuple[NodeSettings | None, int]:
        status = CliRunner().invoke(app, [*STUB, *flags]).exit_code
        return (served.pop().args[0] if served else None), status

    return run


def test_the_hop_timeout(settings_of):
    assert settings_of()[0].hop_timeout_s == 120.0
    assert settings_of("--hop-timeout", "7.5")[0].hop_timeout_s == 7.5


@pytest.mark.parametrize("text", ["0", "-1", "soon", ""])
def test_a_hop_timeout_that_cannot_be_is_refused(settings_of, text):
    assert settings_of("--hop-timeout", text) == (None, 2)
