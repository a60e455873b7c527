"""A gateway's pipeline through two stub nodes over real sockets."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from meshnet.errors import MeshError, NextHopError, WireError
from meshnet.grammar import Want
from meshnet.timing import parse_timings
from meshnet.topology import Hop, LayerRange, NodeId
from meshnet_gateway.cutting import join_answers
from meshnet_gateway.pipeline import PipelineSettings, RoutePipeline
from meshnet_node.stub import _make_stub_binary_activation

HIDDEN = Want("hidden")


def stub_activation(tokens: int, hidden: int = 8) -> np.ndarray:
    """View a stub body and make each position different."""
    shape = (1, tokens, hidden)
    body = bytearray(_make_stub_binary_activation(shape, "bfloat16"))
    tensor = np.frombuffer(body, dtype=ml_dtypes.bfloat16).reshape(shape)
    tensor[0, :, 0] = np.arange(tokens) % 256
    return tensor


async def test_512_tokens_go_through_two_nodes_as_4_chunks_of_128(start_node, client):
    first, _, first_backend = await start_node("first", 0, 1, num_layers=2)
    second, _, second_backend = await start_node("second", 1, 2)
    pipeline = RoutePipeline(client, (first, second), PipelineSettings(chunk_tokens=128))
    sent = stub_activation(512)

    answers = await pipeline.forward(sent, HIDDEN)

    assert len(answers) == 4
    for index, answer in enumerate(answers):
        header = answer.header
        assert header.shape == (1, 128, 8)
        assert header.dtype == "bfloat16"
        assert header.session == pipeline.session
        assert (header.chunk_index, header.chunk_total) == (index, 4)
        assert header.encoding is None
        assert [timing.node for timing in parse_timings(header.server_timing)] == [
            "first",
            "second",
        ]
    assert join_answers(answers).tobytes() == sent.tobytes()
    expected = [(position, 128, "0-1", "hidden") for position in (0, 128, 256, 384)]
    assert first_backend.calls == expected
    assert second_backend.calls == [(p, n, "1-2", want) for p, n, _, want in expected]
    await pipeline.close()


@pytest.mark.parametrize(
    ("tokens", "sizes"),
    [(1, [1]), (127, [127]), (128, [128]), (129, [128, 1]), (300, [128, 128, 44])],
)
async def test_chunks_end_at_token_positions(start_node, client, tokens, sizes):
    hop, _, backend = await start_node("only", 0, 1)
    pipeline = RoutePipeline(client, (hop,), PipelineSettings(chunk_tokens=128))
    answers = await pipeline.forward(stub_activation(tokens), HIDDEN)
    assert [answer.header.shape[1] for answer in answers] == sizes
    assert [call[1] for call in backend.calls] == sizes
    await pipeline.close()


async def test_compressed_and_raw_prefill_give_the_same_bytes(start_node, client):
    """128 x 1024 zeros are compressed on the way (256 KiB), random bits are not."""
    hop, _, _ = await start_node("only", 0, 1, hidden_size=1024)
    random = np.random.default_rng(7)
    bits = random.integers(0, 1 << 16, (1, 128, 1024), dtype=np.uint16)
    for tensor, compressed in [
        (np.zeros((1, 128, 1024), ml_dtypes.bfloat16), True),
        (bits.view(ml_dtypes.bfloat16), False),
    ]:
        pipeline = RoutePipeline(client, (hop,), PipelineSettings())
        answer = (await pipeline.forward(tensor, HIDDEN))[0]
        assert answer.tensor.tobytes() == tensor.tobytes()
        assert (
            parse_timings(answer.header.server_timing)[0].in_bytes < tensor.nbytes
        ) == compressed
        await pipeline.close()


async def test_a_release_frees_the_session_on_every_node(start_node, client):
    first, first_node, _ = await start_node("first", 0, 1, num_layers=2)
    second, second_node, _ = await start_node("second", 1, 2)
    pipeline = RoutePipeline(client, (first, second), PipelineSettings(), max_tokens=500)
    await pipeline.forward(stub_activation(3), HIDDEN)
    tables = [node.stage.sessions for node in (first_node, second_node)]
    assert [(len(table), table.reserved_tokens) for table in tables] == [(1, 500), (1, 500)]
    await pipeline.close()
    assert [(len(table), table.reserved_tokens) for table in tables] == [(0, 0), (0, 0)]


async def test_a_full_cache_downstream_is_the_callers_429(start_node, client):
    first, _, _ = await start_node("first", 0, 1, num_layers=2)
    second, _, _ = await start_node("second", 1, 2, cache_tokens=10)
    pipeline = RoutePipeline(client, (first, second), PipelineSettings(), max_tokens=11)
    with pytest.raises(MeshError) as caught:
        await pipeline.forward(stub_activation(3), HIDDEN)
    assert caught.value.code.http_status == 429
    assert caught.value.retry_after_s
    await pipeline.close()


async def test_a_dead_node_is_named_through_the_hops(start_node, client):
    first, _, _ = await start_node("first", 0, 1, num_layers=3)
    second, _, _ = await start_node("second", 1, 2, num_layers=3)
    gone, gone_node, _ = await start_node("gone", 2, 3)
    await gone_node.close()
    pipeline = RoutePipeline(client, (first, second, gone), PipelineSettings())
    with pytest.raises(NextHopError) as caught:
        await pipeline.forward(stub_activation(3), HIDDEN)
    assert caught.value.failed_node == "gone"
    assert caught.value.code.http_status == 502
    await pipeline.close()


async def test_a_route_that_skips_layers_is_refused(start_node, client):
    first, _, backend = await start_node("first", 0, 1, num_layers=3)
    wrong = Hop(NodeId("wrong"), first.address, LayerRange(2, 3))
    pipeline = RoutePipeline(client, (first, wrong), PipelineSettings())
    with pytest.raises(WireError) as caught:
        await pipeline.forward(stub_activation(3), HIDDEN)
    assert caught.value.field == "X-Meshnet-Route"
    assert backend.calls == []


async def test_a_step_gives_logits_or_candidates(start_node, client):
    first, _, _ = await start_node("first", 0, 1, num_layers=2)
    second, _, _ = await start_node("second", 1, 2)
    pipeline = RoutePipeline(client, (first, second), PipelineSettings(chunk_tokens=2))
    output = await pipeline.step([1, 2, 3], Want("logits"))
    assert output.logits.shape == (32,)
    assert output.logits.argmax() == 0
    output = await pipeline.step([5], Want("top", 4))
    assert output.token_ids.tolist() == [0, 1, 2, 3]
    assert output.top_logits.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert output.log_sum_exp == pytest.approx(np.log(np.e + 31))
    assert pipeline.position == 4
    await pipeline.close()
