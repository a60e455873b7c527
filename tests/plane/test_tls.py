"""The plane through TLS: both clients and curl against the server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from meshnet.chunk import Answer, Chunk
from meshnet.compression import CompressionPolicies, CompressionPolicy
from meshnet.errors import NextHopError, PositionError, WireError
from meshnet.plane.caller import Caller
from meshnet.plane.client import PlaneClient
from meshnet.plane.handler import PlaneLimits
from meshnet.plane.links import LinkSettings
from meshnet.topology import NodeId
from tests.plane.certificates import Authority, make_authority
from tests.plane.doubles import (
    BOUND_S,
    P16,
    EchoHandler,
    GateHandler,
    answer_to,
    calling,
    chunk_header,
    serving,
    tensor_of,
)
from tests.plane.test_curl import CURL_FIELDS, curl
from tests.plane.threaded import ThreadedClient

ALPHA = NodeId("alpha")
RAW = CompressionPolicies(
    {("lan", phase): CompressionPolicy(0, enabled=False) for phase in ("prefill", "decode")}
)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(params=[PlaneClient, ThreadedClient], ids=["asyncio", "threads"])
def client_class(request: pytest.FixtureRequest) -> type[Any]:
    kind: type[Any] = request.param
    return kind


async def test_bodies_of_any_size_go_and_come(
    authority: Authority, client_class: type[Any]
) -> None:
    handler = EchoHandler()
    client = client_class(LinkSettings(RAW, tls=authority.client()))
    random = np.random.default_rng(7)
    async with serving(handler, tls=authority.server()) as (host, port):
        for shape in ((1, 1, 8), (1, 1, 16384), (1, 128, 16384), (1, 1, 576), (1, 256, 16384)):
            bits = random.integers(0, 1 << 16, shape, np.uint16)
            answer = await client.forward(
                f"{host}:{port}",
                ALPHA,
                chunk_header(*shape),
                bits.view(ml_dtypes.bfloat16),
                timeout_s=BOUND_S,
            )
            assert np.array_equal(answer.tensor.view(np.uint16), bits)
        await client.close()


async def test_errors_cross_and_the_connection_is_kept(
    authority: Authority, client_class: type[Any]
) -> None:
    client = client_class(LinkSettings(RAW, tls=authority.client()))
    limits = PlaneLimits(max_connections=1)
    async with serving(EchoHandler(), tls=authority.server(), limits=limits) as (host, port):
        header = chunk_header(traceparent="not-one")
        for _ in range(3):
            with pytest.raises(WireError, match="traceparent"):
                await client.forward(
                    f"{host}:{port}", ALPHA, header, tensor_of(P16), timeout_s=BOUND_S
                )
        await client.close()


@pytest.mark.parametrize("ask_callers", [False, True], ids=["unknown-server", "unknown-caller"])
async def test_who_is_not_known_is_refused_and_the_server_lives_on(
    tmp_path: Path, authority: Authority, client_class: type[Any], ask_callers: bool
) -> None:
    stranger = make_authority(tmp_path / "other")
    strange = authority.client() if ask_callers else stranger.client()
    own = authority.client(own=True)
    tls = authority.server(ask_callers=ask_callers)
    async with serving(EchoHandler(), tls=tls) as (host, port):
        for context, good in ((strange, False), (own, True)):
            client = client_class(LinkSettings(RAW, tls=context))
            request = client.forward(
                f"{host}:{port}", ALPHA, chunk_header(), tensor_of(P16), timeout_s=BOUND_S
            )
            if good:
                assert (await request).tensor.tobytes() == P16
            else:
                with pytest.raises(NextHopError) as caught:
                    await request
                assert caught.value.failed_node == "alpha"
                assert "\n" not in caught.value.message
                if ask_callers:
                    said = "it refused this side's certificate (certificate required); see --tls-"
                else:
                    said = "its certificate is not accepted ("
                assert f"node alpha at {host}:{port}: {said}" in caught.value.message
                assert "--tls-ca" in caught.value.message
            await client.close()


@pytest.mark.parametrize("num_tokens", [1, 512], ids=["short", "8-mib"])
async def test_a_caller_without_tls_is_told_and_the_server_lives_on(
    authority: Authority, client_class: type[Any], num_tokens: int
) -> None:
    shape = (1, num_tokens, 8192)
    tensor = tensor_of(P16 * (num_tokens * 1024), *shape)
    async with serving(EchoHandler(), tls=authority.server()) as (host, port):
        for context in (None, authority.client()):
            client = client_class(LinkSettings(RAW, tls=context))
            request = client.forward(
                f"{host}:{port}", ALPHA, chunk_header(*shape), tensor, timeout_s=BOUND_S
            )
            if context is None:
                with pytest.raises(NextHopError, match=f"node alpha at {host}:{port}: .*--tls-ca"):
                    await request
            else:
                assert np.array_equal((await request).tensor, tensor, equal_nan=True)
            await client.close()


async def test_a_caller_with_tls_is_told_that_the_server_has_none(
    authority: Authority, client_class: type[Any]
) -> None:
    async with serving(EchoHandler()) as (host, port):
        said = f"node alpha at {host}:{port}: .*--tls-cert"
        for context in (authority.client(), None):
            client = client_class(LinkSettings(RAW, tls=context))
            request = client.forward(
                f"{host}:{port}", ALPHA, chunk_header(), tensor_of(P16), timeout_s=BOUND_S
            )
            if context is None:
                assert (await request).tensor.tobytes() == P16
            else:
                with pytest.raises(NextHopError, match=said):
                    await request
            await client.close()


async def test_a_long_first_body_is_not_cut_by_what_tls_says_for_itself(
    authority: Authority, client_class: type[Any]
) -> None:
    """Tickets come when the handshake is done: longer than buffers hold, sending waits then."""
    shape = (1, 1024, 16384)
    bits = np.random.default_rng(3).integers(0, 1 << 16, shape, np.uint16)
    async with serving(EchoHandler(), tls=authority.server()) as (host, port):
        client = client_class(LinkSettings(RAW, tls=authority.client()))
        answer = await client.forward(
            f"{host}:{port}",
            ALPHA,
            chunk_header(*shape),
            bits.view(ml_dtypes.bfloat16),
            timeout_s=6 * BOUND_S,
        )
        assert np.array_equal(answer.tensor.view(np.uint16), bits)
        await client.close()


class Picky(EchoHandler):
    """Refuses every third position; answers nothing but the first half to every fifth."""

    def forward(self, chunk: Chunk, caller: Caller) -> Answer:
        position = chunk.header.position or 0
        if position % 3 == 2:
            raise PositionError("a gap", expected=5)
        if position % 5 == 4:
            return answer_to(chunk, chunk.tensor[:, :, : chunk.tensor.shape[2] // 2])
        return super().forward(chunk, caller)


@pytest.mark.parametrize("width", [8, 576, 8192, 16384, 24000])
async def test_steps_of_a_session_and_what_is_unlike_them(
    authority: Authority, client_class: type[Any], width: int
) -> None:
    random = np.random.default_rng(width)
    header = chunk_header(1, 1, width)
    async with serving(Picky(), tls=authority.server()) as (host, port):
        client = client_class(LinkSettings(RAW, tls=authority.client()))
        for position in range(40):
            bits = random.integers(0, 1 << 16, (1, 1, width), np.uint16)
            request = client.forward(
                f"{host}:{port}",
                ALPHA,
                header.at(position),
                bits.view(ml_dtypes.bfloat16),
                timeout_s=BOUND_S,
            )
            if position % 3 == 2:
                with pytest.raises(PositionError):
                    await request
                continue
            wanted = bits[:, :, : width // 2] if position % 5 == 4 else bits
            assert np.array_equal((await request).tensor.view(np.uint16), wanted)
        await client.close()


async def test_plain_bytes_are_answered_plainly(authority: Authority) -> None:
    async with serving(EchoHandler(), tls=authority.server()) as place:
        async with calling(place) as caller:
            await caller.send(b"GET /healthz HTTP/1.1\r\nHost: n\r\n\r\n")
            answer = await caller.read()
            assert answer.status == 400
            assert answer.closes
            assert json.loads(answer.body)["reason"] == "TLS_REQUIRED"
            assert await caller.at_end()
        client = PlaneClient(LinkSettings(RAW, tls=authority.client()))
        address = f"{place[0]}:{place[1]}"
        assert (await client.get(address, "/healthz", timeout_s=BOUND_S))[0] == 200
        await client.close()


async def test_a_caller_that_leaves_ends_its_request(
    authority: Authority, client_class: type[Any]
) -> None:
    handler = GateHandler()
    client = client_class(LinkSettings(RAW, tls=authority.client()))
    async with serving(handler, tls=authority.server()) as (host, port):
        request = asyncio.create_task(
            client.forward(
                f"{host}:{port}", ALPHA, chunk_header(), tensor_of(P16), timeout_s=BOUND_S
            )
        )
        await handler.entered.wait()
        request.cancel()
        await handler.cancelled.wait()
        with pytest.raises(asyncio.CancelledError):
            await request
        await client.close()


async def test_curl_through_tls(tmp_path: Path, authority: Authority) -> None:
    body = P16 * 65536
    path = tmp_path / "body"
    path.write_bytes(body)
    fields = [*CURL_FIELDS, "-H", "X-Meshnet-Shape: 1,64,8192", "-H", "X-Meshnet-Dtype: bfloat16"]
    async with serving(EchoHandler(), tls=authority.server()) as (host, port):
        sent = ["--cacert", str(authority.ca), "--data-binary", f"@{path}"]
        assert await curl(*fields, *sent, f"https://{host}:{port}/forward") == body
