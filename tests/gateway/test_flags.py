"""What the flags of ``meshnet gateway`` come to: settings, or an error that names one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import typer

from meshnet.errors import ConfigError
from meshnet_gateway import cli
from meshnet_gateway.app import GatewaySettings

Read = Callable[..., GatewaySettings]


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Read:
    """Run the command up to where it would start a gateway; gives that one's settings."""
    made: list[GatewaySettings] = []

    class Noted:
        def __init__(self, settings: GatewaySettings, *_: Any) -> None:
            made.append(settings)
            raise KeyboardInterrupt

    def serve(opened: Callable[[], AbstractAsyncContextManager[None]], **_: Any) -> None:
        async def run() -> None:
            async with opened():
                raise AssertionError("it was to be noted only")

        with pytest.raises(KeyboardInterrupt):
            asyncio.run(run())

    monkeypatch.setattr(cli, "_load", lambda source, _: (source, None, None))
    monkeypatch.setattr(cli, "Gateway", Noted)
    monkeypatch.setattr(cli, "serve", serve)
    app = typer.Typer()
    app.command()(cli.gateway)

    def read(*flags: str) -> GatewaySettings:
        app(["--model", "lab/tiny", *flags], standalone_mode=False)
        return made[-1]

    return read


def test_limits_reach_the_gateway_and_the_control_plane_inside(read: Read) -> None:
    changed = ("max_streams=5", "max_body_bytes=4096", "max_requests=7", "head_timeout_s=3")
    settings = read(*(part for text in changed for part in ("--limit", text)))
    assert settings.control_url is None
    assert (settings.limits.max_requests, settings.control.limits.max_streams) == (7, 5)
    for limits in (settings.limits, settings.control.limits):
        assert (limits.max_body_bytes, limits.head_timeout_s) == (4096, 3.0)


def test_what_is_for_a_control_plane_inside_needs_one(read: Read) -> None:
    outside = ("--control", "grpc://127.0.0.1:1")
    assert read(*outside, "--limit", "max_body_bytes=4096").limits.max_body_bytes == 4096
    with pytest.raises(ConfigError, match=r"max_streams=5.*expected NAME=NUMBER with one of"):
        read(*outside, "--limit", "max_streams=5")
    with pytest.raises(ConfigError, match="with --control or --join that one decides"):
        read(*outside, "--require-grants")
    assert read("--require-grants").control.require_grants


@pytest.mark.parametrize(
    "text", ["max_streams=0", "max_message_bytes=99999999999", "grpc_idle_timeout_s=1e300"]
)
def test_limits_of_the_control_plane_inside_are_checked(read: Read, text: str) -> None:
    with pytest.raises(ConfigError, match=f"--limit: {text.partition('=')[0]}=.*; expected"):
        read("--limit", text)
