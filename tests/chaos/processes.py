"""meshnet's commands as processes that start at once, are killed and stopped, and log to files.

A node takes seconds to import torch. Here one server process imports it, and every node is
forked from that: a process of its own, with its own sockets and signals, in a tenth of the time.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

_PRELOADED = [
    "meshnet.cli.main",
    "meshnet_gateway.cli",
    "meshnet_node.cli",
    "meshnet_node.hf.shard",
]
_POLL_S = 0.05
_END_S = 20.0


class ProcessError(AssertionError):
    """A process ended, or did not say what was expected of it."""


class Process:
    """One ``meshnet`` command with ``--json``.

    Attributes:
        name: of the log file.
        log: its standard error; processes of one name write after one another.
    """

    def __init__(self, name: str, arguments: list[str], log: Path, env: dict[str, str]) -> None:
        self.name = name
        self.log = log
        self._said = log.with_suffix(f".{os.urandom(4).hex()}.json")
        self._said.touch()
        # The end of this pipe, which closes when this process ends in any way, ends the other.
        inside, self._life = multiprocessing.Pipe(duplex=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._process = context.Process(
            target=_run,
            args=([*arguments, "--json", "--exit-with-parent"], inside, self._said, log, env),
            name=name,
            daemon=True,
        )
        self._process.start()
        inside.close()

    @property
    def pid(self) -> int:
        """Of the process; an ended one has none."""
        return self._process.pid or 0

    @property
    def exit_code(self) -> int | None:
        """Of an ended process; None while it runs."""
        return self._process.exitcode

    async def event(self, name: str, timeout_s: float = 120.0) -> dict[str, Any]:
        """Wait until it announces `name`."""

        def said() -> dict[str, Any] | None:
            for line in self._said.read_text().splitlines(keepends=True):
                if line.endswith("\n") and (event := json.loads(line))["event"] == name:
                    found: dict[str, Any] = event
                    return found
            if self.exit_code is not None:
                last = self.log.read_text().splitlines()[-1:] if self.log.exists() else []
                raise ProcessError(f"{self.name} ended with {self.exit_code}, not {name}: {last}")
            return None

        return await until(said, timeout_s, f"{self.name} is {name}")

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if it still runs."""
        if self.exit_code is None:
            os.kill(self.pid, number)

    async def kill(self) -> None:
        """End it at once."""
        self.send(signal.SIGKILL)
        await until(lambda: self.exit_code is not None, _END_S, f"{self.name} is dead")

    async def end(self) -> None:
        """Ask it to end, and end it where it does not."""
        if self.exit_code is None:
            self.send(signal.SIGCONT)
            self.send(signal.SIGTERM)
            try:
                await until(lambda: self.exit_code is not None, _END_S, f"{self.name} has ended")
            except ProcessError:
                await self.kill()
        self._life.close()


async def until(check: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Ask until `check` gives something true; gives that.

    Raises:
        ProcessError: it did not within the time, naming `what`.
    """
    clock = asyncio.get_running_loop().time
    end = clock() + timeout_s
    while not (result := check()):
        if clock() > end:
            raise ProcessError(f"not true within {timeout_s:.0f} s: {what}")
        await asyncio.sleep(_POLL_S)
    return result


async def until_async(check: Callable[[], Awaitable[bool]], timeout_s: float, what: str) -> None:
    """Ask, as `until` does, what has to be asked for."""
    clock = asyncio.get_running_loop().time
    end = clock() + timeout_s
    while not await check():
        if clock() > end:
            raise ProcessError(f"not true within {timeout_s:.0f} s: {what}")
        await asyncio.sleep(_POLL_S)


def _run(
    arguments: list[str], life: Connection, said: Path, log: Path, env: dict[str, str]
) -> None:
    """Become the command: in the new process."""
    os.setsid()
    os.dup2(life.fileno(), 0)
    for path, number in ((said, 1), (log, 2)):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(descriptor, number)
        os.close(descriptor)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, buffering=1, closefd=False)  # noqa: SIM115 - for the process's life
        for number, mode in ((0, "r"), (1, "w"), (2, "w"))
    )
    os.environ.update(env)
    from meshnet.cli.main import main

    main(arguments)
