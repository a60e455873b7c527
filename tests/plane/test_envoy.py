"""Real Envoy before the server, as operators put one there: HTTP/1.1 in, HTTP/1.1 on."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from meshnet.compression import CompressionPolicies, CompressionPolicy
from meshnet.errors import Code, MeshError, PositionError
from meshnet.plane.client import PlaneClient
from meshnet.plane.links import LinkSettings
from meshnet.topology import NodeId
from tests.plane.doubles import (
    BOUND_S,
    P16,
    EchoHandler,
    chunk_header,
    new_session,
    serving,
    tensor_of,
)
from tests.plane.test_curl import CURL_FIELDS, curl
from tests.plane.threaded import ThreadedClient

ALPHA = NodeId("alpha")
ENVOY = Path(sys.executable).with_name("envoy")
START_S = 30.0
RAW = CompressionPolicies(
    {("lan", phase): CompressionPolicy(0, enabled=False) for phase in ("prefill", "decode")}
)


def config(port: int, target: tuple[str, int]) -> dict[str, Any]:
    """Write the least configuration that passes everything on."""

    def at(host: str, port: int) -> dict[str, Any]:
        return {"socket_address": {"address": host, "port_value": port}}

    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network."
        "http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "plane",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "plane",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "node"}}],
                }
            ]
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
                },
            }
        ],
    }
    return {
        "static_resources": {
            "listeners": [
                {
                    "address": at("127.0.0.1", port),
                    "filter_chains": [
                        {
                            "filters": [
                                {
                                    "name": "envoy.filters.network.http_connection_manager",
                                    "typed_config": manager,
                                }
                            ]
                        }
                    ],
                }
            ],
            "clusters": [
                {
                    "name": "node",
                    "type": "STATIC",
                    "load_assignment": {
                        "cluster_name": "node",
                        "endpoints": [{"lb_endpoints": [{"endpoint": {"address": at(*target)}}]}],
                    },
                }
            ],
        }
    }


@asynccontextmanager
async def envoy_before(target: tuple[str, int], directory: Path) -> AsyncIterator[str]:
    """Run Envoy on a free port; gives its ``host:port``."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    path = directory / "envoy.json"
    path.write_text(json.dumps(config(port, target)))
    process = await asyncio.create_subprocess_exec(
        str(ENVOY), "-c", str(path), "--concurrency", "1", "--disable-hot-restart",
        "--log-level", "error", stdin=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(START_S):
            while True:
                assert process.returncode is None, "Envoy ended"
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.02)
                    continue
                writer.close()
                break
        yield f"127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class Failing(EchoHandler):
    def forward(self, chunk: Any, caller: Any) -> Any:
        if chunk.header.position:
            raise PositionError("a gap", expected=5)
        return super().forward(chunk, caller)


@pytest.mark.parametrize("client_class", [PlaneClient, ThreadedClient], ids=["asyncio", "threads"])
async def test_chunks_answers_and_errors_pass_envoy(tmp_path: Path, client_class: Any) -> None:
    handler = Failing()
    async with serving(handler) as place, envoy_before(place, tmp_path) as address:
        client = client_class(LinkSettings(RAW))
        for shape in ((1, 1, 576), (1, 1, 16384), (1, 128, 16384), (1, 1, 16384)):
            bits = np.random.default_rng(7).integers(0, 1 << 16, shape, np.uint16)
            tensor = bits.view(ml_dtypes.bfloat16)
            answer = await client.forward(
                address, ALPHA, chunk_header(*shape), tensor, timeout_s=BOUND_S
            )
            assert np.array_equal(answer.tensor.view(np.uint16), bits)
        with pytest.raises(PositionError) as caught:
            await client.forward(
                address, ALPHA, chunk_header(position=9), tensor_of(P16), timeout_s=BOUND_S
            )
        assert caught.value.expected == 5
        session = new_session()
        await client.release(address, session)
        assert handler.released == [session]
        await client.close()


@pytest.mark.parametrize(
    "extra", [(), ("-H", "Transfer-Encoding: chunked"), ("-H", "Expect: 100-continue")],
    ids=["as-is", "chunked", "expect"],
)  # fmt: skip
async def test_curl_through_envoy(tmp_path: Path, extra: tuple[str, ...]) -> None:
    body = P16 * 65536
    path = tmp_path / "body"
    path.write_bytes(body)
    async with serving(EchoHandler()) as place, envoy_before(place, tmp_path) as address:
        fields = [*CURL_FIELDS, "-H", "X-Meshnet-Dtype: bfloat16", *extra]
        sent = ["-H", "X-Meshnet-Shape: 1,64,8192", "--data-binary", f"@{path}"]
        assert await curl(*fields, *sent, f"http://{address}/forward") == body


async def test_a_node_that_is_gone_is_envoys_error(tmp_path: Path) -> None:
    async with serving(EchoHandler()) as place:
        pass
    async with envoy_before(place, tmp_path) as address:
        client = PlaneClient(LinkSettings(RAW))
        with pytest.raises(MeshError) as caught:
            await client.forward(address, ALPHA, chunk_header(), tensor_of(P16), timeout_s=BOUND_S)
        assert caught.value.code is Code.UNAVAILABLE
        await client.close()
