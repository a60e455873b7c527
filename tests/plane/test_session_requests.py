"""Requests on sessions over sockets: what reaches the handler, and what is refused."""

from __future__ import annotations

import pytest

from meshnet.errors import CacheFullError, Code, MeshError, NextHopError
from meshnet.operations import OwnerId, Reservation
from meshnet.plane.client import PlaneClient
from meshnet.topology import Hop, LayerRange, NodeId
from tests.plane.doubles import (
    EchoHandler,
    calling,
    expect_good,
    misbehaving,
    new_session,
    problem,
    serving,
)
from tests.plane.threaded import ThreadedClient
from tests.vectors.load import SessionVector, check_fault, load_sessions

ALPHA = NodeId("alpha")
HOP = Hop(NodeId("beta"), "10.0.0.2:7080", LayerRange(3, 4))


@pytest.fixture(params=[PlaneClient, ThreadedClient], ids=["asyncio", "threads"])
async def client(request):
    made = request.param()
    yield made
    await made.close()


async def test_a_reservation_reaches_the_handler(client) -> None:
    handler = EchoHandler()
    asked = Reservation(new_session(), 300, LayerRange(0, 3), (HOP,))
    async with serving(handler) as (host, port):
        for _ in range(2):
            await client.reserve(f"{host}:{port}", ALPHA, asked, timeout_s=5.0)
    assert handler.reserved == [asked, asked]


async def test_an_owner_is_named_in_a_reservation_and_attends_on_a_path_of_its_own() -> None:
    handler = EchoHandler()
    owner = OwnerId(new_session())
    asked = Reservation(new_session(), 300, owner=owner)
    client = PlaneClient()
    async with serving(handler) as place, calling(place) as caller:
        address = "{}:{}".format(*place)
        await client.reserve(address, ALPHA, asked, timeout_s=5.0)
        await client.attend(address, owner)
        await caller.send(f"GET /owners/{owner} HTTP/1.1\r\nHost: n\r\n\r\n".encode())
        answer = await caller.read()
        assert (answer.status, answer.headers["allow"]) == (405, "POST")
        await caller.send(b"POST /owners/me HTTP/1.1\r\nHost: n\r\n\r\n")
        answer = await caller.read()
        assert (answer.status, problem(answer.body)["field"]) == (400, "owner")
    await client.close()
    assert handler.reserved[0].owner == owner
    assert handler.owners == [owner]


async def test_a_refusal_is_the_nodes(client) -> None:
    class Full(EchoHandler):
        def reserve(self, asked, caller):
            raise CacheFullError("9 tokens are free", retry_after_s=3.0)

    async with serving(Full()) as (host, port):
        with pytest.raises(CacheFullError) as caught:
            await client.reserve(
                f"{host}:{port}", ALPHA, Reservation(new_session(), 9), timeout_s=5.0
            )
    assert caught.value.message == "9 tokens are free"
    assert caught.value.retry_after_s == 3.0


async def test_a_node_without_reservations_says_which_way(client) -> None:
    async def old(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 405 No\r\nAllow: DELETE\r\nContent-Length: 0\r\n\r\n")
        await writer.drain()
        await reader.read()

    async with misbehaving(old) as address:
        with pytest.raises(MeshError) as caught:
            await client.reserve(address, ALPHA, Reservation(new_session(), 9), timeout_s=5.0)
    assert caught.value.code is Code.METHOD_NOT_ALLOWED


async def test_a_node_that_is_away_is_named(client) -> None:
    with pytest.raises(NextHopError) as caught:
        await client.reserve("127.0.0.1:1", ALPHA, Reservation(new_session(), 9), timeout_s=5.0)
    assert caught.value.failed_node == ALPHA


@pytest.mark.parametrize("vector", load_sessions(), ids=str)
async def test_vectors(vector: SessionVector) -> None:
    handler, expect = EchoHandler(), vector.expect
    fields = [f"{name}: {value}" for name, value in (("Host", "n"), *vector.headers)]
    head = "\r\n".join([f"{vector.method} {vector.path} HTTP/1.1", *fields, "", ""])
    async with serving(handler) as place, calling(place) as caller:
        for _ in range(2):
            await caller.send(head.encode())
            answer = await caller.read()
            assert answer.status == expect["status"]
            if answer.status != 204:
                found = problem(answer.body)
                check_fault(expect, found.get("field"), found["detail"])
        await expect_good(caller)
    taken = [*handler.reserved, *handler.rebuilt, *handler.released]
    assert len(taken) == (2 if expect["status"] == 204 else 0)


async def test_what_a_session_allows_is_listed() -> None:
    async with serving(EchoHandler()) as place, calling(place) as caller:
        for action, allow in [("", "DELETE, PUT"), ("/rebuild", "POST")]:
            await caller.send(
                f"GET /sessions/{new_session()}{action} HTTP/1.1\r\nHost: n\r\n\r\n".encode()
            )
            answer = await caller.read()
            assert (answer.status, answer.headers["allow"]) == (405, allow)


async def test_a_body_that_nobody_asked_for_is_passed_over() -> None:
    handler, session = EchoHandler(), new_session()
    head = f"PUT /sessions/{session} HTTP/1.1\r\nHost: n\r\nX-Meshnet-Max-Tokens: 5\r\n"
    async with serving(handler) as place, calling(place) as caller:
        await caller.send(head.encode() + b"Content-Length: 4\r\n\r\nbody")
        assert (await caller.read()).status == 204
        await expect_good(caller)
    assert handler.reserved == [Reservation(session, 5)]
