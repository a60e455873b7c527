"""A lost cache is computed again from the journal of the node before it, over real sockets."""

from __future__ import annotations

import asyncio

import ml_dtypes
import numpy as np
import pytest

from meshnet.errors import (
    CacheFullError,
    MeshError,
    NextHopError,
    PositionError,
    UnknownSessionError,
    WireError,
)
from meshnet.grammar import Want
from meshnet.operations import Rebuild, RebuildMode
from meshnet.topology import Hop, LayerRange, NodeId
from meshnet.wire import ChunkHeader
from tests.node.test_pipeline_of_stubs import stub_activation
from tests.plane.doubles import misbehaving, new_session

BOUND_S = 20.0
STEPS = [300, 1, 1, 1]
"""Tokens of a prompt in chunks of 128, and of the steps that follow it."""
CHUNKS = [128, 128, 44, 1, 1, 1]
END = sum(STEPS)


async def drive(client, route, session, tensor, *, start: int = 0, epoch: int = 0) -> np.ndarray:
    """Send a session's tensor in `CHUNKS` from `start` on; gives what the last hop answered."""
    first, answers, position = route[0], [], 0
    for size in CHUNKS:
        piece = tensor[:, position : position + size]
        position += size
        if position <= start:
            continue
        header = ChunkHeader(
            piece.shape,
            "bfloat16",
            session,
            position=position - size,
            layers=first.layers,
            route=route[1:],
            want=Want("hidden"),
            epoch=epoch,
        )
        answer = await client.forward(first.address, first.node, header, piece, timeout_s=BOUND_S)
        answers.append(answer.tensor)
    return np.concatenate(answers, axis=1)


@pytest.fixture
async def broken(start_node, client):
    """A session over three nodes, of which the middle one is gone now: (hops, nodes, session)."""
    made = [await start_node(f"node{i}", i, i + 1, num_layers=3) for i in range(3)]
    route, session = tuple(hop for hop, _, _ in made), new_session()
    tensor = stub_activation(END)
    await drive(client, route, session, tensor)
    await made[1][1].close()
    return route, [node for _, node, _ in made], session, tensor, [b for *_, b in made]


async def rebuild(client, hop: Hop, session, position: int, *route: Hop, **fields) -> None:
    asked = Rebuild(session, position, route, **fields)
    await client.rebuild(hop.address, hop.node, asked, timeout_s=BOUND_S)


@pytest.mark.parametrize(
    ("mode", "sizes"), [(RebuildMode.EXACT, CHUNKS), (RebuildMode.FAST, [128, 128, 47])]
)
async def test_the_replacement_computes_the_session_and_the_others_one_step(
    broken, start_node, client, mode, sizes
):
    route, nodes, session, tensor, backends = broken
    spare, spare_node, spare_backend = await start_node("spare", 1, 2, num_layers=3)
    before = [list(backends[0].calls), list(backends[2].calls)]
    position = END - 1

    await rebuild(client, route[0], session, END, spare, mode=mode, max_tokens=400, epoch=1)

    assert [call[1] for call in spare_backend.calls] == sizes
    assert {call[2:] for call in spare_backend.calls} == {("1-2", "hidden")}
    assert [list(backends[0].calls), list(backends[2].calls)] == before
    assert spare_node.stage.sessions.reserved_tokens == 400
    assert nodes[0].stage.num_rebuilt_tokens == END
    new_route = (route[0], spare, route[2])
    answer = await drive(client, new_route, session, tensor, start=position, epoch=1)
    assert answer.tobytes() == tensor[:, position:].tobytes()
    for backend, known in zip((backends[0], backends[2]), before, strict=True):
        assert [call[:2] for call in backend.calls[len(known) :]] == [(position, 1)]

    await client.release(route[0].address, session)
    for node in (nodes[0], spare_node, nodes[2]):
        assert len(node.stage.sessions) == 0
        assert node.stage.sessions.journals.memory_bytes == 0


async def test_what_a_replacement_gave_out_is_in_its_journal_too(broken, start_node, client):
    """The second failure, of the last hop, needs the journal of the first one's replacement."""
    route, _, session, tensor, _ = broken
    spare, spare_node, _ = await start_node("spare", 1, 2, num_layers=3)
    last, _, last_backend = await start_node("last", 2, 3, num_layers=3)
    await rebuild(client, route[0], session, END, spare)
    assert spare_node.stage.sessions._sessions[session].journal.covers(END)
    await rebuild(client, spare, session, END, last)
    assert sum(call[1] for call in last_backend.calls) == END
    assert {call[3] for call in last_backend.calls} == {"none"}
    answer = await drive(client, (route[0], spare, last), session, tensor, start=END - 1)
    assert answer.tobytes() == tensor[:, END - 1 :].tobytes()


async def test_two_replacements_in_a_row_are_fed_as_one(broken, start_node, client):
    route, _, session, tensor, _ = broken
    await broken[1][2].close()
    made = [await start_node(f"spare{i}", i, i + 1, num_layers=3) for i in (1, 2)]
    spares = tuple(hop for hop, _, _ in made)
    await rebuild(client, route[0], session, END, *spares, mode=RebuildMode.EXACT)
    assert [[call[1] for call in b.calls] for *_, b in made] == [CHUNKS] * 2
    answer = await drive(client, (route[0], *spares), session, tensor, start=END - 1)
    assert answer.tobytes() == tensor[:, END - 1 :].tobytes()


async def test_what_the_journal_has_on_disk_is_fed_too(broken, start_node, client):
    route, nodes, session, _, _ = broken
    journals = nodes[0].stage.sessions.journals
    journal = nodes[0].stage.sessions._sessions[session].journal
    journals._low_bytes = 0
    journals.high_bytes = 0
    with journals.lock:
        journals.wake()
    async with asyncio.timeout(BOUND_S):
        while journal.memory_bytes:
            await asyncio.sleep(0.005)
    spare, _, spare_backend = await start_node("spare", 1, 2, num_layers=3)
    fed: list[bytes] = []
    forward = spare_backend.forward

    def keep(cache, tensor, **options):
        fed.append(tensor.tobytes())
        return forward(cache, tensor, **options)

    spare_backend.forward = keep
    await rebuild(client, route[0], session, END, spare, mode=RebuildMode.EXACT)
    assert b"".join(fed) == broken[3].tobytes()


async def test_a_chunk_of_the_route_before_is_refused(broken, start_node, client):
    route, _, session, tensor, _ = broken
    spare, _, _ = await start_node("spare", 1, 2, num_layers=3)
    await rebuild(client, route[0], session, END, spare, epoch=2)
    for epoch in (0, 1):
        header = ChunkHeader((1, 1, 8), "bfloat16", session, position=END, epoch=epoch)
        with pytest.raises(MeshError) as caught:
            await client.forward(spare.address, spare.node, header, tensor[:, :1], timeout_s=5.0)
        assert caught.value.reason == "EPOCH_STALE"
    header = ChunkHeader((1, 1, 8), "bfloat16", session, position=END, epoch=2)
    await client.forward(spare.address, spare.node, header, tensor[:, :1], timeout_s=5.0)


async def test_a_lost_journal_says_so(broken, start_node, client):
    route, nodes, session, _, _ = broken
    spare, _, spare_backend = await start_node("spare", 1, 2, num_layers=3)
    journals = nodes[0].stage.sessions.journals
    journals.drop(nodes[0].stage.sessions._sessions[session].journal, "a test says so")
    with pytest.raises(MeshError) as caught:
        await rebuild(client, route[0], session, END, spare)
    assert (caught.value.reason, caught.value.code.http_status) == ("JOURNAL_LOST", 409)
    assert spare_backend.calls == []


async def test_what_cannot_be_fed_is_refused(broken, start_node, client):
    route, _, session, _, _ = broken
    spare, _, spare_backend = await start_node("spare", 1, 2, num_layers=3)
    with pytest.raises(PositionError):
        await rebuild(client, route[0], session, END + 1, spare)
    with pytest.raises(UnknownSessionError):
        await rebuild(client, route[0], new_session(), END, spare)
    with pytest.raises(WireError) as caught:
        await rebuild(
            client, route[0], session, END, Hop(spare.node, spare.address, LayerRange(2, 3))
        )
    assert caught.value.field == "X-Meshnet-Route"
    assert spare_backend.calls == []


async def test_a_replacement_that_fails_is_named(broken, start_node, client):
    route, _, session, _, _ = broken
    gone = Hop(NodeId("gone"), "127.0.0.1:1", LayerRange(1, 2))
    with pytest.raises(NextHopError) as caught:
        await rebuild(client, route[0], session, END, gone)
    assert caught.value.failed_node == "gone"
    full, _, _ = await start_node("full", 1, 2, num_layers=3, cache_tokens=END - 1)
    with pytest.raises(CacheFullError):
        await rebuild(client, route[0], session, END, full, max_tokens=END)
    spare, _, _ = await start_node("spare", 1, 2, num_layers=3)
    await rebuild(client, route[0], session, END, spare)


async def test_a_caller_that_leaves_ends_the_feeding(broken, client):
    route, nodes, session, _, _ = broken
    asked, ended = asyncio.Event(), asyncio.Event()

    async def silent(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await reader.read()
        ended.set()

    async with misbehaving(silent) as address:
        hung = Hop(NodeId("hung"), address, LayerRange(1, 2))
        request = asyncio.create_task(rebuild(client, route[0], session, END, hung))
        async with asyncio.timeout(BOUND_S):
            await asked.wait()
            request.cancel()
            await ended.wait()
            while nodes[0].stage.sessions._sessions[session].busy:
                await asyncio.sleep(0.005)


async def test_a_session_released_at_one_node_lives_on_at_the_others(broken, client):
    route, nodes, session, _, _ = broken
    await client.release(route[0].address, session, alone=True)
    assert [len(nodes[i].stage.sessions) for i in (0, 2)] == [0, 1]


async def test_only_what_wants_nothing_is_kept_without_a_next_hop(start_node, client):
    hop, _, backend = await start_node("only", 1, 2, num_layers=3)
    header = ChunkHeader((1, 2, 8), "bfloat16", new_session(), want=Want("hidden"), journal=True)
    tensor = np.zeros((1, 2, 8), ml_dtypes.bfloat16)
    with pytest.raises(WireError) as caught:
        await client.forward(hop.address, hop.node, header, tensor, timeout_s=5.0)
    assert caught.value.field == "X-Meshnet-Want"
    answer = await client.forward(
        hop.address, hop.node, header._replace(want=Want("none")), tensor, timeout_s=5.0
    )
    assert answer.tensor is None
    assert backend.calls == [(0, 2, "1-2", "hidden")]
