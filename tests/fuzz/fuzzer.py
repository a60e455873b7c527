"""One target under atheris, until its time or its executions are over: a process of its own.

``python -m tests.fuzz.fuzzer MODULE [libFuzzer's arguments]``, where the module has ``check``.
"""

from __future__ import annotations

import importlib
import resource
import sys
from pathlib import Path
from typing import Final

import atheris

_ROOM: Final = 256 << 20
"""Address space that a target may take over what its modules have: memory that is asked for
on a length's word alone counts here, even where it is never touched."""


def main() -> None:
    """Import the target with coverage, bound its memory and fuzz it; does not return."""
    name, *arguments = sys.argv[1:]
    with atheris.instrument_imports(include=["meshnet", "meshnet_node", "meshnet_gateway"]):
        target = importlib.import_module(name)
    atheris.Setup([sys.argv[0], *arguments], target.check)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + _ROOM, resource.RLIM_INFINITY))
    atheris.Fuzz()


if __name__ == "__main__":
    main()
