"""What a stage accepts, and what it computes of it."""

from __future__ import annotations

import asyncio
import json
import uuid

import ml_dtypes
import numpy as np
import pytest

from meshnet.errors import Code, MeshError, PositionError, UnknownSessionError, WireError
from meshnet.grammar import Want
from meshnet.topology import Hop, LayerRange, NodeId, SessionId
from meshnet.wire import ChunkHeader
from meshnet_node.plan import plan
from tests.fakes import RecordingBackend

SESSION = SessionId("8d7f2f0a-0000-4000-8000-000000000001")
MIDDLE = RecordingBackend(LayerRange(2, 4), num_layers=6).spec
FIRST = RecordingBackend(LayerRange(0, 2), num_layers=6).spec
LAST = RecordingBackend(LayerRange(4, 6), num_layers=6).spec
NEXT = (Hop(NodeId("next"), "127.0.0.1:9", LayerRange(4, 6)),)


def hidden(*shape: int) -> np.ndarray:
    return np.zeros(shape, dtype=ml_dtypes.bfloat16)


def ids(*values: int) -> np.ndarray:
    return np.array([values], dtype=np.int32)


def header(tensor: np.ndarray, **fields) -> ChunkHeader:
    dtype = "int32" if tensor.dtype == np.int32 else "bfloat16"
    return ChunkHeader(tensor.shape, dtype, SESSION, **fields)


@pytest.mark.parametrize(
    ("spec", "tensor", "fields", "layers", "want"),
    [
        (MIDDLE, hidden(1, 3, 8), {}, "2-4", "hidden"),
        (MIDDLE, hidden(1, 3, 8), {"layers": LayerRange(2, 3)}, "2-3", "hidden"),
        (MIDDLE, hidden(1, 3, 8), {"want": Want("none")}, "2-4", "none"),
        (MIDDLE, hidden(1, 3, 8), {"route": NEXT, "want": Want("logits")}, "2-4", "hidden"),
        (MIDDLE, hidden(1, 3, 8), {"route": NEXT, "want": Want("none")}, "2-4", "hidden"),
        (FIRST, ids(0, 31), {}, "0-2", "hidden"),
        (LAST, hidden(1, 1, 8), {}, "4-6", "logits"),
        (LAST, hidden(1, 1, 8), {"want": Want("top", 5)}, "4-6", "top-5"),
        (LAST, hidden(1, 1, 8), {"want": Want("top", 500)}, "4-6", "top-32"),
        (LAST, hidden(1, 1, 8), {"layers": LayerRange(4, 5)}, "4-5", "hidden"),
    ],
)
def test_plan(spec, tensor, fields, layers, want):
    planned_layers, planned_want = plan(spec, header(tensor, **fields), tensor)
    assert (str(planned_layers), str(planned_want)) == (layers, want)


@pytest.mark.parametrize(
    ("spec", "tensor", "fields", "field", "says"),
    [
        (MIDDLE, hidden(1, 1, 8), {"layers": LayerRange(1, 4)}, "X-Meshnet-Layers", "2-4"),
        (MIDDLE, hidden(1, 1, 9), {}, "X-Meshnet-Shape", "1,SEQ,8"),
        (MIDDLE, hidden(2, 1, 8), {}, "X-Meshnet-Shape", "1,SEQ,8"),
        (MIDDLE, hidden(1, 8), {}, "X-Meshnet-Shape", "1,SEQ,8"),
        (MIDDLE, ids(1), {}, "X-Meshnet-Dtype", "bfloat16"),
        (FIRST, ids(32), {}, "body", "0 to 31"),
        (FIRST, ids(-1), {}, "body", "0 to 31"),
        (FIRST, np.zeros((2, 2), np.int32), {}, "X-Meshnet-Shape", "1,SEQ"),
        (FIRST, np.zeros(2, np.int32), {}, "X-Meshnet-Shape", "1,SEQ"),
        (MIDDLE, hidden(1, 1, 8), {"want": Want("logits")}, "X-Meshnet-Want", "hidden or none"),
        (LAST, hidden(1, 1, 8), {"route": NEXT}, "X-Meshnet-Route", "expected 6"),
        (
            LAST,
            hidden(1, 1, 8),
            {"want": Want("top", 1), "layers": LayerRange(4, 5)},
            "X-Meshnet-Want",
            "hidden or none",
        ),
    ],
)
def test_plan_refuses(spec, tensor, fields, field, says):
    with pytest.raises(WireError) as caught:
        plan(spec, header(tensor, **fields), tensor)
    assert caught.value.field == field
    assert says in caught.value.message


def chunk(session: SessionId, position: int | None, tokens: int = 2, **fields) -> ChunkHeader:
    return ChunkHeader((1, tokens, 8), "bfloat16", session, position=position, **fields)


async def send(client, hop: Hop, head: ChunkHeader):
    return await client.forward(hop.address, hop.node, head, hidden(*head.shape), timeout_s=10.0)


async def test_a_repeated_chunk_gives_the_same_answer_and_length(start_node, client):
    hop, node, backend = await start_node("only", 0, 1)
    session = SessionId(str(uuid.uuid4()))
    for position in (0, 2, 2, 2, 4):
        answer = await send(client, hop, chunk(session, position, want=Want("hidden")))
        assert answer.header.shape == (1, 2, 8)
    assert [call[0] for call in backend.calls] == [0, 2, 2, 2, 4]
    assert node.stage.sessions.reserved_tokens == 6


async def test_a_gap_says_what_was_expected_and_the_session_goes_on(start_node, client):
    hop, _, backend = await start_node("only", 0, 1)
    session = SessionId(str(uuid.uuid4()))
    await send(client, hop, chunk(session, 0))
    with pytest.raises(PositionError) as caught:
        await send(client, hop, chunk(session, 7))
    assert caught.value.expected == 2
    await send(client, hop, chunk(session, 2))
    assert [call[0] for call in backend.calls] == [0, 2]


async def test_an_unknown_session_is_404(start_node, client):
    hop, _, _ = await start_node("only", 0, 1)
    with pytest.raises(UnknownSessionError):
        await send(client, hop, chunk(SessionId(str(uuid.uuid4())), 7))


async def test_a_refused_chunk_leaves_the_cache_as_it_was(start_node, client):
    """A lower position must not cut the cache before the chunk is known to be good."""
    hop, _, backend = await start_node("only", 0, 1)
    session = SessionId(str(uuid.uuid4()))
    await send(client, hop, chunk(session, 0))
    await send(client, hop, chunk(session, 2))
    with pytest.raises(WireError):
        await send(client, hop, chunk(session, 0, want=Want("hidden"), layers=LayerRange(0, 9)))
    await send(client, hop, chunk(session, 4))
    assert [call[0] for call in backend.calls] == [0, 2, 4]


async def test_a_backend_that_breaks_is_a_500_and_the_node_lives_on(start_node, client):
    hop, _, backend = await start_node("only", 0, 1)
    session = SessionId(str(uuid.uuid4()))
    await send(client, hop, chunk(session, 0))
    backend.fail_next = ZeroDivisionError("secret detail")
    with pytest.raises(MeshError) as caught:
        await send(client, hop, chunk(session, 2))
    assert caught.value.code is Code.INTERNAL
    assert "secret" not in caught.value.message
    await send(client, hop, chunk(session, 2))
    await send(client, hop, chunk(SessionId(str(uuid.uuid4())), 0))


async def test_a_loading_node_answers_503_and_is_not_healthy(start_node, client):
    hop, node, _ = await start_node("only", 0, 1, load=False)
    with pytest.raises(MeshError) as caught:
        await send(client, hop, chunk(SessionId(str(uuid.uuid4())), 0))
    assert caught.value.code is Code.UNAVAILABLE
    assert caught.value.retry_after_s
    status, body = await client.get(hop.address, "/healthz", timeout_s=5.0)
    assert (status, json.loads(body)["status"]) == (503, "loading")
    await node.load()
    status, body = await client.get(hop.address, "/healthz", timeout_s=5.0)
    assert (status, json.loads(body)["status"]) == (200, "ready")


async def test_health_means_that_a_forward_ran(start_node, client, monkeypatch):
    hop, _, backend = await start_node("only", 0, 1)
    monkeypatch.setattr("meshnet_node.health._AGE_S", 0.0)
    backend.fail_next = ZeroDivisionError("broken")
    status, body = await client.get(hop.address, "/healthz", timeout_s=5.0)
    assert (status, json.loads(body)["status"]) == (503, "failing")
    status, _ = await client.get(hop.address, "/healthz", timeout_s=5.0)
    assert status == 200


async def test_metrics_count_what_was_computed(start_node, client):
    hop, _, _ = await start_node("only", 0, 1)
    session = SessionId(str(uuid.uuid4()))
    await send(client, hop, chunk(session, 0, tokens=3, max_tokens=10))
    status, body = await client.get(hop.address, "/metrics", timeout_s=5.0)
    lines = body.decode().splitlines()
    assert status == 200
    assert "meshnet_chunks_total 1.0" in lines
    assert "meshnet_tokens_total 3.0" in lines
    assert "meshnet_sessions 1.0" in lines
    assert "meshnet_cache_tokens_reserved 10.0" in lines


async def test_metrics_count_what_was_sent_on(start_node, client):
    last, _, _ = await start_node("last", 1, 2, hidden_size=1024)
    first, node, _ = await start_node("first", 0, 1, num_layers=2, hidden_size=1024)
    head = ChunkHeader((1, 64, 1024), "bfloat16", SessionId(str(uuid.uuid4())), route=(last,))
    noise = np.random.default_rng(0).integers(0, 1 << 15, head.shape, np.uint16)
    tensor = noise.view(ml_dtypes.bfloat16)
    await client.forward(first.address, first.node, head, tensor, timeout_s=10.0)
    status, body = await client.get(first.address, "/metrics", timeout_s=5.0)
    counts = [line for line in body.decode().splitlines() if line.startswith("meshnet_bodies_t")]
    assert status == 200
    assert sum(float(line.split()[-1]) for line in counts if "_total{" in line) == 1 + 64 * 2048
    assert list(node.bandwidths()) == [last.address]


async def test_idle_sessions_end_at_each_node_by_itself(start_node, client):
    second, second_node, _ = await start_node("second", 1, 2)
    first, first_node, _ = await start_node("first", 0, 1, num_layers=2, idle_ttl_s=0.0)
    session = SessionId(str(uuid.uuid4()))
    await send(client, first, chunk(session, 0, route=(second,)))
    assert len(second_node.stage.sessions) == 1
    await asyncio.to_thread(first_node.stage.release_idle)
    assert len(first_node.stage.sessions) == 0
    assert len(second_node.stage.sessions) == 1
