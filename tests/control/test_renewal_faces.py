"""Certificates that end and are renewed under load: no call of an honest caller fails."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from pathlib import Path

import grpc

from meshnet.authority import Authority
from meshnet.credentials import Credentials
from meshnet.identity import Identity, Role
from meshnet.membership import MembershipFolder
from meshnet.tls import files_in
from tests.control.conftest import make_node
from tests.control.secured import secured

LIFE_S = 6.0


class Renewed:
    """A member whose certificate is renewed over its files, as a member does."""

    def __init__(self, authority: Authority, identity: Identity, folder: Path) -> None:
        self._authority = authority
        self._identity = identity
        self._folder = MembershipFolder(folder)
        self.renew()
        self.credentials = Credentials(files_in(folder))

    def renew(self) -> None:
        key = self._folder.key().public_key()
        issued = self._authority.issue(self._identity, key)
        self._folder.keep_certificate(issued.chain_pem, issued.bundle_pem)


async def test_calls_go_on_while_every_certificate_ends_and_the_authority_is_rotated(
    tmp_path: Path,
) -> None:
    async with secured(tmp_path, certificate_life_s=LIFE_S) as mesh:
        authority = Authority(tmp_path, life_s=LIFE_S)
        member = Renewed(authority, Identity(Role.NODE, "node-1"), tmp_path / "member")
        gateway = Renewed(authority, Identity(Role.GATEWAY, "front"), tmp_path / "front")
        calls = {"grpc": 0, "json": 0}
        until = time.monotonic() + 1.5 * LIFE_S

        async def by_grpc() -> None:
            async with mesh.client(member.credentials) as client:
                answer = await client.register("node-1", make_node((0, 8)), ttl_s=300)
                while time.monotonic() < until:
                    lease = answer.lease.lease_id
                    await client.heartbeat("node-1", lease_id=lease, incarnation=1, ready=True)
                    calls["grpc"] += 1
                    await asyncio.sleep(0.02)

        async def by_json() -> None:
            while time.monotonic() < until:
                status, answer = await mesh.json("GET", "/v1/nodes", gateway.credentials)
                assert status == 200, answer
                calls["json"] += 1
                await asyncio.sleep(0.02)

        async def renew() -> None:
            for turn in range(5):
                await asyncio.sleep(LIFE_S * 0.3)
                if turn == 1:
                    authority.rotate()
                for one in (member, gateway):
                    one.renew()
                    one.credentials.reload()

        tasks = [asyncio.create_task(task) for task in (by_grpc(), by_json(), renew())]
        await asyncio.gather(*tasks)
        assert member.credentials.generation == 5
        assert min(calls["grpc"], calls["json"]) > 5


async def test_what_runs_goes_on_over_the_old_channel_and_what_begins_takes_the_new(
    tmp_path: Path,
) -> None:
    async with secured(tmp_path, bookmark_interval_s=0.05) as mesh:
        gateway = Renewed(mesh.authority, Identity(Role.GATEWAY, "front"), tmp_path / "front")
        async with mesh.client(gateway.credentials) as client:
            async with aclosing(client.watch_nodes()) as watch:
                await anext(watch)
                gateway.renew()
                gateway.credentials.reload()
                await client.get_status()
                for _ in range(5):
                    await asyncio.wait_for(anext(watch), 30)
            await client.get_status()


async def test_a_connection_outlives_its_certificate_but_makes_no_calls(tmp_path: Path) -> None:
    async with secured(tmp_path) as mesh:
        brief = Authority(tmp_path, life_s=3.0)
        reader = Renewed(brief, Identity(Role.ADMIN, "ann"), tmp_path / "ann").credentials
        pem = reader.pem()
        tls = grpc.ssl_channel_credentials(pem.ca, pem.key, pem.chain)
        options = (("grpc.ssl_target_name_override", "control.mesh"),)
        async with grpc.aio.secure_channel(mesh.addresses.grpc, tls, options) as channel:
            method = channel.unary_unary("/meshnet.v1.OperatorService/ListOperators")
            assert await method(b"", timeout=30) == b""
            code = grpc.StatusCode.OK
            async with asyncio.timeout(60):
                while code is grpc.StatusCode.OK:
                    await asyncio.sleep(0.1)
                    code = await method(b"", timeout=30).code()
            assert code is grpc.StatusCode.UNAUTHENTICATED
