"""Runs the command line as a user does: processes, their output, their exit codes."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def meshnet(*arguments: str, timeout_s: float = 120.0, **env: str) -> subprocess.CompletedProcess:
    """Run ``meshnet ARGUMENTS`` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "meshnet", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **env},
    )


def meshnet_json(*arguments: str, **env: str) -> Any:
    """Run a command with ``--json``; gives what it printed."""
    done = meshnet(*arguments, "--json", **env)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


class Running:
    """A server command with ``--json``, and what it announced.

    Attributes:
        process: to signal.
        errors: lines of its standard error.
        ready: what it announced when it was ready, where a test keeps that here.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.errors: list[str] = []
        self.ready: dict[str, Any] = {}
        self._events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self._readers = [
            threading.Thread(target=read, daemon=True)
            for read in (self._read_events, self._read_errors)
        ]
        for reader in self._readers:
            reader.start()

    def event(self, name: str, timeout_s: float = 120.0) -> dict[str, Any]:
        """Wait for an announcement."""
        end = time.monotonic() + timeout_s
        while (event := self._events.get(timeout=max(0.01, end - time.monotonic()))) is not None:
            if event["event"] == name:
                return event
        raise AssertionError(f"ended before it was {name}: {''.join(self.errors[-5:])}")

    def interrupt(self, timeout_s: float = 30.0) -> int:
        """Send Ctrl-C; gives the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(timeout_s)

    def end(self) -> None:
        """End the process, whatever it does, and close its pipes."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait(20)
        for reader in self._readers:
            reader.join(20)
        self.process.stdout.close()
        self.process.stderr.close()

    def _read_events(self) -> None:
        for line in self.process.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)

    def _read_errors(self) -> None:
        self.errors.extend(self.process.stderr)


@contextmanager
def running(*arguments: str, **env: str) -> Iterator[Running]:
    """Run a server command for the time of the context."""
    process = subprocess.Popen(
        [sys.executable, "-m", "meshnet", *arguments, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **env},
    )
    server = Running(process)
    try:
        yield server
    finally:
        server.end()


def eventually(check: Callable[[], T], timeout_s: float = 30.0) -> T:
    """Ask until `check` gives something true, with a pause between; gives that.

    A condition of another process can only be polled.
    """
    end = time.monotonic() + timeout_s
    while not (result := check()):
        assert time.monotonic() < end, f"not true within {timeout_s} s: {check}"
        threading.Event().wait(0.05)
    return result


def is_alive(pid: int) -> bool:
    """Tell whether a process runs; one that waits to be collected does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
