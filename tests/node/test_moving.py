"""A session's KV cache on its way from one node to others, with small real models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import JambaConfig

from meshnet.cache_wire import CacheHeader, MoveHeader, unpack_cache
from meshnet.chunk import Chunk
from meshnet.compression import CompressionPolicies
from meshnet.errors import (
    CacheFullError,
    Code,
    MeshError,
    NextHopError,
    PositionError,
    UnknownSessionError,
    WireError,
)
from meshnet.grammar import Want
from meshnet.kv import KvLayout
from meshnet.operations import OwnerId
from meshnet.plane.caller import Caller
from meshnet.plane.hop_client import HopClient
from meshnet.topology import Hop, LayerRange, NodeId, SessionId
from meshnet.wire import ChunkHeader
from meshnet_node.app import Node
from meshnet_node.budget import SessionLimits
from meshnet_node.hf.exact import save_random_model
from meshnet_node.hf.layers import GrowingLayer
from meshnet_node.hf.shard import TransformersShard
from meshnet_node.hf.tiny import tiny_config
from meshnet_node.settings import NodeSettings
from tests.node.tiny import TINY, VOCAB, save_tiny
from tests.plane.doubles import new_session
from tests.vectors.load import load_caches

BOUND_S = 10.0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


def shard(directory: Path, start: int, end: int, **options: Any) -> TransformersShard:
    options = {"dtype": "float32", "digest": "d1", **options}
    return TransformersShard(directory, LayerRange(start, end), model="t", threads=1, **options)


def ids(count: int, start: int = 5) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.int32)[None] % VOCAB


@pytest.fixture
async def start(directory) -> AsyncIterator[Any]:
    """Start nodes of the model: ``start("a", 0, 5)`` gives the hop and the node."""
    nodes: list[Node] = []

    async def run(name: str, first: int, end: int, backend: Any = None, **limits: float) -> Any:
        made = backend or shard(directory, first, end)
        settings = NodeSettings(
            NodeId(name), port=0, grace_s=1.0, hop_timeout_s=5.0, sessions=SessionLimits(**limits)
        )
        node = Node(settings, lambda: made, CompressionPolicies())
        nodes.append(node)
        address = await node.listen()
        await node.load()
        return Hop(NodeId(name), address, LayerRange(first, end)), node

    yield run
    for node in nodes:
        await node.close()


async def compute(
    node: Node, session: SessionId, position: int, tokens: np.ndarray, **fields: Any
) -> Any:
    """Run a chunk in a node, without a socket."""
    header = ChunkHeader(tokens.shape, "int32", session, position=position, **fields)
    answer = await asyncio.to_thread(node.forward, Chunk(header, tokens), Caller())
    return answer.tensor


async def move(node: Node, session: SessionId, *hops: Hop, position: int | None = None) -> None:
    await asyncio.to_thread(node.move, MoveHeader(session, hops, position), Caller())


def held(*nodes: Node) -> list[tuple[int, int]]:
    return [(len(n.stage.sessions), n.stage.sessions.reserved_tokens) for n in nodes]


async def eventually_held(expected: list[tuple[int, int]], *nodes: Node) -> None:
    async with asyncio.timeout(BOUND_S):
        while held(*nodes) != expected:
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("vector", [v for v in load_caches() if v.good], ids=str)
def test_the_bytes_of_vectors_come_to_lie_where_they_belong(vector) -> None:
    header = unpack_cache(new_session(), vector.headers)
    layers, rest = {}, memoryview(vector.body)
    for index, kept in enumerate(header.kv.layers(), start=header.layers.start):
        if kept is None:
            continue
        layer = layers[index] = GrowingLayer()
        layer.make_room(kept, getattr(torch, header.kv.dtype), header.tokens)
        for view in layer.views(header.tokens):
            view[:], rest = rest[: len(view)], rest[len(view) :]
    assert not rest
    for row in vector.expect["rows"]:
        states = getattr(layers[row["layer"]], row["of"])
        bits = states[0, row["head"], row["token"]].view(torch.uint8).numpy().tobytes()
        assert bits.hex() == row["hex"], row


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", TINY)
def test_a_cache_of_any_architecture_goes_on_elsewhere_bit_for_bit(name, dtype, tmp_path) -> None:
    """Past the window of those that slide; cut back afterwards; with a part of the layers."""
    directory = save_tiny(name, tmp_path)
    one, other = (shard(directory, 0, 5, dtype=dtype) for _ in range(2))
    layers, want = LayerRange(0, 4), Want("hidden")
    cache, moved = one.open_cache(), other.open_cache()
    for tokens in (ids(16), ids(14, 60)):
        one.forward(cache, tokens, layers=layers, want=want)
    assert (one.kv, cache.layers, moved.layers) == (other.kv, layers, None)
    assert one.kv.dtype == dtype
    assert one.kv.bytes_per_token == one.spec.cache_bytes_per_token
    views = cache.view_kv(layers, 30)
    room = moved.make_room(layers, other.kv.cut(0, 4), 30)
    assert [len(view) for view in views] == [len(view) for view in room]
    assert sum(map(len, views)) == 30 * one.kv.cut(0, 4).bytes_per_token
    for source, target in zip(views, room, strict=True):
        target[:] = source
    assert (moved.length, moved.layers) == (30, layers)
    for count in (1, 1, 230, 1):  # past the block that the buffers begin with
        expected = one.forward(cache, ids(count, 9), layers=layers, want=want)
        given = other.forward(moved, ids(count, 9), layers=layers, want=want)
        assert np.array_equal(expected.view(np.uint16), given.view(np.uint16)), count
    for each in (cache, moved):
        each.truncate(21)
    expected = one.forward(cache, ids(5), layers=layers, want=want)
    given = other.forward(moved, ids(5), layers=layers, want=want)
    assert np.array_equal(expected.view(np.uint16), given.view(np.uint16))


def test_views_are_the_caches_own_memory(directory) -> None:
    backend = shard(directory, 0, 5)
    cache = backend.open_cache()
    backend.forward(cache, ids(3), layers=LayerRange(0, 5), want=Want("hidden"))
    first = cache.view_kv(LayerRange(0, 5), 3)[0]
    first[:4] = np.float32(7.5).tobytes()
    assert cache._layers[0].keys[0, 0, 0, 0] == 7.5


async def test_a_session_goes_on_at_another_node(start):
    (_, here), (hop, there) = await start("here", 0, 5), await start("there", 0, 5)
    session, undisturbed = new_session(), new_session()
    for each in (session, undisturbed):
        await compute(here, each, 0, ids(40), max_tokens=90)
    owner = OwnerId(new_session())
    here.stage.sessions.reserve(session, 90, owner)
    here.stage.sessions._sessions[session].epoch = 3
    await move(here, session, hop)
    assert held(here, there) == [(1, 90), (1, 90)]
    assert there.stage.sessions.owned_by(owner, "") == [session]
    moved = here.stage.moves.counts, there.stage.moves.counts
    size = 40 * here.stage.backend.kv.bytes_per_token
    assert [(c.sent, c.sent_bytes, c.taken, c.taken_bytes) for c in moved] == [
        (1, size, 0, 0),
        (0, 0, 1, size),
    ]
    with pytest.raises(MeshError) as caught:  # of a route that was left before
        await compute(there, session, 40, ids(1), epoch=2)
    assert caught.value.reason == "EPOCH_STALE"
    expected = await compute(here, undisturbed, 40, ids(1))
    given = await compute(there, session, 40, ids(1), epoch=3)
    assert np.array_equal(expected, given)
    assert there.stage.num_tokens == 1, "the cache was shipped, not recomputed"
    with pytest.raises(UnknownSessionError):
        await compute(here, session, 40, ids(1))


async def test_two_nodes_take_a_session_over(start):
    _, here = await start("here", 0, 5)
    (first, one), (second, two) = await start("one", 0, 2), await start("two", 1, 5)
    second = replace(second, layers=LayerRange(2, 5))
    session, undisturbed = new_session(), new_session()
    for each in (session, undisturbed):
        await compute(here, each, 0, ids(40))
    await move(here, session, first, second)
    expected = await compute(here, undisturbed, 40, ids(1))
    given = await compute(one, session, 40, ids(1), layers=LayerRange(0, 2), route=(second,))
    # The hidden states between the two were rounded to bfloat16.
    assert np.allclose(expected, given, atol=0.3)
    assert (one.stage.num_tokens, two.stage.num_tokens) == (1, 1)


async def test_only_the_tokens_asked_are_moved(start):
    (_, here), (hop, there) = await start("here", 0, 5), await start("there", 0, 5)
    session, undisturbed = new_session(), new_session()
    await compute(here, session, 0, ids(40))
    await compute(here, undisturbed, 0, ids(40))
    await move(here, session, hop, position=33)
    expected = await compute(here, undisturbed, 33, ids(1))
    assert np.array_equal(expected, await compute(there, session, 33, ids(1)))


async def test_other_sessions_go_on_while_one_is_moved(start, monkeypatch):
    (_, here), (hop, _) = await start("here", 0, 5), await start("there", 0, 5)
    session, other = new_session(), new_session()
    await compute(here, session, 0, ids(40))
    sending, go = threading.Event(), threading.Event()
    send = HopClient.send_cache

    def wait_and_send(*arguments: Any, **options: Any) -> None:
        sending.set()
        assert go.wait(BOUND_S)
        send(*arguments, **options)

    monkeypatch.setattr(HopClient, "send_cache", wait_and_send)
    moving = asyncio.create_task(move(here, session, hop))
    assert await asyncio.to_thread(sending.wait, BOUND_S)
    await compute(here, other, 0, ids(4))
    await compute(here, other, 4, ids(1))
    late = asyncio.create_task(compute(here, session, 40, ids(1)))
    assert not moving.done()
    go.set()
    await moving
    with pytest.raises(MeshError) as caught:  # a chunk of the session that came meanwhile
        await late
    assert caught.value.reason in ("SESSION_RELEASED", "SESSION_UNKNOWN")


async def test_a_repeated_move_replaces_what_came_first(start):
    """The first answer was lost, say, and the sender still has its cache."""
    (_, here), (hop, there) = await start("here", 0, 5), await start("there", 0, 5)
    session = new_session()
    await compute(here, session, 0, ids(40))
    cache = here.stage.sessions._sessions[session].cache
    header = CacheHeader(session, LayerRange(0, 5), 40, here.stage.backend.kv, 60, "d1")
    client = HopClient()
    for _ in range(2):
        views = cache.view_kv(header.layers, 40)
        await asyncio.to_thread(
            client.send_cache, hop.address, hop.node, header, views, timeout_s=BOUND_S
        )
        assert held(there) == [(1, 60)]
    client.close()


async def refused(start, node: Node, session: SessionId, *hops: Hop, position=None) -> MeshError:
    """Move and give the refusal, after which the session goes on where it was."""
    before = held(node)
    with pytest.raises(MeshError) as caught:
        await move(node, session, *hops, position=position)
    assert held(node) == before
    await compute(node, session, 40, ids(1))
    return caught.value


async def test_a_move_that_cannot_be_changes_nothing(start, directory):
    _, here = await start("here", 0, 5)
    session = new_session()
    await compute(here, session, 0, ids(40))
    full, full_node = await start("full", 0, 5, cache_tokens=39)
    typed, _ = await start("typed", 0, 5, shard(directory, 0, 5, dtype="bfloat16"))
    other, _ = await start("other", 0, 5, shard(directory, 0, 5, digest="d2"))
    short, _ = await start("short", 0, 4)
    whole = replace(short, layers=LayerRange(0, 5))
    away = Hop(NodeId("away"), "127.0.0.1:1", LayerRange(0, 5))
    first, first_node = await start("first", 0, 3)
    rest = replace(away, layers=LayerRange(3, 5))

    assert isinstance(await refused(start, here, session, full), CacheFullError)
    assert (await refused(start, here, session, typed)).field == "X-Meshnet-Dtype"
    assert (await refused(start, here, session, other)).field == "X-Meshnet-Digest"
    assert (await refused(start, here, session, short)).field == "X-Meshnet-Route"
    assert (await refused(start, here, session, whole)).field == "X-Meshnet-Layers"
    gone = await refused(start, here, session, away)
    assert isinstance(gone, NextHopError)
    assert gone.failed_node == "away"
    assert isinstance(await refused(start, here, session, first, rest), NextHopError)
    past = await refused(start, here, session, full, position=42)
    assert isinstance(past, PositionError)
    await eventually_held([(0, 0)] * 2, full_node, first_node)
    with pytest.raises(UnknownSessionError):
        await move(here, new_session(), full)


async def test_a_draining_node_takes_no_cache(start):
    (_, here), (hop, there) = await start("here", 0, 5), await start("there", 0, 5)
    session = new_session()
    await compute(here, session, 0, ids(40))
    there.stage.sessions.draining = True
    assert (await refused(start, here, session, hop)).reason == "DRAINING"


async def test_a_node_that_serves_other_layers_of_the_session_keeps_them(start):
    """It would lose them if a hop of the same route were moved to it."""
    (_, here), (hop, both) = await start("here", 0, 2), await start("both", 0, 5)
    session, rest = new_session(), replace(hop, layers=LayerRange(2, 5))
    await compute(here, session, 0, ids(40), route=(rest,))
    taken = replace(hop, layers=LayerRange(0, 2))
    with pytest.raises(MeshError) as caught:
        await move(here, session, taken)
    assert caught.value.reason == "SESSION_HELD"
    await compute(here, session, 40, ids(1), route=(rest,))
    assert [len(node.stage.sessions) for node in (here, both)] == [1, 1]


async def test_a_session_without_tokens_has_nothing_to_move(start):
    (_, here), (hop, _) = await start("here", 0, 5), await start("there", 0, 5)
    session = new_session()
    here.stage.sessions.reserve(session, 30)
    with pytest.raises(MeshError) as caught:
        await move(here, session, hop)
    assert caught.value.reason == "CACHE_EMPTY"


async def test_a_recurrent_model_says_why_it_cannot_be_moved(start, tmp_path):
    directory = save_random_model(tiny_config(JambaConfig), tmp_path)
    backend = shard(directory, 0, 3)
    assert backend.kv is None
    hop, node = await start("jamba", 0, 3, backend)
    session = new_session()
    await compute(node, session, 0, ids(4))
    with pytest.raises(MeshError, match="not keys and values alone") as caught:
        await move(node, session, hop)
    assert (caught.value.code, caught.value.reason) == (
        Code.FAILED_PRECONDITION,
        "CACHE_NOT_MOVABLE",
    )
    header = CacheHeader(new_session(), LayerRange(0, 1), 4, KvLayout("float32", ((1, None),)))
    with pytest.raises(MeshError) as caught:
        node.take_cache(header, Caller())
    assert caught.value.reason == "CACHE_NOT_MOVABLE"
    await compute(node, session, 4, ids(1))


async def test_another_geometry_is_refused_before_anything_is_reserved(start):
    _, node = await start("node", 0, 5)
    kv = node.stage.backend.kv
    kept = next(kv.layers())
    for other in (replace(kept, heads=kept.heads + 1), replace(kept, key_width=1), None):
        header = CacheHeader(new_session(), LayerRange(0, 5), 4, KvLayout(kv.dtype, ((5, other),)))
        with pytest.raises(WireError) as caught:
            node.take_cache(header, Caller())
        assert caught.value.field == "X-Meshnet-Kv"
    assert held(node) == [(0, 0)]
    claimed = CacheHeader(new_session(), LayerRange(0, 5), 10**9, kv)
    with pytest.raises(MeshError) as refused:
        node.take_cache(claimed, Caller())
    assert refused.value.reason == "SESSION_TOO_LONG"
    assert held(node) == [(0, 0)]
