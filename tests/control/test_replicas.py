"""Replicas of one control plane that knows its members: what is so at one is so at the other."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from meshnet.authority import AUTHORITY_FILE, Authority
from meshnet.control import app, removed_keys, replicas, state
from meshnet.control.app import ControlServer
from meshnet.control.client import ControlClient
from meshnet.control.documents import MemoryDocuments
from meshnet.control.joining import join, renew
from meshnet.control.replicas import Reached, Replicas
from meshnet.control.settings import ControlSettings
from meshnet.control.store_url import make_documents
from meshnet.credentials import Credentials
from meshnet.errors import Code, MeshError
from meshnet.grants import key_id_of, verify
from meshnet.join import JoinText, parse_join_text
from meshnet.membership import MembershipFolder
from meshnet.tls import files_in
from meshnet.topology import SessionId
from meshnet.v1 import enrollment_service_pb2 as pb
from tests.control.conftest import MODEL, FakeClock, make_node
from tests.control.secured import PATIENCE
from tests.control.test_grants import keys_of, now_of

SESSION = SessionId("8d7f2f0a-5c1e-4b7a-9a53-0d7c6f1e2b34")


class Replica:
    """A running replica, and its operator."""

    def __init__(self, folder: Path, server: ControlServer) -> None:
        self.folder = folder
        self.authority = Authority(folder)
        self.admin = Credentials(files_in(folder / "admin"))
        self.server = server
        self.http = self.grpc = ""

        self._is_running = True

    async def start(self) -> None:
        self.http, self.grpc = await self.server.start()

    async def stop(self) -> None:
        if self._is_running:
            self._is_running = False
            await self.server.close()

    @asynccontextmanager
    async def client(self, credentials: Credentials) -> AsyncIterator[ControlClient]:
        async with ControlClient(f"grpcs://{self.grpc}", PATIENCE, credentials) as client:
            yield client

    async def token(self, role: pb.Role = pb.ROLE_NODE, uses: int = 1) -> JoinText:
        async with self.client(self.admin) as client:
            made = await client.create_join_token(pb.JoinToken(role=role, max_uses=uses))
        public, _, secret = made.token.partition(".")
        return JoinText(public, secret, made.ca_spki_sha256, tuple(made.http_addresses))


@pytest.fixture(params=["shared", "copied"])
async def pair(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[Replica, Replica]]:
    """Two replicas, of one state directory or of a copy, with one store of documents."""
    monkeypatch.setattr(removed_keys, "_READ_EVERY_S", 0.05)
    monkeypatch.setattr(state, "_LOOK_S", 0.05)
    first, second = tmp_path / "first", tmp_path / "first"
    if request.param == "copied":
        second = tmp_path / "second"
        url = f"sqlite:{tmp_path}/documents"
        monkeypatch.setattr(app, "_documents", lambda *_: make_documents(url))
    async with AsyncExitStack() as stack:
        made = []
        for folder in (first, second):
            if not folder.exists() and made:
                shutil.copytree(first, folder)
            settings = ControlSettings(
                http_port=0, grpc_port=0, close_grace_s=0.1, state=folder, require_probe=False
            )
            replica = Replica(folder, ControlServer(settings))
            stack.push_async_callback(replica.stop)
            await replica.start()
            made.append(replica)
        yield made[0], made[1]


async def joined(token: JoinText, folder: Path, name: str) -> Credentials:
    await join(token, name, MembershipFolder(folder))
    return Credentials(files_in(folder))


async def test_a_token_of_one_admits_once_at_all_and_its_certificate_is_good_at_all(
    pair: tuple[Replica, Replica], tmp_path: Path
) -> None:
    one, other = pair
    token = await one.token()
    assert parse_join_text(token.text()).addresses == (one.http, other.http)
    assert (await other.token()).addresses == (other.http, one.http)
    at_other = JoinText(token.public, token.secret, token.ca_spki_sha256, (other.http,))
    folder = MembershipFolder(tmp_path / "gpu-1")
    membership = await join(at_other, "gpu-1", folder)
    assert membership.grpc_addresses == (other.grpc, one.grpc)
    for where in (token, at_other):
        with pytest.raises(MeshError, match="used up"):
            await join(where, "gpu-2", MembershipFolder(tmp_path / "gpu-2"))
    for replica in pair:
        async with replica.client(Credentials(folder.files)) as client:
            assert await client.list_nodes() == []
        async with replica.client(replica.admin) as client:
            assert [member.name for member in await client.list_members()] == ["members/node.gpu-1"]


async def test_of_many_at_all_replicas_no_more_join_than_there_are_uses(
    pair: tuple[Replica, Replica], tmp_path: Path
) -> None:
    token = await pair[0].token(uses=3)
    tries = [
        join(
            JoinText(token.public, token.secret, token.ca_spki_sha256, (replica.http,)),
            f"gpu-{number}-{replica.http.rpartition(':')[2]}",
            MembershipFolder(tmp_path / f"{number}-{replica.http}"),
        )
        for number in range(4)
        for replica in pair
    ]
    done = await asyncio.gather(*tries, return_exceptions=True)
    assert sum(not isinstance(one, BaseException) for one in done) == 3
    for one in done:
        assert not isinstance(one, BaseException) or "used up" in str(one)


async def test_a_replica_that_is_gone_is_passed_over_by_who_joins_and_who_renews(
    pair: tuple[Replica, Replica], tmp_path: Path
) -> None:
    one, other = pair
    token = await one.token(uses=2)
    before = MembershipFolder(tmp_path / "gpu-1")
    await join(token, "gpu-1", before)
    first = Credentials(before.files).pem().chain
    await one.stop()
    assert (await other.token()).addresses == (other.http,)
    await renew(before)
    assert Credentials(before.files).pem().chain != first
    membership = await join(token, "gpu-2", MembershipFolder(tmp_path / "gpu-2"))
    assert membership.http_addresses == (one.http, other.http)
    assert membership.grpc_addresses == (other.grpc,)


async def test_a_grant_of_one_is_checked_by_the_keys_of_the_other(
    pair: tuple[Replica, Replica], tmp_path: Path
) -> None:
    one, other = pair
    node = await joined(await one.token(), tmp_path / "a", "a")
    gateway = await joined(await other.token(pb.ROLE_GATEWAY), tmp_path / "front", "front")
    described = make_node()
    described.endpoints[0].uri = "https://127.0.0.1:7080/forward"
    async with one.client(node) as client:
        lease = (await client.register("a", described)).lease
        await client.heartbeat("a", lease_id=lease.lease_id, incarnation=1, ready=True)
    async with one.client(gateway) as client:
        route = await client.select_route(MODEL, session=SESSION)
    async with other.client(node) as client:
        policy = await client.get_grant_policy(key_id_of(route.grant))
    assert verify(route.grant, keys_of(policy), now_of(policy)).session == SESSION


async def test_a_member_that_one_removes_is_refused_by_all(
    pair: tuple[Replica, Replica], tmp_path: Path
) -> None:
    one, other = pair
    folder = MembershipFolder(tmp_path / "a")
    member = await joined(await one.token(), folder.path, "a")
    async with one.client(one.admin) as client:
        await client.delete_member("node.a")
    with pytest.raises(MeshError, match="was removed"):
        async with one.client(member) as client:
            await client.list_nodes()

    async def ask_until_refused() -> None:
        async with asyncio.timeout(60), other.client(member) as client:
            while True:
                await client.list_nodes()
                await asyncio.sleep(0.05)

    with pytest.raises(MeshError) as caught:
        await ask_until_refused()
    assert caught.value.reason == "MEMBER_REMOVED"
    with pytest.raises(MeshError, match="removed"):
        await renew(folder)


async def test_a_token_made_just_after_a_rotation_admits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "_LOOK_S", 600.0)
    settings = ControlSettings(
        http_port=0, grpc_port=0, close_grace_s=0.1, state=tmp_path / "state", require_probe=False
    )
    replica = Replica(tmp_path / "state", ControlServer(settings))
    await replica.start()
    try:
        replica.authority.rotate()
        token = await replica.token()
        assert token.ca_spki_sha256 == replica.authority.spki_sha256
        member = await joined(token, tmp_path / "new", "new")
        async with replica.client(member) as client:
            await client.list_nodes()
    finally:
        await replica.stop()


async def test_a_rotation_reaches_a_replica_with_its_file_and_nobody_is_refused_meanwhile(
    pair: tuple[Replica, Replica], tmp_path: Path
) -> None:
    one, other = pair
    before = await joined(await one.token(), tmp_path / "old", "old")
    Authority(one.folder).rotate()
    assert one.authority.bundle_pem.count("BEGIN") == 2
    after = await joined(await one.token(), tmp_path / "new", "new")

    async def all_are_served() -> None:
        for replica in pair:
            for member in (before, after):
                async with replica.client(member) as client:
                    await client.list_nodes()

    await all_are_served()
    if other.folder != one.folder:
        shutil.copy2(one.folder / AUTHORITY_FILE, other.folder / AUTHORITY_FILE)
    async with asyncio.timeout(60):
        while other.server.state.credentials.pem().ca.decode() != one.authority.bundle_pem:
            await asyncio.sleep(0.01)
    await all_are_served()
    assert (await other.token()).ca_spki_sha256 == one.authority.spki_sha256


async def test_a_replica_that_was_killed_is_named_for_a_minute() -> None:
    documents, clock = MemoryDocuments(), FakeClock()
    one, other = Replicas(documents, clock), Replicas(documents, clock)
    assert await other.reached() == []
    await one.start(Reached("10.0.0.1:7070", "10.0.0.1:7071"))
    await other.start(Reached("[::1]:7070", "[::1]:7071"))
    assert [found.http for found in await other.reached()] == ["[::1]:7070", "10.0.0.1:7070"]
    await documents.put(replicas.KIND, "h:1", b"what is this")
    clock.advance(61)
    assert await other.reached() == [Reached("[::1]:7070", "[::1]:7071")]
    await one.close()
    await other.close()
    assert [found.key for found in await documents.list(replicas.KIND)] == ["h:1"]


async def test_a_store_that_is_away_is_said_and_does_not_keep_a_replica_from_ending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents = MemoryDocuments()
    one = Replicas(documents)
    await one.start(Reached("h:1", "h:2"))

    async def away(*_: object) -> None:
        raise MeshError(Code.UNAVAILABLE, "the store is away")

    for name in ("put", "list", "delete"):
        monkeypatch.setattr(documents, name, away)
    with pytest.raises(MeshError, match="away"):
        await one.reached()
    with pytest.raises(MeshError, match="away"):
        await Replicas(documents).start(Reached("h:3", "h:4"))
    await one.close()
