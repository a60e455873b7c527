"""Starts meshnet's own processes, hears when they are ready, ends them all."""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from meshnet import config
from meshnet.errors import Code, MeshError

__all__ = ["Child", "Children"]

_GRACE_S = 15.0
_LOG_LINES = 200


class Child:
    """One process that was started.

    Attributes:
        name: as its log lines show it.
        log: the last lines of its standard error.
    """

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.process = process
        self.log: deque[str] = deque(maxlen=_LOG_LINES)
        self._events: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self.process.pid

    async def event(self, name: str, timeout_s: float = 300.0) -> dict[str, Any]:
        """Wait until the process announces `name` on its standard output.

        Raises:
            MeshError: it ended before, with the last line that it logged, or took too long.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while (event := await self._events.get()) is not None:
                    if event.get("event") == name:
                        return event
        except TimeoutError:
            raise MeshError(
                Code.DEADLINE_EXCEEDED, f"{self.name} was not {name} within {timeout_s:.0f} s"
            ) from None
        await self.process.wait()
        last = self.log[-1] if self.log else "it logged nothing"
        raise MeshError(
            Code.UNAVAILABLE,
            f"{self.name} ended with exit code {self.process.returncode}:"
            f" {last.removeprefix('meshnet: error: ')}",
        )

    async def read(self, on_log: Callable[[str], None] | None) -> None:
        """Read both outputs until they end."""
        await asyncio.gather(self._read_events(), self._read_log(on_log))

    async def _read_events(self) -> None:
        assert self.process.stdout is not None  # noqa: S101 - started with a pipe
        async for line in self.process.stdout:
            with suppress(ValueError):
                self._events.put_nowait(json.loads(line))
        self._events.put_nowait(None)

    async def _read_log(self, on_log: Callable[[str], None] | None) -> None:
        assert self.process.stderr is not None  # noqa: S101 - started with a pipe
        async for line in self.process.stderr:
            text = line.decode(errors="replace").rstrip()
            self.log.append(text)
            if on_log is not None:
                on_log(f"{self.name}: {text}")


class Children:
    """The processes of one mesh on this machine; leaving the context ends them all.

    Each is started with ``--json --exit-with-parent``: it announces itself in JSON, and
    ends when this process does, however that ends.

    Args:
        on_log: called with each line that a process logs.
    """

    def __init__(self, on_log: Callable[[str], None] | None = None) -> None:
        self.children: list[Child] = []
        self._on_log = on_log
        self._readers: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        """Begin with none."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Ask all to end, wait for the grace, kill what is left."""
        for child in reversed(self.children):
            if child.process.returncode is None:
                with suppress(ProcessLookupError):
                    child.process.terminate()
        waits = [asyncio.ensure_future(child.process.wait()) for child in self.children]
        if waits:
            late = (await asyncio.wait(waits, timeout=_GRACE_S))[1]
            if late:
                for child in self.children:
                    if child.process.returncode is None:
                        child.process.kill()
                await asyncio.wait(waits)
        await asyncio.gather(*self._readers)

    async def start(self, name: str, *arguments: str, **variables: str) -> Child:
        """Start ``meshnet ARGUMENTS`` as a process of its own."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "meshnet",
            *arguments,
            "--json",
            "--exit-with-parent",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env=config.child_environment(**variables),
        )
        child = Child(name, process)
        self.children.append(child)
        self._readers.append(asyncio.create_task(child.read(self._on_log)))
        return child

    async def first_end(self) -> Child:
        """Wait until one of the processes ends; gives it."""
        waits = {asyncio.ensure_future(child.process.wait()): child for child in self.children}
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()
        return waits[done.pop()]
