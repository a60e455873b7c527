"""The activation plane's client, against the real server and against nodes that misbehave."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from meshnet.chunk import Answer, Chunk
from meshnet.compression import CompressionPolicies, CompressionPolicy
from meshnet.errors import (
    CacheFullError,
    Code,
    MeshError,
    NextHopError,
    PositionError,
    UnknownSessionError,
    WireError,
)
from meshnet.plane.caller import Caller
from meshnet.plane.client import PlaneClient
from meshnet.plane.links import LinkSettings
from meshnet.plane.server import PlaneServer
from meshnet.topology import NodeId
from meshnet.wire import ChunkHeader, WireLimits
from tests.plane.doubles import (
    BOUND_S,
    P16,
    EchoHandler,
    GateHandler,
    Script,
    answer_to,
    chunk_header,
    misbehaving,
    new_session,
    read_request,
    serving,
    tensor_of,
)
from tests.plane.threaded import ThreadedClient

ALPHA = NodeId("alpha")


Client = PlaneClient | ThreadedClient
_CLIENTS: dict[str, type[Any]] = {"asyncio": PlaneClient, "threads": ThreadedClient}
_chosen: list[type[Any]] = []


@pytest.fixture(params=_CLIENTS, autouse=True)
def client_kind(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run every test here with both clients."""
    _chosen.append(_CLIENTS[request.param])
    yield request.param
    _chosen.pop()


def new_client(policies: CompressionPolicies | None = None, **arguments: Any) -> Client:
    settings = LinkSettings(policies or CompressionPolicies(), **arguments)
    client: Client = _chosen[-1](settings)
    return client


async def forward_p16(
    client: Client, address: str, header: ChunkHeader | None = None, timeout_s: float = BOUND_S
) -> Answer:
    return await client.forward(
        address, ALPHA, header or chunk_header(), tensor_of(P16), timeout_s=timeout_s
    )


def good_answer(header: ChunkHeader, *extra: str, body: bytes = P16) -> bytes:
    fields = [
        "HTTP/1.1 200 OK",
        "X-Meshnet-Wire: 2",
        "X-Meshnet-Shape: 1,1,8",
        "X-Meshnet-Dtype: bfloat16",
        f"X-Meshnet-Session: {header.session}",
        "X-Meshnet-Chunk-Index: 0",
        "X-Meshnet-Chunk-Total: 1",
        *(extra or (f"Content-Length: {len(body)}",)),
    ]
    return "\r\n".join([*fields, "", ""]).encode() + body


async def test_a_chunk_goes_and_its_answer_comes() -> None:
    handler = EchoHandler()
    header = chunk_header(position=3, max_tokens=40)
    client = new_client()
    async with serving(handler) as (host, port):
        for _ in range(3):
            answer = await forward_p16(client, f"{host}:{port}", header)
            assert answer.tensor is not None
            assert answer.tensor.tobytes() == P16
            assert answer.header.shape == (1, 1, 8)
            assert answer.wire_bytes == 16
        await client.close()
    assert [chunk.header for chunk in handler.chunks] == [header] * 3


async def test_one_connection_serves_request_after_request() -> None:
    connections = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        while True:
            await read_request(reader)
            writer.write(good_answer(HEADER))

    client = new_client()
    async with misbehaving(script) as address:
        for _ in range(3):
            await forward_p16(client, address, HEADER)
        await client.close()
    assert connections == 1


async def test_the_policy_decides_what_is_compressed_both_ways() -> None:
    handler = EchoHandler()
    client = new_client()
    tensor = np.zeros((1, 128, 8192), ml_dtypes.bfloat16)
    header = chunk_header(*tensor.shape, chunk_total=2, accept_encoding=("zstd",))
    async with serving(handler) as (host, port):
        answer = await client.forward(f"{host}:{port}", ALPHA, header, tensor, timeout_s=BOUND_S)
        await client.close()
    assert handler.chunks[0].header.encoding == "zstd"
    assert handler.chunks[0].wire_bytes < tensor.nbytes // 100
    assert handler.chunks[0].tensor.tobytes() == tensor.tobytes()
    assert answer.header.encoding == "zstd"
    assert answer.wire_bytes < tensor.nbytes // 100
    assert answer.codec_s > 0
    assert answer.tensor is not None
    assert answer.tensor.tobytes() == tensor.tobytes()


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 1, 16384), (1, 256, 16384)])
async def test_any_bits_of_any_size_come_back(shape: tuple[int, ...]) -> None:
    bits = np.random.default_rng(7).integers(0, 1 << 16, shape, np.uint16)
    raw = {("lan", phase): CompressionPolicy(0, enabled=False) for phase in ("prefill", "decode")}
    client = new_client(CompressionPolicies(raw))
    async with serving(EchoHandler()) as (host, port):
        answer = await client.forward(
            f"{host}:{port}",
            ALPHA,
            chunk_header(*shape),
            bits.view(ml_dtypes.bfloat16),
            timeout_s=BOUND_S,
        )
        await client.close()
    assert answer.tensor is not None
    assert np.array_equal(answer.tensor.view(np.uint16), bits)


async def test_no_tensor_is_none() -> None:
    class Silent(EchoHandler):
        def forward(self, chunk: Chunk, caller: Caller) -> Answer:
            return answer_to(chunk, None)

    client = new_client()
    async with serving(Silent()) as (host, port):
        for _ in range(2):
            answer = await forward_p16(client, f"{host}:{port}")
            assert (answer.tensor, answer.header.shape, answer.header.dtype) == (None, None, None)
        await client.close()


@pytest.mark.parametrize(
    "error",
    [
        PositionError("a gap", expected=12),
        UnknownSessionError("no such session"),
        CacheFullError("full", retry_after_s=3.0),
        NextHopError("gone", failed_node="gamma"),
        NextHopError("late", failed_node="gamma", timed_out=True),
        WireError("bad", field="X-Meshnet-Layers"),
        MeshError(Code.UNAVAILABLE, "draining", reason="DRAINING", retry_after_s=1.0),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_errors_cross_the_plane(error: MeshError) -> None:
    class Failing(EchoHandler):
        def forward(self, chunk: Chunk, caller: Caller) -> Answer:
            raise error

    client = new_client()
    async with serving(Failing()) as (host, port):
        for _ in range(2):
            with pytest.raises(MeshError) as caught:
                await forward_p16(client, f"{host}:{port}")
            assert type(caught.value) is type(error)
            for name in ("code", "message", "field", "reason", "retry_after_s"):
                assert getattr(caught.value, name) == getattr(error, name)
            for name in ("expected", "failed_node"):
                assert getattr(caught.value, name, None) == getattr(error, name, None)
        await client.close()


async def test_cold_get_and_release() -> None:
    handler, session = EchoHandler(), new_session()
    client = PlaneClient()
    async with serving(handler) as (host, port):
        address = f"{host}:{port}"
        assert await client.get(address, "/healthz", timeout_s=BOUND_S) == (200, b"well\n")
        assert (await client.get(address, "/none", timeout_s=BOUND_S))[0] == 404
        await client.release(address, session)
        await client.close()
    assert handler.released == [session]
    with pytest.raises(MeshError) as caught:
        await client.get(address, "/healthz", timeout_s=BOUND_S)
    assert caught.value.code is Code.UNAVAILABLE


@pytest.mark.parametrize(
    "address", ["nonsense", "h:99999", "h:0x10", "a..b:80", "[::1]", "u@h:80", ":80", "h i:80"]
)
async def test_an_address_that_is_none_is_a_failed_hop(address: str) -> None:
    client = new_client()
    with pytest.raises(NextHopError, match="address"):
        await forward_p16(client, address)
    assert not client._trips._pool._lanes


def test_an_unknown_route_condition_is_refused_at_once() -> None:
    policies = CompressionPolicies()
    with pytest.raises(ValueError, match="moon"):
        new_client(policies, route_condition="moon")
    with pytest.raises(ValueError, match="moon"):
        PlaneServer(EchoHandler(), policies=policies, route_condition="moon")


def has_ipv6() -> bool:
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return True
    except OSError:
        return False


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
async def test_ipv6() -> None:
    client = new_client()
    server = PlaneServer(EchoHandler(), policies=CompressionPolicies())
    host, port = await server.start("::1", 0)
    assert (await forward_p16(client, f"[{host}]:{port}")).tensor is not None
    await client.close()
    await server.close(1.0)


async def until_closed(reader: asyncio.StreamReader) -> None:
    while await reader.read(1 << 16):
        pass


def after_request(*answers: bytes) -> Script:
    """Read a request, send the answers one by one, and close."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        for answer in answers:
            writer.write(answer)
            await writer.drain()

    return script


HEADER = chunk_header(position=4)
BAD_ANSWERS = [
    (b"", "closed before an answer"),
    (b"SSH-2.0-OpenSSH\r\n\r\n", "status line"),
    (b"HTTP/1.1 200 OK\r\nX : 1\r\n\r\n", "header line"),
    (b"HTTP/1.1 302 Found\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", "status 302"),
    (b"HTTP/1.1 100 Continue\r\n\r\n" * 20, "interim"),
    (b"HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n" + P16, "X-Meshnet-Session"),
    (good_answer(HEADER)[:-1], "closed"),
    (good_answer(HEADER, "Content-Length: 17", body=P16 + b"x"), "expected 16"),
    (good_answer(HEADER, "Content-Length: 99999999999"), "expected 16"),
    (good_answer(HEADER, body=P16[:-1]), "expected 16"),
    (good_answer(HEADER, "Content-Length: 16", "Content-Length: 16"), "more than once"),
    (good_answer(HEADER, "Connection: close", body=P16[:-1]), "expected 16"),
    (good_answer(HEADER, "Transfer-Encoding: chunked", body=b"11\r\n" + P16 + b"x\r\n"), "16"),
    (good_answer(HEADER).replace(HEADER.session.encode(), new_session().encode()), "session"),
    (good_answer(HEADER).replace(b"Index: 0", b"Index: 1"), "Index"),
    (good_answer(HEADER).replace(b"1,1,8", b"1,999999,999999"), "expected"),
    (good_answer(HEADER).replace(b"Wire: 2", b"Wire: 3"), "Wire"),
    (good_answer(HEADER, "X-Meshnet-Encoding: zstd", "Content-Length: 16"), "zstd"),
    (good_answer(HEADER, "X-Meshnet-Encoding: odd", "Content-Length: 16"), "odd"),
    (b"HTTP/1.1 200 OK\r\n" + b"X: " + b"y" * 40000 + b"\r\n\r\n", "more than"),
]


@pytest.mark.parametrize(("answer", "words"), BAD_ANSWERS)
async def test_what_is_no_answer_names_the_node(answer: bytes, words: str) -> None:
    client = new_client(limits=WireLimits(max_chunk_bytes=1 << 20))
    async with misbehaving(after_request(answer)) as address:
        with pytest.raises(NextHopError, match="node alpha at") as caught:
            await forward_p16(client, address, HEADER)
        await client.close()
    assert caught.value.failed_node == "alpha"
    assert caught.value.code is Code.NEXT_HOP_FAILED
    assert words in caught.value.message


GOOD_ANSWERS = {
    "length": [good_answer(HEADER)],
    "close": [good_answer(HEADER, "Connection: close")],
    "http-1.0": [good_answer(HEADER, "X: y").replace(b"HTTP/1.1", b"HTTP/1.0")],
    "chunked": [
        good_answer(HEADER, "Transfer-Encoding: chunked", body=b"8\r\n" + P16[:8] + b"\r\n"),
        b"8\r\n" + P16[8:] + b"\r\n0\r\nTrailer: x\r\n\r\n",
    ],
    "interim": [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 H\r\n\r\n", good_answer(HEADER)],
    "byte-by-byte": [bytes([byte]) for byte in good_answer(HEADER)],
}


@pytest.mark.parametrize("name", GOOD_ANSWERS)
async def test_answers_may_be_framed_in_any_way_of_http(name: str) -> None:
    client = new_client()
    async with misbehaving(after_request(*GOOD_ANSWERS[name])) as address:
        for _ in range(2):
            answer = await forward_p16(client, address, HEADER)
            assert answer.tensor is not None
            assert answer.tensor.tobytes() == P16
        await client.close()


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 6\r\n\r\n<html>", Code.NEXT_HOP_FAILED),
        (b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: 0\r\n\r\n", Code.UNAVAILABLE),
        (b"HTTP/1.0 400 Bad\r\n\r\nuntil the end", Code.INVALID_ARGUMENT),
    ],
)
async def test_a_proxys_error_is_an_error(answer: bytes, code: Code) -> None:
    client = new_client()
    async with misbehaving(after_request(answer)) as address:
        with pytest.raises(MeshError) as caught:
            await forward_p16(client, address)
        await client.close()
    assert caught.value.code is code


async def test_a_node_that_hangs_times_out() -> None:
    ended = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await until_closed(reader)
        ended.set()

    client = new_client()
    async with misbehaving(script) as address:
        started = time.monotonic()
        with pytest.raises(NextHopError, match="no answer within") as caught:
            await forward_p16(client, address, timeout_s=0.2)
        assert time.monotonic() - started < BOUND_S / 2
        assert caught.value.code is Code.DEADLINE_EXCEEDED
        assert caught.value.failed_node == "alpha"
        await asyncio.wait_for(ended.wait(), BOUND_S)  # the connection was closed
        await client.close()


async def test_no_one_listening_is_a_failed_hop() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    client = new_client()
    with pytest.raises(NextHopError, match=address) as caught:
        await forward_p16(client, address)
    assert caught.value.code is Code.NEXT_HOP_FAILED


async def test_connecting_has_its_own_timeout() -> None:
    # A full backlog: the kernel drops further attempts, as a host that is off would.
    with socket.socket() as full, socket.socket() as filler:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        filler.connect(full.getsockname())
        client = new_client(connect_timeout_s=0.2)
        with pytest.raises(NextHopError, match=r"no connection within 0\.2 s") as caught:
            await forward_p16(client, f"127.0.0.1:{full.getsockname()[1]}")
        assert caught.value.code is Code.DEADLINE_EXCEEDED


async def test_a_kept_connection_that_the_node_closed_is_not_used() -> None:
    connections = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        connections += 1
        await read_request(reader)
        writer.write(good_answer(HEADER))  # and close, without saying so

    client = new_client()
    async with misbehaving(script) as address:
        for _ in range(3):
            await forward_p16(client, address, HEADER)
        await client.close()
    assert connections == 3


@pytest.mark.parametrize("abrupt", [False, True], ids=["eof", "reset"])
@pytest.mark.parametrize("position", [4, None])
async def test_one_retry_where_a_kept_connection_ends_without_an_answer(
    abrupt: bool, position: int | None
) -> None:
    header = HEADER._replace(position=position)
    requests: list[str] = []
    first = True

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal first
        keep, first = first, False
        while True:
            head, _ = await read_request(reader)
            requests.append(head)
            if keep and len(requests) == 2:
                if abrupt:
                    linger = struct.pack("ii", 1, 0)
                    writer.get_extra_info("socket").setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, linger
                    )
                return
            writer.write(good_answer(HEADER))

    client = new_client()
    async with misbehaving(script) as address:
        await forward_p16(client, address, header)
        if position is None:  # sent again, it could be appended twice
            with pytest.raises(NextHopError):
                await forward_p16(client, address, header)
        else:
            await forward_p16(client, address, header)
        await client.close()
    assert len(requests) == (2 if position is None else 3)
    assert len(set(requests)) == 1


async def test_no_retry_on_a_fresh_connection_or_after_an_answer_began() -> None:
    requests = 0

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal requests
        while True:
            await read_request(reader)
            requests += 1
            if requests == 1:
                return
            if requests == 3:
                writer.write(good_answer(HEADER)[:40])
                return
            writer.write(good_answer(HEADER))

    client = new_client()
    async with misbehaving(script) as address:
        with pytest.raises(NextHopError):
            await forward_p16(client, address, HEADER)
        assert requests == 1
        await forward_p16(client, address, HEADER)
        with pytest.raises(NextHopError):
            await forward_p16(client, address, HEADER)
        await client.close()
    assert requests == 3


LARGE = np.zeros((1, 512, 16384), ml_dtypes.bfloat16)
REFUSAL = (
    b"HTTP/1.1 409 Conflict\r\nX-Meshnet-Expected-Position: 5\r\nConnection: close\r\n"
    b"Content-Length: 2\r\n\r\n{}"
)


@pytest.mark.parametrize("goes_on_reading", [False, True])
async def test_an_answer_before_the_body_is_sent_is_heard(goes_on_reading: bool) -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(REFUSAL)
        await writer.drain()
        if goes_on_reading:
            await until_closed(reader)
        else:
            await asyncio.sleep(BOUND_S)  # until cancelled: it reads no more

    raw = {("lan", phase): CompressionPolicy(0, enabled=False) for phase in ("prefill", "decode")}
    client = new_client(CompressionPolicies(raw))
    async with misbehaving(script) as address:
        started = time.monotonic()
        with pytest.raises(PositionError) as caught:
            await client.forward(
                address, ALPHA, chunk_header(*LARGE.shape), LARGE, timeout_s=BOUND_S
            )
        assert caught.value.expected == 5
        assert time.monotonic() - started < BOUND_S / 2
        await client.close()


async def test_cancelling_a_request_closes_its_connection() -> None:
    handler, client = GateHandler(), new_client()
    async with serving(handler) as (host, port):
        task = asyncio.create_task(forward_p16(client, f"{host}:{port}"))
        await asyncio.wait_for(handler.entered.wait(), BOUND_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.wait_for(handler.cancelled.wait(), BOUND_S)
        handler.gate.set()
        assert (await forward_p16(client, f"{host}:{port}")).tensor is not None
        await client.close()


async def test_requests_wait_their_turn_where_all_connections_are_in_use() -> None:
    handler, client = GateHandler(), new_client(max_connections=1)
    async with serving(handler) as (host, port):
        first = asyncio.create_task(forward_p16(client, f"{host}:{port}"))
        await asyncio.wait_for(handler.entered.wait(), BOUND_S)
        with pytest.raises(NextHopError, match="no answer within"):
            await forward_p16(client, f"{host}:{port}", timeout_s=0.1)
        second = asyncio.create_task(forward_p16(client, f"{host}:{port}"))
        handler.gate.set()
        await asyncio.wait_for(asyncio.gather(first, second), BOUND_S)
        await client.close()
    assert len(handler.chunks) == 2


async def test_a_node_that_restarts_is_reached_again(caplog: pytest.LogCaptureFixture) -> None:
    client = new_client()
    server = PlaneServer(EchoHandler(), policies=CompressionPolicies())
    host, port = await server.start("127.0.0.1", 0)
    for _ in range(2):
        await forward_p16(client, f"{host}:{port}")
        await server.close(1.0)
        with pytest.raises(NextHopError):
            await forward_p16(client, f"{host}:{port}")
        server = PlaneServer(EchoHandler(), policies=CompressionPolicies())
        await server.start(host, port)
    await forward_p16(client, f"{host}:{port}")
    await client.close()
    await server.close(1.0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_host_that_does_not_answer_is_left_alone_for_a_while(client_kind: str) -> None:
    if client_kind != "threads":
        return  # the gateway asks the control plane, which knows who is healthy
    with socket.socket() as full, socket.socket() as filler:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        filler.connect(full.getsockname())
        address = f"127.0.0.1:{full.getsockname()[1]}"
        client = new_client(connect_timeout_s=0.2)
        with pytest.raises(NextHopError, match=r"no connection within 0\.2 s"):
            await forward_p16(client, address)
        with pytest.raises(NextHopError, match="a moment ago") as caught:
            await forward_p16(client, address)
        assert caught.value.code is Code.DEADLINE_EXCEEDED
        await client.close()
