from __future__ import annotations

import asyncio
import socket

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import code_pb2, status_pb2

from meshnet.control.app import ControlServer
from meshnet.control.client import ClientSettings, ControlClient
from meshnet.control.hops import to_hops
from meshnet.control.settings import ControlSettings
from meshnet.control.status import from_status, to_status
from meshnet.errors import Code, ConfigError, LeaseExpiredError, MeshError, RouteError
from meshnet.v1 import node_service_pb2 as node_pb
from meshnet.v1 import route_service_pb2 as route_pb
from meshnet.v1 import types_pb2


@pytest.mark.parametrize("url", ["grpc://{grpc}", "{grpc}", "http://{http}", "http://{http}/"])
async def test_every_form_of_address_reaches_the_control_plane(mesh, url):
    where = url.format(grpc=mesh.addresses.grpc, http=mesh.addresses.http)
    async with ControlClient(where) as client:
        assert (await client.get_status()).serving


@pytest.mark.parametrize(
    "url",
    ["", "host", "host:", "host:x", "host:99999", "ftp://h:1", "grpc://h:1/x", "http://u@h:1"],
)
def test_a_bad_address_is_refused_with_what_was_expected(url):
    with pytest.raises(ConfigError, match="expected grpc://HOST:PORT") as caught:
        ControlClient(url)
    assert caught.value.field == "control"


@pytest.mark.parametrize("scheme", ["grpc", "http"])
async def test_a_control_plane_that_is_away_is_unavailable_after_retries(scheme):
    settings = ClientSettings(timeout_s=0.5)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))  # held, but nobody listens
        url = f"{scheme}://127.0.0.1:{holder.getsockname()[1]}"
        async with ControlClient(url, settings) as client:
            with pytest.raises(MeshError) as caught:
                await asyncio.wait_for(client.get_status(), 5)
    assert caught.value.code is Code.UNAVAILABLE


async def test_a_call_waits_out_a_restart_even_to_another_grpc_port():
    one = ControlServer(ControlSettings(http_port=0, grpc_port=0))
    first = await one.start()
    http_port = int(first.http.rpartition(":")[2])
    async with ControlClient(f"http://{first.http}") as client:
        await client.get_status()
        await one.close()
        call = asyncio.create_task(client.get_status())
        other = ControlServer(ControlSettings(http_port=http_port, grpc_port=0))
        await other.start()
        assert (await asyncio.wait_for(call, 10)).serving
        await other.close()


async def test_a_server_that_is_no_control_plane_is_named():
    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, ControlClient(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(ConfigError, match="no grpc_port"):
            await client.get_status()


async def test_a_call_has_a_deadline_of_its_own():
    never = asyncio.Event()

    class Stuck(grpc.GenericRpcHandler):
        def service(self, _details):
            async def wait(_request, _context):
                await never.wait()

            return grpc.unary_unary_rpc_method_handler(wait)

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((Stuck(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with ControlClient(f"127.0.0.1:{port}", ClientSettings(timeout_s=0.2)) as client:
        with pytest.raises(MeshError) as caught:
            await asyncio.wait_for(client.get_status(), 5)
    await server.stop(0)
    assert caught.value.code is Code.DEADLINE_EXCEEDED


@pytest.mark.parametrize(
    "error",
    [
        MeshError(Code.ABORTED, "m", field="f", reason="STALE_INCARNATION"),
        MeshError(Code.RESOURCE_EXHAUSTED, "m", retry_after_s=1.5),
        RouteError(
            Code.UNAVAILABLE, "m", field="model", reason="LAYERS_UNCOVERED", retry_after_s=1
        ),
        RouteError(Code.NOT_FOUND, "m", reason="MODEL_UNKNOWN"),
        LeaseExpiredError("m"),
    ],
)
def test_an_error_survives_the_way_there_and_back(error):
    back = from_status(to_status(error))
    assert type(back) is type(error)
    assert vars(back) == vars(error)


def test_an_error_with_any_text_can_be_written():
    status = to_status(MeshError(Code.ABORTED, "m\ud800" + "x" * 100_000, field="\udcff"))
    back = from_status(status)
    assert back.message.startswith("m\\ud800xxx")
    assert back.field == "\\udcff"
    assert status.ByteSize() < 8000


def test_details_that_nobody_knows_are_passed_over():
    odd = any_pb2.Any(type_url="type.googleapis.com/no.such.Type", value=b"\xff")
    broken = any_pb2.Any(type_url="type.googleapis.com/google.rpc.ErrorInfo", value=b"\xff")
    status = status_pb2.Status(code=code_pb2.ABORTED, message="m", details=[odd, broken])
    back = from_status(status)
    assert (back.code, back.message, back.reason) == (Code.ABORTED, "m", None)


def test_a_hop_without_a_usable_endpoint_is_an_error():
    hop = route_pb.Hop(node="nodes/a", endpoint=types_pb2.Endpoint(uri="unix:/x"))
    with pytest.raises(MeshError) as caught:
        to_hops(route_pb.Route(hops=[hop]))
    assert caught.value.field == "hops[0].endpoint.uri"


def test_an_ipv6_endpoint_keeps_its_brackets():
    hop = route_pb.Hop(
        node="nodes/a",
        endpoint=types_pb2.Endpoint(uri="http://[::1]:7080/forward"),
        layers=types_pb2.LayerRange(start=0, end=2),
    )
    assert to_hops(route_pb.Route(hops=[hop]))[0].address == "[::1]:7080"


async def test_lists_are_read_to_their_last_page(mesh):
    for index in range(3):
        await mesh.join(f"n{index}", (0, 8), port=7081 + index)
    nodes = await mesh.client.list_nodes(states=[node_pb.NODE_STATE_READY])
    assert [node.name for node in nodes] == ["nodes/n0", "nodes/n1", "nodes/n2"]
