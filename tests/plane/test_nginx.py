"""Real nginx before the server: chunks, kept connections, large bodies and errors pass it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from meshnet.compression import CompressionPolicies, CompressionPolicy
from meshnet.errors import CacheFullError, MeshError, PositionError
from meshnet.plane.client import PlaneClient
from meshnet.plane.handler import PlaneLimits
from meshnet.plane.links import LinkSettings
from meshnet.topology import NodeId
from tests.nginx import nginx_before
from tests.plane.certificates import make_authority
from tests.plane.doubles import (
    BOUND_S,
    P16,
    EchoHandler,
    GateHandler,
    calling,
    chunk_header,
    new_session,
    request,
    serving,
    tensor_of,
)
from tests.plane.test_curl import CURL_FIELDS, curl
from tests.plane.threaded import ThreadedClient

ALPHA = NodeId("alpha")
RAW = CompressionPolicies(
    {("lan", phase): CompressionPolicy(0, enabled=False) for phase in ("prefill", "decode")}
)


class Refusing(EchoHandler):
    """Refuses by the chunk's position."""

    def forward(self, chunk: Any, caller: Any) -> Any:
        if chunk.header.position == 9:
            raise PositionError("a gap", expected=5)
        if chunk.header.position == 7:
            raise CacheFullError("none is left", retry_after_s=3.0)
        return super().forward(chunk, caller)


@pytest.fixture(params=[PlaneClient, ThreadedClient], ids=["asyncio", "threads"])
def client_class(request: pytest.FixtureRequest) -> type[Any]:
    kind: type[Any] = request.param
    return kind


def place_of(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


async def test_chunks_and_answers_pass_nginx_over_one_kept_connection(
    tmp_path: Path, client_class: type[Any]
) -> None:
    handler = Refusing()
    limits = PlaneLimits(max_connections=1)
    async with (
        serving(handler, limits=limits) as (host, port),
        nginx_before(f"{host}:{port}", tmp_path) as address,
    ):
        client = client_class(LinkSettings(RAW))
        for shape in ((1, 1, 576), (1, 1, 16384), (1, 512, 16384), (1, 1, 16384)):
            bits = np.random.default_rng(7).integers(0, 1 << 16, shape, np.uint16)
            tensor = bits.view(ml_dtypes.bfloat16)
            answer = await client.forward(
                address, ALPHA, chunk_header(*shape), tensor, timeout_s=6 * BOUND_S
            )
            assert np.array_equal(answer.tensor.view(np.uint16), bits)
        session = new_session()
        await client.release(address, session)
        assert handler.released == [session]
        await client.close()


async def test_errors_pass_nginx_with_their_problem(
    tmp_path: Path, client_class: type[Any]
) -> None:
    async with (
        serving(Refusing()) as (host, port),
        nginx_before(f"{host}:{port}", tmp_path) as address,
    ):
        client = client_class(LinkSettings(RAW))
        with pytest.raises(PositionError) as gap:
            await client.forward(
                address, ALPHA, chunk_header(position=9), tensor_of(P16), timeout_s=BOUND_S
            )
        assert gap.value.expected == 5
        with pytest.raises(MeshError) as full:
            await client.forward(
                address, ALPHA, chunk_header(position=7), tensor_of(P16), timeout_s=BOUND_S
            )
        assert (full.value.reason, full.value.retry_after_s) == ("CACHE_FULL", 3.0)
        await client.close()
        async with calling(place_of(address)) as caller:
            for _ in range(2):
                await caller.send(request(without="X-Meshnet-Dtype"))
                answer = await caller.read()
                assert answer.status == 400
                assert answer.headers["content-type"] == "application/problem+json"
                assert answer.headers["x-meshnet-wire-version"] == "2"
                assert json.loads(answer.body)["field"] == "X-Meshnet-Dtype"
                assert not answer.closes


@pytest.mark.parametrize(
    "extra", [(), ("-H", "Transfer-Encoding: chunked"), ("-H", "Expect: 100-continue")],
    ids=["as-is", "chunked", "expect"],
)  # fmt: skip
async def test_curl_through_nginx(tmp_path: Path, extra: tuple[str, ...]) -> None:
    body = P16 * (1 << 20)
    path = tmp_path / "body"
    path.write_bytes(body)
    async with (
        serving(EchoHandler()) as (host, port),
        nginx_before(f"{host}:{port}", tmp_path) as address,
    ):
        fields = [*CURL_FIELDS, "-H", "X-Meshnet-Dtype: bfloat16", *extra]
        sent = ["-H", "X-Meshnet-Shape: 1,512,16384", "--data-binary", f"@{path}"]
        assert await curl(*fields, *sent, f"http://{address}/forward") == body


async def test_nginx_may_end_tls_before_a_plain_node(
    tmp_path: Path, client_class: type[Any]
) -> None:
    authority = make_authority(tmp_path / "tls")
    shape = (1, 256, 16384)
    tensor = tensor_of(P16 * (1 << 19), *shape)
    async with (
        serving(EchoHandler()) as (host, port),
        nginx_before(f"{host}:{port}", tmp_path, tls=authority) as address,
    ):
        client = client_class(LinkSettings(RAW, tls=authority.client()))
        for _ in range(2):
            answer = await client.forward(
                address, ALPHA, chunk_header(*shape), tensor, timeout_s=6 * BOUND_S
            )
            assert np.array_equal(answer.tensor.view(np.uint16), tensor.view(np.uint16))
        await client.close()


async def test_a_node_that_is_gone_is_nginx_error(tmp_path: Path, client_class: type[Any]) -> None:
    async with serving(EchoHandler()) as (host, port):
        pass
    async with nginx_before(f"{host}:{port}", tmp_path) as address:
        client = client_class(LinkSettings(RAW))
        with pytest.raises(MeshError) as caught:
            await client.forward(address, ALPHA, chunk_header(), tensor_of(P16), timeout_s=BOUND_S)
        assert caught.value.code.http_status == 502
        await client.close()


async def test_a_caller_that_leaves_nginx_ends_its_request(tmp_path: Path) -> None:
    handler = GateHandler()
    async with (
        serving(handler) as (host, port),
        nginx_before(f"{host}:{port}", tmp_path) as address,
    ):
        client = PlaneClient(LinkSettings(RAW))
        asked = asyncio.create_task(
            client.forward(address, ALPHA, chunk_header(), tensor_of(P16), timeout_s=BOUND_S)
        )
        await handler.entered.wait()
        asked.cancel()
        await handler.cancelled.wait()
        with pytest.raises(asyncio.CancelledError):
            await asked
        await client.close()
