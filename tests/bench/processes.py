"""Server processes of the benchmarks: started, heard when ready, ended by their ids."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

READY_EVENT = "ready"
_READY_S = 120.0
_END_S = 10.0


@contextmanager
def servers(*commands: list[str]) -> Iterator[list[str]]:
    """Run a Python process for each command; gives the address of each, ``host:port``.

    A server prints a JSON object with ``event`` and ``address`` when it is ready, and ends
    when its standard input does, as it does if this process is killed.

    Args:
        *commands: arguments of the interpreter.
    """
    processes: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            process = _start(command)
            processes.append(process)
        yield [_ready_address(process) for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            _end(process)


def _start(command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _ready_address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    late = threading.Timer(_READY_S, process.kill)
    late.start()
    try:
        for line in process.stdout:
            with suppress(ValueError):
                event = json.loads(line)
                if event.get("event") == READY_EVENT:
                    return str(event["address"])
    finally:
        late.cancel()
    raise RuntimeError(f"{process.args!r} ended with exit code {process.wait()} before it served")


def _end(process: subprocess.Popen[str]) -> None:
    """Wait until a process that was asked to end has done so, and kill one that has not."""
    try:
        process.communicate(timeout=_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
