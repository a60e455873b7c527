"""etcd members for tests: real processes on free ports of 127.0.0.1, ended by pid."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc

from meshnet.control.etcd.client import EtcdClient, Member
from meshnet.internal.etcd.v3 import etcd_pb2 as etcd
from tests.plane.certificates import Authority
from tests.programs import program

READY_S = 60.0


@contextmanager
def free_ports(count: int) -> Iterator[list[int]]:
    """Give ports that are free now, and were held together so that all differ."""
    with ExitStack() as stack:
        holders = [stack.enter_context(socket.socket()) for _ in range(count)]
        for holder in holders:
            holder.bind(("127.0.0.1", 0))
        ports = [holder.getsockname()[1] for holder in holders]
    yield ports


@dataclass
class Cluster:
    """Running members; addresses are ``host:port`` for clients, by name."""

    folder: Path
    addresses: dict[str, str] = field(default_factory=dict)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    arguments: dict[str, list[str]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return "etcd://" + ",".join(self.addresses.values())

    def start(self, name: str) -> None:
        log = (self.folder / f"{name}.log").open("ab")
        with log:
            self.processes[name] = subprocess.Popen(
                [program("etcd"), *self.arguments[name]],
                stdout=log,
                stderr=log,
                env={"PATH": os.environ["PATH"], "GOMAXPROCS": "1"},
            )

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    async def ready(self) -> None:
        """Wait until every member answers linearizable reads."""
        for name, address in self.addresses.items():
            member = Member(address)
            try:
                async with asyncio.timeout(READY_S):
                    while not await _answers(member):
                        if self.processes[name].poll() is not None:
                            raise AssertionError((self.folder / f"{name}.log").read_text()[-2000:])
                        await asyncio.sleep(0.1)
            finally:
                await member.close()

    async def leader(self) -> str:
        """Name the member that leads; exactly one does, once the cluster is ready."""
        for name, address in self.addresses.items():
            metrics = await _metrics(address)
            if "etcd_server_is_leader 1" in metrics:
                return name
        raise AssertionError("no member leads")

    async def emptied(self) -> None:
        """Wait until it serves, and delete what tests before have left: nodes, documents, all."""
        await self.ready()
        client = EtcdClient(list(self.addresses.values()))
        whole = etcd.DeleteRangeRequest(key=b"/meshnet/", range_end=b"/meshnet0")
        await client.txn(etcd.TxnRequest(success=[etcd.RequestOp(request_delete_range=whole)]))
        await client.close()


class Proxy:
    """A way to one member that can be cut: nothing passes, and nothing is refused."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._open = asyncio.Event()
        self._open.set()
        self._pumps: set[asyncio.Task[None]] = set()
        self.address = ""

    @classmethod
    @asynccontextmanager
    async def to(cls, cluster: Cluster, name: str = "m0") -> AsyncIterator[Proxy]:
        proxy = cls(cluster.addresses[name])
        server = await asyncio.start_server(proxy._accept, "127.0.0.1", 0)
        proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield proxy
        finally:
            server.close()
            for pump in proxy._pumps:
                pump.cancel()
            await asyncio.gather(*proxy._pumps, return_exceptions=True)

    def cut(self) -> None:
        self._open.clear()

    def heal(self) -> None:
        self._open.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._pumps.add(task)
        try:
            await self._open.wait()
            host, _, port = self._target.rpartition(":")
            up_reader, up_writer = await asyncio.open_connection(host, int(port))
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._pump(reader, up_writer))
                    group.create_task(self._pump(up_reader, writer))
            finally:
                up_writer.close()
        except* (OSError, asyncio.CancelledError):
            pass
        finally:
            writer.close()
            self._pumps.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            await self._open.wait()
            writer.write(data)
            await writer.drain()
        writer.write_eof()


async def _answers(member: Member) -> bool:
    try:
        await member.call("/etcdserverpb.KV/Range", etcd.RangeRequest(key=b"x"), etcd.RangeResponse)
    except grpc.aio.AioRpcError:
        return False
    return True


async def _metrics(address: str) -> str:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
    body = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    await writer.wait_closed()
    return body.decode()


@contextmanager
def etcd_cluster(folder: Path, members: int, *, tls: Authority | None = None) -> Iterator[Cluster]:
    """Start a cluster; `Cluster.ready` tells when it serves.

    With `tls` it wants certificates of its clients, which that authority signed.
    """
    scheme = "http" if tls is None else "https"
    cluster = Cluster(folder)
    names = [f"m{index}" for index in range(members)]
    with free_ports(2 * members) as ports:
        clients, peers = ports[:members], ports[members:]
    every = ",".join(
        f"{name}=http://127.0.0.1:{port}" for name, port in zip(names, peers, strict=True)
    )
    for name, client, peer in zip(names, clients, peers, strict=True):
        cluster.addresses[name] = f"127.0.0.1:{client}"
        cluster.arguments[name] = [
            *("--name", name, "--data-dir", str(folder / name)),
            *("--listen-client-urls", f"{scheme}://127.0.0.1:{client}"),
            *("--advertise-client-urls", f"{scheme}://127.0.0.1:{client}"),
            *("--listen-peer-urls", f"http://127.0.0.1:{peer}"),
            *("--initial-advertise-peer-urls", f"http://127.0.0.1:{peer}"),
            *("--initial-cluster", every, "--initial-cluster-token", folder.name),
        ]
        if tls is not None:
            cluster.arguments[name] += [
                *("--cert-file", str(tls.certificate), "--key-file", str(tls.key)),
                *("--client-cert-auth", "--trusted-ca-file", str(tls.ca)),
            ]
    try:
        for name in names:
            cluster.start(name)
        yield cluster
    finally:
        for process in cluster.processes.values():
            process.kill()
            process.wait()
