"""A control plane, a gateway and nodes as processes, with a proxy before every node."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import aiohttp

from meshnet.control.client import ControlClient
from meshnet.errors import MeshError
from meshnet.topology import LayerRange
from meshnet.v1 import node_service_pb2 as nodes_pb2
from tests.chaos.processes import Process, until, until_async
from tests.chaos.proxy import Proxy, proxy

__all__ = ["Mesh", "MeshNode", "MeshOptions", "running_mesh"]

_ASK = aiohttp.ClientTimeout(total=5.0)


@dataclass(frozen=True)
class MeshOptions:
    """What is run.

    Attributes:
        model: directory.
        stages: layers of each stage.
        per_stage: nodes of each.
        dtype: of the nodes.
        chunk_tokens: of the gateway.
        recovery: of the gateway, ``fast`` or ``exact``.
        spare_wait_s: of the gateway.
        lease_ttl_s: of the control plane.
        idle_ttl_s: after which nodes free what nobody released.
        cache_tokens: of each node.
        with_proxies: a proxy before every node.
        stub: nodes that compute nothing.
        node_options: further ones, of every node.
    """

    model: Path
    stages: Sequence[LayerRange]
    per_stage: int = 2
    dtype: str = "float32"
    chunk_tokens: int = 128
    recovery: str = "fast"
    spare_wait_s: float = 60.0
    lease_ttl_s: float = 3.0
    idle_ttl_s: float = 8.0
    cache_tokens: int = 4096
    with_proxies: bool = True
    stub: bool = False
    node_options: tuple[str, ...] = ()


@dataclass
class MeshNode:
    """One node process.

    Attributes:
        id: new for each start.
        stage: that it serves.
        address: of the process itself; others reach it through the proxy.
    """

    id: str
    stage: int
    process: Process
    proxy: Proxy
    address: str = ""


@dataclass(frozen=True)
class Held:
    """What a node holds: sessions and tokens reserved for them."""

    sessions: int
    reserved_tokens: int
    capacity_tokens: int


@dataclass
class Mesh:
    """All of it; made by `running_mesh`."""

    options: MeshOptions
    folder: Path
    http: aiohttp.ClientSession
    stack: AsyncExitStack
    nodes: dict[str, MeshNode] = field(default_factory=dict)
    url: str = ""
    model: str = ""
    on_control: asyncio.Lock = field(default_factory=asyncio.Lock)
    _processes: list[Process] = field(default_factory=list)
    _started: int = 0
    _control_ports: tuple[str, str] = ("127.0.0.1:0", "127.0.0.1:0")
    _read: dict[Path, int] = field(default_factory=dict)

    async def start(self) -> Self:
        """Start the control plane, the gateway and every node; waits until all are ready."""
        options = self.options
        await self.start_control()
        self.gateway = self._spawn(
            "gateway",
            *("gateway", "--model", str(options.model), "--listen", "127.0.0.1:0"),
            *("--control", self.control_url, "--recovery", options.recovery),
            *("--spare-wait", str(options.spare_wait_s)),
            MESHNET_CHUNK_TOKENS=str(options.chunk_tokens),
        )
        listening = await self.gateway.event("listening")
        self.url, self.model = listening["http"], listening["models"][0]
        self.registry = await self.stack.enter_async_context(ControlClient(self.control_url))
        await asyncio.gather(
            *(
                self.start_node(i)
                for i in range(len(options.stages))
                for _ in range(options.per_stage)
            )
        )
        await self.whole()
        return self

    async def start_control(self) -> None:
        """Start the control plane, again at the same ports."""
        http, grpc = self._control_ports
        self.control = self._spawn(
            "control",
            *("control", "--listen", http, "--grpc-listen", grpc),
            *("--lease-ttl", str(self.options.lease_ttl_s)),
        )
        listening = await self.control.event("listening")
        self.control_url = listening["grpc"]
        self._control_ports = (
            listening["http"].removeprefix("http://"),
            listening["grpc"].removeprefix("grpc://"),
        )

    async def start_node(self, stage: int) -> MeshNode:
        """Start one more node of a stage, under a new id."""
        options = self.options
        self._started += 1
        name = f"s{stage}-{self._started}"
        way = await self.stack.enter_async_context(proxy())
        layers = options.stages[stage]
        backend = (
            ("--backend", "stub", "--stub-layers", str(options.stages[-1].end))
            if options.stub
            else ("--model", str(options.model), "--dtype", options.dtype, "--threads", "1")
        )
        process = self._spawn(
            name,
            *("node", "--id", name, "--layers", f"{layers.start}:{layers.end}", *backend),
            *("--listen", "127.0.0.1:0", "--control", self.control_url),
            *(("--advertise", way.address) if options.with_proxies else ()),
            *("--cache-tokens", str(options.cache_tokens)),
            *("--idle-ttl", str(options.idle_ttl_s), *options.node_options),
        )
        node = MeshNode(name, stage, process, way)
        node.address = way.target = (await process.event("listening"))["address"]
        await process.event("ready")
        self.nodes[name] = node
        return node

    async def kill_node(self, node: MeshNode) -> None:
        """End a node at once and forget it."""
        self.nodes.pop(node.id, None)
        await node.process.kill()

    def of_stage(self, stage: int) -> list[MeshNode]:
        """Give the nodes of a stage that were not killed."""
        return [node for node in self.nodes.values() if node.stage == stage]

    async def pick(self, stage: int, *, busy: bool) -> MeshNode:
        """Give the node of a stage with most or with fewest sessions; waits for one to start."""
        await until(lambda: self.of_stage(stage), 60, f"a node of stage {stage} runs")
        nodes = self.of_stage(stage)
        held = await asyncio.gather(*(self.held(node) for node in nodes))
        ranked = sorted(
            zip((h.sessions if h else 0 for h in held), nodes, strict=True),
            key=lambda pair: (-pair[0], pair[1].id),
        )
        return ranked[0 if busy else -1][1]

    async def held(self, node: MeshNode) -> Held | None:
        """Ask a node what it holds; None where it does not answer."""
        figures = await self.figures(f"http://{node.address}")
        if not figures:
            return None
        return Held(
            int(figures["meshnet_sessions"]),
            int(figures["meshnet_cache_tokens_reserved"]),
            int(figures["meshnet_cache_tokens_capacity"]),
        )

    async def figures(self, url: str) -> dict[str, float]:
        """Read a process's metrics; empty where it does not answer."""
        try:
            async with self.http.get(url + "/metrics", timeout=_ASK) as answer:
                lines = (await answer.text()).splitlines()
        except (aiohttp.ClientError, TimeoutError):
            return {}
        return {
            name: float(value)
            for name, _, value in (line.rpartition(" ") for line in lines if line[0] != "#")
        }

    async def whole(self) -> None:
        """Wait until the control plane calls every node ready."""

        async def ready() -> bool:
            try:
                listed = await self.registry.list_nodes()
            except MeshError:
                return False
            states = {node.name.removeprefix("nodes/"): node.state for node in listed}
            return all(states.get(name) == nodes_pb2.NODE_STATE_READY for name in self.nodes)

        await until_async(ready, 60, "every node is ready")

    async def empty(self, timeout_s: float) -> None:
        """Wait until no node holds a session or a reservation."""

        async def is_empty() -> bool:
            held = await asyncio.gather(*map(self.held, self.nodes.values()))
            self._last_held = dict(zip(self.nodes, held, strict=True))
            return all(h is not None and h.sessions == h.reserved_tokens == 0 for h in held)

        try:
            await until_async(is_empty, timeout_s, "no session is left")
        except AssertionError as error:
            raise AssertionError(f"{error}; held: {self._last_held}") from None

    def new_lines(self) -> list[str]:
        """Give what the processes have logged since this was last asked."""
        lines = []
        for path in sorted(self.folder.glob("*.log")):
            text = path.read_bytes()
            begin = self._read.get(path, 0)
            self._read[path] = len(text)
            lines += [
                f"{path.stem}: {line}"
                for line in text[begin:].decode(errors="replace").splitlines()
            ]
        return lines

    async def close(self) -> None:
        """End every process, in any state; the control plane last, which the others tell."""
        last = [process for process in self._processes if process.name == "control"]
        others = [process for process in self._processes if process.name != "control"]
        await asyncio.gather(*(process.end() for process in others))
        await asyncio.gather(*(process.end() for process in last))

    def _spawn(self, name: str, *arguments: str, **env: str) -> Process:
        env["MESHNET_LOG"] = "info"
        process = Process(name, list(arguments), self.folder / f"{name}.log", env)
        self._processes.append(process)
        return process


@asynccontextmanager
async def running_mesh(options: MeshOptions, folder: Path) -> AsyncIterator[Mesh]:
    """Run a mesh for the time of the context; its logs go to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        )
        mesh = Mesh(options, folder, http, stack)
        stack.push_async_callback(mesh.close)
        yield await mesh.start()
