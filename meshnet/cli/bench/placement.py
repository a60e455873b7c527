"""Which CPUs the processes of a benchmark run on, and how much of them they used."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path

__all__ = ["Placement", "cpu_seconds", "default_placement", "placed"]


class Placement(StrEnum):
    """Where the client and the servers run.

    A small message between sockets takes about 10 us where both ends share a core and several
    times that where another core has to be woken, so times are compared within one placement.
    """

    TWO = "two-cores"
    """The client on one core, every server on another."""
    ONE = "one-core"
    """Both ends on the same core."""
    FREE = "free"
    """Wherever the system puts them."""


def default_placement() -> Placement:
    """Give two cores where processes can be pinned to that many, else any."""
    return Placement.TWO if len(_two_cores()) == 2 else Placement.FREE


@contextmanager
def placed(placement: Placement, servers: Iterable[int]) -> Iterator[None]:
    """Pin this process and `servers`, by process id, with all their threads.

    Raises:
        OSError: pinning is not possible here.
    """
    if placement is Placement.FREE:
        yield
        return
    cores = _two_cores()
    if not cores:
        raise OSError("processes cannot be pinned to cores on this system")
    if placement is Placement.TWO and len(cores) < 2:
        raise OSError("there is only one core")
    allowed = os.sched_getaffinity(0)
    pids = list(servers)
    _pin(os.getpid(), {cores[0]})
    try:
        for pid in pids:
            _pin(pid, {cores[0] if placement is Placement.ONE else cores[1]})
        yield
    finally:
        for pid in (os.getpid(), *pids):
            _pin(pid, allowed)


def cpu_seconds(pid: int) -> float | None:
    """Give the CPU time that a process has taken, all threads; None where that is not told."""
    if pid == os.getpid():
        return time.process_time()
    # The clock id that clock_getcpuclockid(3) makes on Linux: another process's CPU time, in
    # nanoseconds where /proc counts in hundredths of a second.
    clock = (~pid << 3) | 2
    try:
        return time.clock_gettime(clock)
    except (AttributeError, OSError):
        return None


def _pin(pid: int, cpus: set[int]) -> None:
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # the thread has ended meanwhile
            os.sched_setaffinity(int(task.name), cpus)


def _two_cores() -> list[int]:
    """Give up to two CPUs, of different cores where the system says which threads share one."""
    if not hasattr(os, "sched_getaffinity") or not Path("/proc/self/task").is_dir():
        return []
    cpus = sorted(os.sched_getaffinity(0))
    siblings = _siblings(cpus[0])
    others = [cpu for cpu in cpus[1:] if cpu not in siblings] or cpus[1:]
    return [cpus[0], *others[:1]]


def _siblings(cpu: int) -> set[int]:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    found: set[int] = set()
    with suppress(OSError, ValueError):
        for part in path.read_text("ascii").strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    return found
