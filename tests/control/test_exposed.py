"""No listener where other machines reach it, unless callers are known or somebody insists."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from meshnet.compression import CompressionPolicies
from meshnet.control.app import ControlServer
from meshnet.control.settings import ControlSettings
from meshnet.errors import ConfigError
from meshnet.listen import refuse_exposed
from meshnet.topology import LayerRange, NodeId
from meshnet_gateway.app import Gateway, GatewaySettings
from meshnet_node.app import Node
from meshnet_node.settings import NodeSettings
from meshnet_node.stub import StubBackend


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "127.8.9.10", "::1", "localhost", "::ffff:127.0.0.1", "nowhere.invalid"]
)
async def test_loopback_passes(host: str) -> None:
    await refuse_exposed(host, 7070, "--listen", "do this")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "2001:db8::1", "::ffff:192.0.2.1"])
async def test_what_others_reach_does_not(host: str) -> None:
    with pytest.raises(ConfigError, match="do this, or allow it with --insecure") as caught:
        await refuse_exposed(host, 7070, "--listen", "do this")
    assert caught.value.field == "--listen"
    assert "\n" not in caught.value.message


async def test_a_name_counts_as_all_its_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*_: object, **__: object) -> list[object]:
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 7070))
            for address in ("127.0.0.1", "192.0.2.1")
        ]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with pytest.raises(ConfigError, match=r"mesh\.example:7070"):
        await refuse_exposed("mesh.example", 7070, "--listen", "do this")


@pytest.mark.parametrize("face", ["http_host", "grpc_host"])
async def test_an_open_control_plane(face: str, tmp_path: Path) -> None:
    settings = {"http_port": 0, "grpc_port": 0, "close_grace_s": 0.1, face: "0.0.0.0"}
    server = ControlServer(ControlSettings(**settings))
    with pytest.raises(ConfigError, match="--state DIR"):
        await server.start()
    await server.close()
    for allowed in ({"insecure": True}, {"state": tmp_path, "advertise": "localhost"}):
        server = ControlServer(ControlSettings(**settings, **allowed))
        await server.start()
        await server.close()


async def test_a_gateway_without_keys() -> None:
    control = ControlSettings(http_port=0, grpc_port=0, close_grace_s=0.1)
    for insecure in (False, True):
        settings = GatewaySettings(host="0.0.0.0", port=0, control=control, insecure=insecure)
        gateway = Gateway(settings, {}, CompressionPolicies())
        try:
            if insecure:
                await gateway.start()
            else:
                with pytest.raises(ConfigError, match="--api-keys STORE"):
                    await gateway.start()
        finally:
            await gateway.close()


async def test_a_node_that_knows_no_caller() -> None:
    for insecure in (False, True):
        settings = NodeSettings(NodeId("a"), host="0.0.0.0", port=0, insecure=insecure)
        node = Node(
            settings, lambda: StubBackend(LayerRange(0, 1), hidden_size=8), CompressionPolicies()
        )
        try:
            if insecure:
                await node.listen()
            else:
                with pytest.raises(ConfigError, match="--join TOKEN"):
                    await node.listen()
        finally:
            await node.close()
