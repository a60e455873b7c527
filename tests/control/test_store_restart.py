"""A control plane that is killed and comes back; clients that know two of them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from meshnet.control.app import ControlServer
from meshnet.control.client import ClientSettings, ControlClient
from meshnet.control.settings import ControlSettings
from meshnet.errors import Code, ConfigError, MeshError
from meshnet.v1 import node_service_pb2 as pb
from tests.control.conftest import make_node
from tests.control.replica import Replica


async def test_a_killed_control_plane_comes_back_with_its_nodes(tmp_path):
    replica = Replica(f"sqlite:{tmp_path / 'nodes.db'}", 10.0)
    try:
        await replica.start()
        async with ControlClient(replica.url) as client:
            registered = await client.register("a", make_node())
            lease_id = registered.lease.lease_id
            await client.heartbeat("a", lease_id=lease_id, incarnation=1, ready=True)
            wanted = pb.Node(name="nodes/a", cordoned=True, weight=50, labels={"rack": "7"})
            before = await client.update(wanted, ["cordoned", "weight", "labels"])
            await replica.kill()
            await replica.start()
            after = await client.get_node("a")
            assert (after.cordoned, after.weight, dict(after.labels)) == (True, 50, {"rack": "7"})
            assert (after.etag, after.state) == (before.etag, pb.NODE_STATE_READY)
            await client.heartbeat("a", lease_id=lease_id, incarnation=1, ready=True)
    finally:
        await replica.kill()


@asynccontextmanager
async def served() -> AsyncIterator[str]:
    server = ControlServer(ControlSettings(http_port=0, grpc_port=0, close_grace_s=0.1))
    addresses = await server.start()
    try:
        yield addresses.grpc
    finally:
        await server.close()


async def test_the_next_replica_is_asked_when_one_does_not_answer():
    async with served() as other:
        async with served() as one:
            client = ControlClient(f"grpc://{one}, grpc://{other}")
            first = (await client.get_status()).replica_id
            assert (await client.get_status()).replica_id == first  # as long as it answers
        second = (await client.get_status()).replica_id
        assert second != first
        await client.register("a", make_node())
        assert (await client.get_status()).replica_id == second
        await client.close()


async def test_a_watch_begun_after_a_replica_went_away_is_the_next_ones():
    async with served() as other:
        async with served() as one, asyncio.timeout(20):
            client = ControlClient(f"{one},{other}")
            watch = client.watch_nodes()
            await anext(watch)
            ending = asyncio.ensure_future(anext(watch))
            await asyncio.sleep(0)
        with pytest.raises(MeshError) as caught:
            await ending
        assert caught.value.code is Code.UNAVAILABLE
        async with asyncio.timeout(20):
            bookmark = await anext(client.watch_nodes())
        assert bookmark.type == pb.WatchNodesResponse.EVENT_TYPE_BOOKMARK
        await client.close()


class Silent(grpc.GenericRpcHandler):
    """Answers nothing, as a process that was stopped."""

    def service(self, _details):
        async def wait(_request, _context):
            await asyncio.Event().wait()

        return grpc.unary_unary_rpc_method_handler(wait)


async def test_a_replica_that_is_silent_is_left_in_time():
    silent = grpc.aio.server()
    silent.add_generic_rpc_handlers((Silent(),))
    port = silent.add_insecure_port("127.0.0.1:0")
    await silent.start()
    async with served() as other:
        settings = ClientSettings(failover_timeout_s=0.3)
        async with ControlClient(f"127.0.0.1:{port},{other}", settings) as client:
            begun_s = time.monotonic()
            assert (await client.get_status()).serving
            assert time.monotonic() - begun_s < settings.timeout_s
    await silent.stop(0)


async def test_a_refusal_is_no_reason_to_ask_another_replica():
    async with served() as one, served() as other, ControlClient(f"{one},{other}") as client:
        first = (await client.get_status()).replica_id
        with pytest.raises(MeshError) as caught:
            await client.get_node("nobody")
        assert caught.value.reason == "NODE_UNKNOWN"
        assert (await client.get_status()).replica_id == first


async def test_when_no_replica_answers_the_call_ends_in_time():
    async with ControlClient("127.0.0.1:1,127.0.0.1:2", ClientSettings(timeout_s=0.5)) as client:
        with pytest.raises(MeshError) as caught:
            await asyncio.wait_for(client.get_status(), 10)
    assert caught.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize("urls", ["h:1,", ",h:1", "h:1,ftp://h:2", "h:1 h:2"])
def test_of_several_addresses_the_bad_one_is_named(urls):
    with pytest.raises(ConfigError, match="expected grpc://HOST:PORT"):
        ControlClient(urls)
