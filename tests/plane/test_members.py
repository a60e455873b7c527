"""The plane of a mesh whose certificates have names: who is served, and whom clients believe."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from meshnet.authority import Authority
from meshnet.certificates import spki_sha256
from meshnet.chunk import Answer, Chunk
from meshnet.compression import CompressionPolicies
from meshnet.credentials import Credentials
from meshnet.errors import MeshError, NextHopError
from meshnet.identity import Identity, Role
from meshnet.operations import OwnerId, Reservation
from meshnet.plane.caller import Caller
from meshnet.plane.client import PlaneClient
from meshnet.plane.links import LinkSettings
from meshnet.plane.server import PlaneServer
from meshnet.topology import LayerRange, NodeId
from tests.control.secured import make_credentials, write_credentials
from tests.plane.certificates import make_authority
from tests.plane.doubles import (
    BOUND_S,
    P16,
    EchoHandler,
    GateHandler,
    RawCaller,
    chunk_header,
    new_session,
    problem,
    request,
    serving,
    tensor_of,
)
from tests.plane.test_tls import RAW
from tests.plane.threaded import ThreadedClient

ALPHA = NodeId("alpha")
BETA = NodeId("beta")


class Mesh:
    """An authority and whom it has certified; another one is trusted too, which knows no names."""

    def __init__(self, folder: Path, life_s: float = 3600.0) -> None:
        self.folder = folder
        self.authority = Authority(folder / "authority", life_s=life_s)
        self.other = make_authority(folder / "other")

    def give(self, role: Role, name: str) -> Credentials:
        """Certify somebody."""
        credentials = make_credentials(self.authority, Identity(role, name), self.folder / name)
        self._trust_both(self.folder / name / "ca.pem")
        credentials.reload()
        return credentials

    def give_unnamed(self) -> Credentials:
        """Give somebody a certificate without a name of the mesh."""
        credentials = Credentials(self.other.files)
        self._trust_both(self.other.ca)
        credentials.reload()
        assert credentials.identity is None
        return credentials

    def renew(self, credentials: Credentials) -> None:
        """Certify a new key for somebody, and have it used."""
        identity = credentials.identity
        assert identity is not None
        write_credentials(self.authority, identity, self.folder / identity.name)
        credentials.reload()

    def _trust_both(self, path: Path) -> None:
        path.write_text(self.authority.bundle_pem + self.other.ca.read_text())


@pytest.fixture
def mesh(tmp_path: Path) -> Mesh:
    return Mesh(tmp_path)


@pytest.fixture(params=[PlaneClient, ThreadedClient], ids=["asyncio", "threads"])
def client_class(request: pytest.FixtureRequest) -> type[Any]:
    kind: type[Any] = request.param
    return kind


class Counting(EchoHandler):
    """Counts what reaches it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def forward(self, *arguments: Any) -> Any:
        self.count += 1
        return super().forward(*arguments)

    def reserve(self, *_: Any) -> None:
        self.count += 1

    def release(self, *_: Any) -> None:
        self.count += 1

    def attend(self, *_: Any) -> None:
        self.count += 1

    def get(self, path: str) -> tuple[int, str, bytes] | None:
        return 200, "text/plain", b"fine"


@contextlib.asynccontextmanager
async def encrypted(place: tuple[str, int], own: Credentials) -> AsyncIterator[RawCaller]:
    """Open a raw connection through TLS."""
    own.client.check_hostname = False
    reader, writer = await asyncio.open_connection(*place, ssl=own.client, server_hostname="node")
    try:
        yield RawCaller(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def bare(method: str, target: str) -> bytes:
    return f"{method} {target} HTTP/1.1\r\nHost: node\r\nContent-Length: 0\r\n\r\n".encode()


CHUNK = request()
SESSION = f"/sessions/{new_session()}"
OWNER = f"/owners/{new_session()}"
LOOKS = [(bare("GET", "/metrics"), 200), (bare("GET", "/healthz"), 200)]
ACTS = [
    (CHUNK, 403),
    (bare("PUT", SESSION), 403),
    (bare("DELETE", SESSION), 403),
    (bare("POST", f"{SESSION}/move"), 403),
    (bare("POST", f"{SESSION}/rebuild"), 403),
    (bare("PUT", f"{SESSION}/cache"), 403),
    (bare("POST", OWNER), 403),
    (bare("POST", "/metrics"), 403),
    (bare("GET", "/metrics/"), 403),
    (bare("GET", "/elsewhere"), 403),
]


@pytest.mark.parametrize("role", [*(role for role in Role if role.is_operator), Role.CONTROL, None])
async def test_others_than_nodes_and_gateways_change_nothing(mesh: Mesh, role: Role | None) -> None:
    handler = Counting()
    member = mesh.give(Role.GATEWAY, "gate")
    stranger = mesh.give_unnamed() if role is None else mesh.give(role, "ann")
    looks = LOOKS if role is not None and role.is_operator else [(act, 403) for act, _ in LOOKS]
    async with serving(handler, tls=mesh.give(Role.NODE, "alpha")) as place:
        async with encrypted(place, member) as caller:
            await caller.send(CHUNK)  # from now on its head is known to the server
            assert (await caller.read()).status == 200
        async with encrypted(place, stranger) as caller:
            for act, status in [*ACTS, *looks, *ACTS]:
                await caller.send(act)
                answer = await caller.read()
                assert answer.status == status, act
                assert status == 200 or problem(answer.body)["reason"] == "ROLE_NOT_ALLOWED"
        assert handler.count == 1
        async with encrypted(place, member) as caller:
            await caller.send(CHUNK)
            answer = await caller.read()
            assert (answer.status, answer.body) == (200, P16)


async def test_who_has_no_certificate_of_the_mesh_does_not_get_in(
    mesh: Mesh, tmp_path: Path, client_class: type[Any]
) -> None:
    other = Mesh(tmp_path / "elsewhere")
    own = mesh.give(Role.NODE, "alpha")
    async with serving(EchoHandler(), tls=own) as (host, port):
        for credentials in (other.give(Role.GATEWAY, "gate"), None):
            client = client_class(LinkSettings(RAW, tls=credentials))
            with pytest.raises(NextHopError):
                await forward(client, f"{host}:{port}", ALPHA)
            await client.close()
        client = client_class(LinkSettings(RAW, tls=mesh.give(Role.GATEWAY, "gate")))
        await forward(client, f"{host}:{port}", ALPHA)
        await client.close()


async def forward(client: Any, address: str, node: NodeId, position: int = 0) -> None:
    header = chunk_header().at(position)
    answer = await client.forward(address, node, header, tensor_of(P16), timeout_s=BOUND_S)
    assert answer.tensor.tobytes() == P16


def requests_of(client: PlaneClient, address: str) -> dict[str, Callable[[], Awaitable[Any]]]:
    reservation = Reservation(new_session(), 8, LayerRange(0, 1), (), None)
    return {
        "forward": lambda: forward(client, address, BETA),
        "reserve": lambda: client.reserve(address, BETA, reservation, timeout_s=BOUND_S),
        "release": lambda: client.release(address, reservation.session, node=BETA),
        "attend": lambda: client.attend(address, OwnerId(str(new_session())), node=BETA),
        "get": lambda: client.get(address, "/healthz", timeout_s=BOUND_S, node=BETA),
    }


@pytest.mark.parametrize("kept", [False, True], ids=["new", "kept"])
@pytest.mark.parametrize("kind", ["forward", "reserve", "release", "attend", "get"])
async def test_a_client_sends_nothing_to_another_node_than_the_one_named(
    mesh: Mesh, kind: str, kept: bool
) -> None:
    handler = Counting()
    client = PlaneClient(LinkSettings(RAW, tls=mesh.give(Role.GATEWAY, "gate")))
    async with serving(handler, tls=mesh.give(Role.NODE, "alpha")) as (host, port):
        address = f"{host}:{port}"
        if kept:
            await forward(client, address, ALPHA)
        said = "expected spiffe://mesh/node/beta, found spiffe://mesh/node/alpha"
        with pytest.raises(MeshError, match=said):
            await requests_of(client, address)[kind]()
        assert handler.count == kept
        await forward(client, address, ALPHA)
        await client.close()


@pytest.mark.parametrize("role", [Role.GATEWAY, Role.ADMIN, None])
async def test_who_is_no_node_gets_no_chunk(
    mesh: Mesh, client_class: type[Any], role: Role | None
) -> None:
    handler = Counting()
    client = client_class(LinkSettings(RAW, tls=mesh.give(Role.GATEWAY, "gate")))
    server = mesh.give_unnamed() if role is None else mesh.give(role, "alpha")
    async with serving(handler, tls=server) as (host, port):
        with pytest.raises(NextHopError, match=r"node alpha at .*: expected .*node/alpha, found"):
            await forward(client, f"{host}:{port}", ALPHA)
    assert handler.count == 0
    await client.close()


@pytest.mark.parametrize("rotated", [False, True], ids=["renewed", "rotated"])
async def test_no_request_is_lost_while_credentials_are_renewed(
    mesh: Mesh, client_class: type[Any], rotated: bool
) -> None:
    """Each end gets new certificates under load, by new authorities too, again and again."""
    node, gateway = mesh.give(Role.NODE, "alpha"), mesh.give(Role.GATEWAY, "gate")
    client = client_class(LinkSettings(RAW, tls=gateway))
    handler = Counting()
    renewed = asyncio.Event()

    async def send(address: str) -> int:
        count = 0
        while not renewed.is_set():
            await forward(client, address, ALPHA)
            count += 1
        return count

    async with serving(handler, tls=node) as (host, port):
        sending = [asyncio.create_task(send(f"{host}:{port}")) for _ in range(4)]
        for turn in range(8):
            if rotated and turn % 2 == 0:
                mesh.authority.rotate()
            before = handler.count
            mesh.renew((node, gateway)[turn % 2])
            async with asyncio.timeout(BOUND_S):
                while handler.count < before + 40:
                    await asyncio.sleep(0.005)
        renewed.set()
        assert sum(await asyncio.gather(*sending)) == handler.count
        await client.close()


async def test_a_server_with_new_credentials_takes_one_more_request_over_an_old_connection(
    mesh: Mesh,
) -> None:
    """Whom it trusted then, it may trust no more; others connect again."""
    node, gateway = mesh.give(Role.NODE, "alpha"), mesh.give(Role.GATEWAY, "gate")
    async with serving(EchoHandler(), tls=node) as place, encrypted(place, gateway) as caller:
        await caller.send(CHUNK)
        assert not (await caller.read()).closes
        mesh.renew(node)
        await caller.send(CHUNK)
        answer = await caller.read()
        assert (answer.status, answer.closes) == (200, True)
        assert await caller.at_end()
        assert await status_of(place, gateway) == 200


async def test_a_client_with_new_credentials_connects_anew(
    mesh: Mesh, client_class: type[Any]
) -> None:
    """To a node that has come to ask for others than those that it connected with."""
    node, gateway = mesh.give(Role.NODE, "alpha"), mesh.give(Role.GATEWAY, "gate")
    callers: list[Identity | None] = []

    class Noting(EchoHandler):
        def forward(self, chunk: Chunk, caller: Caller) -> Answer:
            callers.append(caller.identity)
            return super().forward(chunk, caller)

    client = client_class(LinkSettings(RAW, tls=gateway))
    async with serving(Noting(), tls=node) as (host, port):
        await forward(client, f"{host}:{port}", ALPHA)
        write_credentials(mesh.authority, Identity(Role.NODE, "beta"), mesh.folder / "gate")
        gateway.reload()
        await forward(client, f"{host}:{port}", ALPHA)
        await client.close()
    assert callers == [Identity(Role.GATEWAY, "gate"), Identity(Role.NODE, "beta")]


async def test_a_connection_ends_with_the_certificate_of_its_caller(tmp_path: Path) -> None:
    mesh = Mesh(tmp_path, life_s=5.0)
    gateway = mesh.give(Role.GATEWAY, "gate")
    mesh.authority.life_s = 3600.0
    node = mesh.give(Role.NODE, "alpha")
    async with serving(EchoHandler(), tls=node) as place:
        async with encrypted(place, gateway) as caller:
            await caller.send(CHUNK)
            assert not (await caller.read()).closes
            assert await caller.at_end()
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await status_of(place, gateway)
        mesh.renew(gateway)
        assert await status_of(place, gateway) == 200


def remove(at: Credentials, member: Credentials) -> None:
    """Have one end hear that a member was removed."""
    assert at.removals.learn({own_key(member): 1_000}, 0.0)


def own_key(member: Credentials) -> str:
    return spki_sha256(x509.load_pem_x509_certificate(member.pem().chain).public_key())


async def test_the_open_connection_of_a_removed_member_is_refused_and_those_of_others_go_on(
    mesh: Mesh,
) -> None:
    node, handler = mesh.give(Role.NODE, "alpha"), Counting()
    gone, honest = mesh.give(Role.NODE, "gone"), mesh.give(Role.GATEWAY, "gate")
    async with serving(handler, tls=node) as place:
        async with encrypted(place, gone) as removed, encrypted(place, honest) as other:
            for caller in (removed, other, removed):
                await caller.send(CHUNK)
                assert (await caller.read()).status == 200
            remove(node, gone)
            await removed.send(CHUNK)
            answer = await removed.read()
            assert (answer.status, answer.closes) == (403, True)
            assert problem(answer.body)["reason"] == "MEMBER_REMOVED"
            for _ in range(2):
                await other.send(CHUNK)
                answer = await other.read()
                assert (answer.status, answer.closes) == (200, False)
        for act in (CHUNK, bare("DELETE", SESSION), bare("POST", OWNER), bare("GET", "/metrics")):
            async with encrypted(place, gone) as removed:
                await removed.send(act)
                assert (await removed.read()).status == 403
        assert await status_of(place, honest) == 200
    assert handler.count == 6


async def test_what_a_removed_member_has_in_flight_ends(mesh: Mesh) -> None:
    node, handler = mesh.give(Role.NODE, "alpha"), GateHandler()
    gone = mesh.give(Role.GATEWAY, "gone")
    server = PlaneServer(handler, policies=CompressionPolicies(), tls=node)
    place = await server.start("127.0.0.1", 0)
    async with encrypted(place, gone) as removed:
        await removed.send(CHUNK)
        await handler.entered.wait()
        remove(node, gone)
        server.end_removed()
        await handler.cancelled.wait()
        assert await removed.at_end()
    await server.close(0.0)


@pytest.mark.parametrize("kept", [False, True], ids=["new", "kept"])
async def test_a_client_sends_nothing_to_a_removed_node(
    mesh: Mesh, client_class: type[Any], kept: bool
) -> None:
    handler, gateway = Counting(), mesh.give(Role.GATEWAY, "gate")
    gone, honest = mesh.give(Role.NODE, "alpha"), mesh.give(Role.NODE, "beta")
    client = client_class(LinkSettings(RAW, tls=gateway))
    async with serving(handler, tls=gone) as one, serving(EchoHandler(), tls=honest) as other:
        addresses = [f"{host}:{port}" for host, port in (one, other)]
        if kept:
            await forward(client, addresses[0], ALPHA)
        remove(gateway, gone)
        with pytest.raises(NextHopError, match="node/alpha was removed from the mesh"):
            await forward(client, addresses[0], ALPHA)
        await forward(client, addresses[1], BETA)
        await client.close()
    assert handler.count == kept


async def status_of(place: tuple[str, int], own: Credentials) -> int:
    """Send a chunk over a new connection."""
    async with encrypted(place, own) as caller:
        await caller.send(CHUNK)
        return (await caller.read()).status
