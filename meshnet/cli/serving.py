"""Runs a server process: says when it is ready, ends it on signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Annotated, Any

import typer

from meshnet.cli.output import console

__all__ = ["ExitWithParent", "Limits", "announce", "serve", "split_address"]

from meshnet.errors import ConfigError

ExitWithParent = Annotated[
    bool,
    typer.Option(
        "--exit-with-parent",
        hidden=True,
        help="End when standard input closes, as it does when the process that started this ends.",
    ),
]

Limits = Annotated[
    list[str] | None,
    typer.Option(
        "--limit",
        metavar="NAME=NUMBER",
        help="Change a limit of SECURITY.md's table; may be repeated.",
        show_default=False,
    ),
]

_EXIT_INTERRUPTED = 130


def announce(event: str, text: str, *, as_json: bool, **facts: Any) -> None:
    """Print that something is ready: a line for people, or one JSON object a line."""
    if as_json:
        sys.stdout.write(json.dumps({"event": event, **facts}) + "\n")
        sys.stdout.flush()
    else:
        console.print(text, highlight=False, soft_wrap=True)


def split_address(text: str, flag: str, default_port: int) -> tuple[str, int]:
    """Read ``HOST:PORT``, ``HOST`` or ``[IPV6]:PORT``.

    Raises:
        ConfigError: naming `flag`.
    """
    host, separator, port_text = text.rpartition(":")
    if not separator or (host.count(":") and not host.endswith("]")):
        host, port_text = text, str(default_port)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port_text.isascii() and port_text.isdigit()) or int(port_text) > 65535:
        raise ConfigError(
            f"{flag}: {text!r}; expected HOST:PORT, as 127.0.0.1:{default_port}", field=flag
        )
    return host, int(port_text)


def serve(
    open_service: Callable[[], AbstractAsyncContextManager[None]],
    *,
    exit_with_parent: bool = False,
) -> None:
    """Run a service until SIGINT or SIGTERM, then close it; a second signal ends at once.

    A signal while the service opens cancels that.

    Raises:
        MeshError: what opening the service raised.
    """
    asyncio.run(_serve(open_service, exit_with_parent))
    # A thread that still computes or loads must not hold the process; all else is closed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def _serve(
    open_service: Callable[[], AbstractAsyncContextManager[None]], exit_with_parent: bool
) -> None:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    stopped = loop.create_task(stop.wait())

    def on_signal() -> None:
        if stop.is_set():
            os._exit(_EXIT_INTERRUPTED)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    if exit_with_parent:
        try:
            loop.add_reader(sys.stdin.fileno(), _stop_at_end_of_input, loop, stop)
        except PermissionError:  # a file or /dev/null: no one holds the other end
            stop.set()
    service = open_service()
    opening = loop.create_task(service.__aenter__())
    await asyncio.wait({opening, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not opening.done():
        opening.cancel()
        await asyncio.wait({opening})
    if opening.cancelled():
        return
    opening.result()
    await stopped
    await service.__aexit__(None, None, None)


def _stop_at_end_of_input(loop: asyncio.AbstractEventLoop, stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        stop.set()
