"""KV caches over sockets: they arrive bit for bit, or nothing of them is kept."""

from __future__ import annotations

import asyncio
import random

import pytest

from meshnet.cache_wire import CacheHeader, MoveHeader, pack_cache
from meshnet.errors import CacheFullError, Code, MeshError, NextHopError, WireError
from meshnet.kv import KvLayout, LayerKv
from meshnet.plane.caller import Caller, CallerGoneError
from meshnet.plane.client import PlaneClient
from meshnet.plane.handler import PlaneLimits
from meshnet.plane.hop_client import HopClient
from meshnet.plane.links import LinkSettings
from meshnet.topology import Hop, LayerRange, NodeId
from tests.plane.certificates import make_authority
from tests.plane.doubles import (
    BOUND_S,
    EchoHandler,
    Flag,
    calling,
    expect_good,
    new_session,
    problem,
    serving,
)
from tests.vectors.load import load_caches

ALPHA = NodeId("alpha")
HOP = Hop(NodeId("beta"), "10.0.0.2:7080", LayerRange(0, 2))
KV = KvLayout("bfloat16", ((2, LayerKv(3, 8, 4)),))


def cache_header(tokens: int = 5, kv: KvLayout = KV) -> CacheHeader:
    return CacheHeader(new_session(), LayerRange(0, kv.num_layers), tokens, kv)


def cut(body: bytes, *lengths: int) -> list[memoryview]:
    """Cut a body into views of these lengths, again and again."""
    views, start, turn = [], 0, 0
    while start < len(body):
        end = start + lengths[turn % len(lengths)]
        views.append(memoryview(body)[start:end])
        start, turn = end, turn + 1
    return views


async def send(place, header, views, *, client=None, caller=None, timeout_s=BOUND_S) -> None:
    made = client or HopClient()
    address = f"{place[0]}:{place[1]}"
    try:
        await asyncio.to_thread(
            made.send_cache, address, ALPHA, header, views, timeout_s=timeout_s, caller=caller
        )
    finally:
        made.close()


@pytest.mark.parametrize("secure", [False, True], ids=["plain", "tls"])
@pytest.mark.parametrize(
    ("tokens", "lengths"),
    [(1, (48,)), (7, (1, 2, 3)), (4096, (100_000,)), (30_000, (1000, 5)), (9000, (999,))],
)
async def test_a_cache_arrives_bit_for_bit_from_many_views(secure, tokens, lengths, tmp_path):
    """The last two have more views than one call of the system takes."""
    handler, header = EchoHandler(), cache_header(tokens)
    body = random.Random(tokens).randbytes(header.num_bytes)
    authority = make_authority(tmp_path) if secure else None
    client = HopClient(LinkSettings(tls=authority.client() if authority else None))
    async with serving(handler, tls=authority.server() if authority else None) as place:
        await send(place, header, cut(body, *lengths), client=client)
    (arrived,) = handler.caches
    assert arrived.header == header
    assert arrived.received == body
    assert (arrived.kept, arrived.dropped) == (True, False)


async def test_a_cache_of_no_bytes_arrives():
    handler, header = EchoHandler(), cache_header(5, KvLayout("bfloat16", ((3, None),)))
    async with serving(handler) as place:
        await send(place, header, [])
    assert handler.caches[0].kept


@pytest.mark.parametrize("vector", load_caches(), ids=str)
async def test_vectors(vector):
    handler = EchoHandler()
    async with serving(handler) as place, calling(place) as caller:
        lines = [f"{name}: {value}" for name, value in vector.headers]
        path = f"/sessions/{new_session()}/cache"
        length = f"Content-Length: {len(vector.body)}"
        head = "\r\n".join([f"PUT {path} HTTP/1.1", "Host: n", *lines, length, "", ""])
        await caller.send(head.encode() + vector.body)
        answer = await caller.read()
        assert answer.status == vector.expect["status"]
        if vector.good:
            assert handler.caches[0].received == vector.body
            assert handler.caches[0].kept
        else:
            assert handler.caches == []
            assert problem(answer.body)["field"] == vector.expect["field"]
        await expect_good(caller)


@pytest.mark.parametrize(
    ("length", "status", "says"),
    [
        ("Content-Length: 239", 400, "239 bytes; expected 240"),
        ("Content-Length: 241", 400, "241 bytes; expected 240"),
        ("Content-Length: 0", 400, "0 bytes; expected 240"),
        ("Transfer-Encoding: chunked", 411, "expected 240"),
    ],
)
async def test_another_length_is_refused_before_anything_is_taken(length, status, says):
    handler = EchoHandler()
    header = cache_header(5, KvLayout("bfloat16", ((1, LayerKv(2, 8, 4)),)))
    lines = [f"{name}: {value}" for name, value in pack_cache(header)]
    head = [f"PUT /sessions/{header.session}/cache HTTP/1.1", "Host: n", *lines, length, "", ""]
    async with serving(handler) as place, calling(place) as caller:
        await caller.send("\r\n".join(head).encode())
        answer = await caller.read()
        assert answer.status == status
        assert says in problem(answer.body)["detail"]
    assert handler.caches == []


async def test_a_cache_that_ends_early_is_dropped():
    handler, header = EchoHandler(), cache_header(1000)
    lines = [f"{name}: {value}" for name, value in pack_cache(header)]
    length = f"Content-Length: {header.num_bytes}"
    head = [f"PUT /sessions/{header.session}/cache HTTP/1.1", "Host: n", *lines, length, "", ""]
    async with serving(handler) as place:
        async with calling(place) as caller:
            await caller.send("\r\n".join(head).encode() + bytes(1000))
        async with asyncio.timeout(BOUND_S):
            while not (handler.caches and handler.caches[0].dropped):
                await asyncio.sleep(0.005)
    assert not handler.caches[0].kept


async def test_a_cache_that_comes_too_slowly_is_dropped():
    handler, header = EchoHandler(), cache_header()
    lines = [f"{name}: {value}" for name, value in pack_cache(header)]
    length = f"Content-Length: {header.num_bytes}"
    head = [f"PUT /sessions/{header.session}/cache HTTP/1.1", "Host: n", *lines, length, "", ""]
    limits = PlaneLimits(read_timeout_s=0.2)
    async with serving(handler, limits=limits) as place, calling(place) as caller:
        await caller.send("\r\n".join(head).encode())
        assert (await caller.read()).status == 408
    assert handler.caches[0].dropped


async def test_a_refusal_is_heard_while_the_cache_is_sent():
    """The node closes with most of the body unread; what it answered counts."""

    class Full(EchoHandler):
        def take_cache(self, header, caller):
            raise CacheFullError("9 tokens are free", retry_after_s=3.0)

    header = cache_header(200_000)
    async with serving(Full()) as place:
        with pytest.raises(CacheFullError, match="9 tokens are free"):
            await send(place, header, [memoryview(bytes(header.num_bytes))])


async def test_a_refusal_of_a_cache_that_came_is_heard():
    class Arriving:
        memory = (memoryview(bytearray(240)),)

        def keep(self):
            raise MeshError(Code.UNAVAILABLE, "draining by now", reason="DRAINING")

    class Handler(EchoHandler):
        def take_cache(self, header, caller):
            return Arriving()

    header = cache_header(5, KvLayout("bfloat16", ((1, LayerKv(2, 8, 4)),)))
    async with serving(Handler()) as place:
        with pytest.raises(MeshError, match="draining by now") as caught:
            await send(place, header, [memoryview(bytes(240))])
    assert caught.value.reason == "DRAINING"


async def test_sending_ends_when_the_caller_leaves():
    reached, caller = Flag(), Caller()

    class Slow(EchoHandler):
        def take_cache(self, header, asking):
            reached.set()
            caller.leave()
            return super().take_cache(header, asking)

    header = cache_header(200_000)
    async with serving(Slow()) as place:
        with pytest.raises(CallerGoneError):
            await send(place, header, [memoryview(bytes(header.num_bytes))], caller=caller)
    assert reached.is_set()


async def test_a_move_reaches_the_handler_and_its_refusal_comes_back():
    class Refusing(EchoHandler):
        def move(self, asked, caller):
            super().move(asked, caller)
            if len(self.moves) > 1:
                raise WireError("X-Meshnet-Route: not mine", field="X-Meshnet-Route")

    handler, client = Refusing(), PlaneClient()
    asked = MoveHeader(new_session(), (HOP,), 7)
    async with serving(handler) as (host, port):
        await client.move(f"{host}:{port}", ALPHA, asked, timeout_s=BOUND_S)
        with pytest.raises(WireError, match="not mine"):
            await client.move(f"{host}:{port}", ALPHA, asked, timeout_s=BOUND_S)
    assert handler.moves == [asked, asked]
    with pytest.raises(NextHopError) as caught:
        await client.move("127.0.0.1:1", ALPHA, asked, timeout_s=BOUND_S)
    assert caught.value.failed_node == ALPHA
    await client.close()


@pytest.mark.parametrize(
    ("line", "status", "says"),
    [
        ("POST /sessions/{id}/move", 400, "X-Meshnet-Route is missing"),
        ("GET /sessions/{id}/move", 405, "POST"),
        ("POST /sessions/{id}/cache", 405, "PUT"),
        ("PUT /sessions/ID/cache", 400, "UUID"),
        ("PUT /sessions/{id}/cache", 400, "X-Meshnet-Layers is missing"),
    ],
)
async def test_what_is_wrong_is_said_and_the_connection_serves_on(line, status, says):
    handler = EchoHandler()
    line = line.format(id=new_session())
    head = f"{line} HTTP/1.1\r\nHost: n\r\nContent-Length: 0\r\n\r\n"
    async with serving(handler) as place, calling(place) as caller:
        await caller.send(head.encode())
        answer = await caller.read()
        assert answer.status == status
        assert says in problem(answer.body)["detail"]
        await expect_good(caller)
    assert handler.moves == handler.caches == []
