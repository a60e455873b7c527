"""A replica of the control plane as a process, for tests that kill it."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass


@dataclass
class Replica:
    """A ``meshnet control`` process that comes back at the same addresses."""

    store: str
    lease_ttl_s: float
    grpc_port: int = 0
    process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.grpc_port}"

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "meshnet", "control", "--json", "--store", self.store),
            *("--listen", "127.0.0.1:0", "--grpc-listen", f"127.0.0.1:{self.grpc_port}"),
            *("--lease-ttl", str(self.lease_ttl_s), "--exit-with-parent"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), 60)
        self.grpc_port = int(json.loads(line)["grpc"].rpartition(":")[2])

    async def kill(self) -> None:
        if self.process is not None and self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
