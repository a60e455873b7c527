"""The process as a whole: addresses, health, metrics, limits, a client that goes away."""

from __future__ import annotations

import asyncio
import io
import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from meshnet.control.app import ControlServer
from meshnet.control.limits import DEFAULT_LIMITS
from meshnet.control.settings import ControlSettings
from meshnet.errors import Code, ConfigError, MeshError

SERVICES = {"meshnet.v1.NodeService", "meshnet.v1.RouteService"}


@pytest.mark.parametrize("taken", ["http_port", "grpc_port"])
async def test_a_taken_port_is_named_before_anything_starts(taken):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        server = ControlServer(ControlSettings(**{"http_port": 0, "grpc_port": 0, taken: port}))
        with pytest.raises(ConfigError, match=rf"127\.0\.0\.1:{port}") as caught:
            await server.start()
        assert caught.value.field == taken
        await server.close()


async def test_a_second_control_plane_cannot_share_a_port(mesh):
    port = int(mesh.addresses.grpc.rpartition(":")[2])
    server = ControlServer(ControlSettings(http_port=0, grpc_port=port))
    with pytest.raises(ConfigError, match=str(port)):
        await server.start()
    await server.close()


async def test_an_address_that_is_not_ours_is_refused():
    server = ControlServer(
        ControlSettings(http_host="192.0.2.1", http_port=0, grpc_port=0, insecure=True)
    )
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1"):
        await server.start()
    await server.close()


async def test_healthz_tells_the_grpc_port(mesh):
    status, body = await mesh.json("GET", "/healthz")
    assert (status, body["status"]) == (200, "ok")
    assert body["grpc_port"] == int(mesh.addresses.grpc.rpartition(":")[2])


async def test_metrics_count_nodes_and_calls(mesh):
    await mesh.join("a", (0, 8))
    await mesh.json("GET", "/v1/nodes/none")
    async with mesh.http.get(f"http://{mesh.addresses.http}/metrics") as response:
        text = await response.text()
    assert 'meshnet_control_nodes{state="ready"} 1.0' in text
    not_found = (
        'meshnet_control_calls_total{code="NOT_FOUND",method="/meshnet.v1.NodeService/GetNode"}'
    )
    assert f"{not_found} 1.0" in text


async def test_health_and_reflection_answer_over_grpc(mesh):
    async with grpc.aio.insecure_channel(mesh.addresses.grpc) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in (*SERVICES, ""):
            answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection.ServerReflectionInfo(iter([request]), timeout=5)
        names = {s.name async for r in call for s in r.list_services_response.service}
    assert names >= SERVICES


async def test_a_body_that_is_too_large_is_refused(mesh):
    body = b'{"model":"' + b"x" * DEFAULT_LIMITS.max_body_bytes + b'"}'
    headers = {"Content-Type": "application/json"}
    status, answer = await mesh.json(
        "POST", "/v1/routes:select", data=io.BytesIO(body), headers=headers
    )
    assert status == 413
    assert str(DEFAULT_LIMITS.max_body_bytes) in answer["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/", 404), ("GET", "/v2/nodes", 404), ("PUT", "/v1/nodes/a", 405)],
)
async def test_what_is_not_served_is_answered_in_json(mesh, method, path, status):
    got, body = await mesh.json(method, path)
    assert (got, set(body)) == (status, {"code", "message", "details"})


async def test_options_of_everything_is_answered_in_json(mesh):
    host, port = mesh.addresses.http.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"OPTIONS * HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
    answer = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    assert answer.startswith(b"HTTP/1.1 404")
    assert b'"code": 5' in answer


async def test_deep_json_is_refused(mesh):
    deep = "[" * 100_000
    headers = {"Content-Type": "application/json"}
    status, body = await mesh.json("POST", "/v1/nodes?node_id=a", data=deep, headers=headers)
    assert (status, body["code"]) == (400, 3)


async def test_closing_ends_watches_with_a_reason(start_mesh):
    mesh = await start_mesh()
    watch = mesh.client.watch_nodes()
    await anext(watch)
    async with mesh.http.get(f"http://{mesh.addresses.http}/v1/nodes:watch") as response:
        await response.content.readline()
        closing = asyncio.create_task(mesh.server.close())
        rest = await asyncio.wait_for(response.content.read(), 5)
        assert b"STOPPING" in rest
    await asyncio.wait_for(closing, 5)
    await watch.aclose()


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_time_that_cannot_be_is_refused(seconds):
    with pytest.raises(ConfigError, match="lease_ttl_s"):
        ControlSettings(lease_ttl_s=seconds)


async def test_a_fault_of_ours_shows_no_inside(mesh, monkeypatch, caplog):
    async def broken():
        raise RuntimeError("secret")

    monkeypatch.setattr(mesh.server._store, "snapshot", broken)
    with pytest.raises(MeshError) as caught:
        await mesh.client.get_status()
    assert (caught.value.code, "secret" in caught.value.message) == (Code.INTERNAL, False)
    status, body = await mesh.json("GET", "/v1/status")
    assert (status, "secret" in str(body)) == (500, False)
    status, body = await mesh.json("GET", "/healthz")
    assert (status, "secret" in str(body)) == (500, False)
    assert "secret" in caplog.text
    monkeypatch.undo()
    assert (await mesh.client.get_status()).serving


@pytest.mark.slow
async def test_c7_a_quiet_client_that_pings_keeps_its_connection(mesh):
    options = (
        ("grpc.keepalive_time_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    async with grpc.aio.insecure_channel(mesh.addresses.grpc, options=options) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
        with pytest.raises(asyncio.TimeoutError):  # five pings, the default forgives two
            await asyncio.wait_for(
                channel.wait_for_state_change(grpc.ChannelConnectivity.READY), 55
            )
        await health.Check(health_pb2.HealthCheckRequest(), timeout=5)
