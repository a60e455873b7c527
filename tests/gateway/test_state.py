"""A gateway with the control plane inside, which knows its callers: the gateway is one of them."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from meshnet.compression import CompressionPolicies
from meshnet.control.client import ControlClient
from meshnet.control.settings import ControlSettings
from meshnet.credentials import Credentials
from meshnet.errors import MeshError
from meshnet.tls import files_in
from meshnet_gateway.app import Gateway, GatewaySettings
from meshnet_gateway.model_text import ModelText
from tests.control.numbers import reference


async def test_the_gateway_asks_its_own_control_plane_as_a_gateway(
    text: ModelText, tmp_path: Path
) -> None:
    control = ControlSettings(
        http_port=0,
        grpc_port=0,
        close_grace_s=0.1,
        state=tmp_path,
        references=(reference(name="tiny"),),
    )
    gateway = Gateway(
        GatewaySettings(port=0, control=control), {"tiny": text}, CompressionPolicies()
    )
    try:
        address = await gateway.start()
        assert gateway.control_http.startswith("https://")
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://{address}/healthz") as response,
        ):
            assert "no node serves" in (await response.json())["uncovered"]["tiny"]
        admin = Credentials(files_in(tmp_path / "admin"))
        async with ControlClient(gateway.control_grpc, credentials=admin) as client:
            assert (await client.get_status()).serving
            known = [each.model for each in await client.list_references()]
            assert known == ["models/tiny"]  # of the gateway's own model directory
        with pytest.raises(MeshError, match="demands certificates"):
            ControlClient(gateway.control_grpc)
    finally:
        await gateway.close()
