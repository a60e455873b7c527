from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest

from meshnet.control.app import Addresses, ControlServer
from meshnet.control.client import ControlClient
from meshnet.control.documents import Documents
from meshnet.control.settings import ControlSettings
from meshnet.v1 import node_service_pb2 as pb
from meshnet.v1 import types_pb2
from tests.control.document_stores import opened
from tests.control.etcd_cluster import Cluster, etcd_cluster

MODEL = "models/acme/tiny"


@dataclass
class FakeClock:
    """Monotonic seconds that pass only when told."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@dataclass
class Mesh:
    """A running control plane with a client of each face."""

    server: ControlServer
    addresses: Addresses
    client: ControlClient
    http: aiohttp.ClientSession
    clock: FakeClock
    leases: dict[str, str] = field(default_factory=dict)

    async def json(self, method: str, path: str, **kwargs: Any) -> tuple[int, Any]:
        """Ask the JSON face; gives the status and the parsed body."""
        url = aiohttp.client.URL(f"http://{self.addresses.http}{path}", encoded=True)
        async with self.http.request(method, url, **kwargs) as response:
            return response.status, await response.json(content_type=None)

    async def join(self, node_id: str, layers: tuple[int, int], **kwargs: Any) -> pb.Node:
        """Register a node and make it READY."""
        node = make_node(layers, **kwargs)
        registered = await self.client.register(node_id, node)
        self.leases[node_id] = registered.lease.lease_id
        await self.beat(node_id, incarnation=node.incarnation)
        return registered.node

    async def beat(
        self, node_id: str, *, incarnation: int = 1, ready: bool = True, **load: int
    ) -> pb.HeartbeatResponse:
        """Send a heartbeat of a node that joined."""
        return await self.client.heartbeat(
            node_id,
            lease_id=self.leases[node_id],
            incarnation=incarnation,
            ready=ready,
            load=types_pb2.LoadStats(**load) if load else None,
        )


def make_node(
    layers: tuple[int, int] = (0, 8),
    *,
    port: int = 7080,
    count: int = 8,
    incarnation: int = 1,
    model: str = MODEL,
    digest: str = "d1",
) -> pb.Node:
    start, end = layers
    return pb.Node(
        incarnation=incarnation,
        endpoints=[types_pb2.Endpoint(uri=f"http://127.0.0.1:{port}/forward")],
        shards=[
            types_pb2.Shard(
                model=model,
                model_digest=digest,
                layers=types_pb2.LayerRange(start=start, end=end),
                layer_count=count,
                embedding=start == 0,
                lm_head=end == count,
            )
        ],
    )


@pytest.fixture
async def start_mesh() -> AsyncIterator[Callable[..., Awaitable[Mesh]]]:
    started: list[Mesh] = []

    async def start(**settings: Any) -> Mesh:
        clock = FakeClock()
        server = ControlServer(
            ControlSettings(http_port=0, grpc_port=0, close_grace_s=0.2, **settings), clock=clock
        )
        addresses = await server.start()
        client = ControlClient(f"grpc://{addresses.grpc}")
        mesh = Mesh(server, addresses, client, aiohttp.ClientSession(), clock)
        started.append(mesh)
        return mesh

    yield start
    for mesh in started:
        await mesh.client.close()
        await mesh.http.close()
        await mesh.server.close()


@pytest.fixture
async def mesh(start_mesh: Callable[..., Awaitable[Mesh]]) -> Mesh:
    return await start_mesh()


@pytest.fixture(scope="session")
def lone_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One member, for all tests that leave it as it was but for its content."""
    with etcd_cluster(tmp_path_factory.mktemp("etcd"), 1) as cluster:
        yield cluster


@pytest.fixture(params=["memory", "sqlite", pytest.param("etcd", marks=pytest.mark.etcd)])
async def url(request, tmp_path) -> str:
    if request.param == "memory":
        return "memory"
    if request.param == "sqlite":
        return f"sqlite:{tmp_path}/mesh.db"
    cluster = request.getfixturevalue("lone_etcd")
    await cluster.emptied()
    return cluster.url


@pytest.fixture
async def pair(url) -> AsyncIterator[tuple[Documents, Documents]]:
    """The same store, opened twice."""
    async with opened(url) as one:
        if url == "memory":
            yield one, one
            return
        async with opened(url) as other:
            yield one, other
