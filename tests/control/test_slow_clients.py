"""Clients of the JSON face that send or read slowly end, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time

import grpc
import pytest

from meshnet.control.limits import ControlLimits
from meshnet.v1 import route_service_pb2 as pb
from meshnet.v1.route_service_pb2_grpc import RouteServiceStub
from tests.dripping import hold

BOUND_S = 20.0
LIMITS = ControlLimits(
    head_timeout_s=1.0, body_timeout_s=1.0, idle_timeout_s=1.0, write_timeout_s=1.0
)
HEAD = b"POST /v1/routes:select HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
NUM_EACH = 50


def place_of(mesh) -> tuple[str, int]:
    host, _, port = mesh.addresses.http.rpartition(":")
    return host, int(port)


async def test_slow_senders_end_and_others_are_served(start_mesh) -> None:
    mesh = await start_mesh(limits=LIMITS)
    place = place_of(mesh)
    slow = [
        *(asyncio.create_task(hold(place, b"", b"")) for _ in range(NUM_EACH)),
        *(
            asyncio.create_task(hold(place, b"GET /v1/status HTTP/1.1\r\nX: ", b"y"))
            for _ in range(NUM_EACH)
        ),
        *(
            asyncio.create_task(hold(place, HEAD + b"Content-Length: 9999\r\n\r\n{", b" "))
            for _ in range(NUM_EACH)
        ),
    ]
    slowest_s = 0.0
    for _ in range(20):
        asked = time.monotonic()
        assert (await mesh.json("GET", "/v1/status"))[0] == 200
        slowest_s = max(slowest_s, time.monotonic() - asked)
    print(f"20 served, the slowest in {slowest_s:.3f} s")
    answers = await asyncio.wait_for(asyncio.gather(*slow), BOUND_S)
    assert not any(answers[: 2 * NUM_EACH])
    # On a machine that is busy a head may be late as well, and has no answer then.
    late = [answer for answer in answers[2 * NUM_EACH :] if answer]
    assert late
    for answer in late:
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"did not arrive within 1 s" in answer
    assert (await mesh.json("GET", "/v1/status"))[0] == 200


async def test_a_client_that_reads_nothing_is_dropped(start_mesh, caplog) -> None:
    caplog.set_level(logging.INFO, "meshnet.connections")
    mesh = await start_mesh(limits=LIMITS)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, place_of(mesh))
        asked = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 500
        await loop.sock_sendall(sock, asked)
        async with asyncio.timeout(BOUND_S):
            while not any("read nothing for 1 s" in text for text in caplog.messages):
                await asyncio.sleep(0.02)
            while mesh.server._face._runner.server.num_open:
                await asyncio.sleep(0.02)
    assert (await mesh.json("GET", "/v1/status"))[0] == 200


async def test_one_connection_too_many_is_closed(start_mesh) -> None:
    mesh = await start_mesh(limits=ControlLimits(max_connections=2))
    place = place_of(mesh)
    held = [await asyncio.open_connection(*place) for _ in range(2)]
    reader, writer = await asyncio.open_connection(*place)
    writer.write(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n")
    with contextlib.suppress(ConnectionError):
        assert await asyncio.wait_for(reader.read(), BOUND_S) == b""
    for _, other in (*held, (reader, writer)):
        other.close()
    async with asyncio.timeout(BOUND_S):
        while mesh.server._face._runner.server.num_open:
            await asyncio.sleep(0.02)
    assert (await mesh.json("GET", "/v1/status"))[0] == 200


@pytest.mark.parametrize(
    ("request_of", "metadata", "code"),
    [
        (pb.SelectRouteRequest(model="m" * 5_000_000), (), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (pb.SelectRouteRequest(model="models/m"), (("x-a", "b" * 70_000),), None),
    ],
)
async def test_the_grpc_face_bounds_messages_and_metadata(mesh, request_of, metadata, code) -> None:
    async with grpc.aio.insecure_channel(mesh.addresses.grpc) as channel:
        routes = RouteServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await routes.SelectRoute(request_of, metadata=metadata, timeout=BOUND_S)
        assert caught.value.code() in (code, grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert (await routes.GetStatus(pb.GetStatusRequest(), timeout=BOUND_S)).serving is not None


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b'{"model": ' + b"[" * 100 + b"]" * 100 + b"}", "nested too deeply; expected at most 64"),
        (b'{"model": [' + b"[]," * 300_000 + b"1]}", "expected at most 200000"),
    ],
)
async def test_json_is_bounded_before_it_is_parsed(mesh, body: bytes, said: str) -> None:
    headers = {"Content-Type": "application/json"}
    status, error = await mesh.json("POST", "/v1/routes:select", data=body, headers=headers)
    assert status == 400
    assert said in error["message"]
