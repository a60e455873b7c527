"""Chunks of one prompt overlap across stages, and keep their order at each."""

from __future__ import annotations

import asyncio
import threading

import pytest

from meshnet.errors import MeshError
from meshnet.grammar import Want
from meshnet_gateway.cutting import join_answers
from meshnet_gateway.pipeline import PipelineSettings, RoutePipeline
from tests.node.test_pipeline_of_stubs import stub_activation

HIDDEN = Want("hidden")
BOUND_S = 20.0


async def test_stage_one_computes_the_next_chunk_while_stage_two_computes(start_node, client):
    """Stage two finishes no chunk before stage one has begun the one after."""
    first, _, first_backend = await start_node("first", 0, 1, num_layers=2, reorder_wait_s=30.0)
    second, _, second_backend = await start_node("second", 1, 2, reorder_wait_s=30.0)
    begun = [threading.Event() for _ in range(4)]
    overlapped: list[bool] = []

    def first_begins(index: int) -> None:
        begun[index].set()

    def second_begins(index: int) -> None:
        overlapped.append(begun[min(index + 1, 3)].wait(BOUND_S))

    first_backend.on_call = first_begins
    second_backend.on_call = second_begins
    pipeline = RoutePipeline(client, (first, second), PipelineSettings(chunk_tokens=8, window=4))
    sent = stub_activation(32)
    answers = await pipeline.forward(sent, HIDDEN)
    await pipeline.close()
    assert overlapped == [True] * 4
    assert join_answers(answers).tobytes() == sent.tobytes()
    for backend in (first_backend, second_backend):
        assert [call[0] for call in backend.calls] == [0, 8, 16, 24]


async def test_the_window_bounds_what_is_in_flight(start_node, client):
    hop, node, backend = await start_node("only", 0, 1, reorder_wait_s=30.0)
    most = 0

    def begins(_: int) -> None:
        nonlocal most
        most = max(most, node.stage.queue_depth)

    backend.on_call = begins
    pipeline = RoutePipeline(client, (hop,), PipelineSettings(chunk_tokens=1, window=3))
    await pipeline.forward(stub_activation(24), HIDDEN)
    await pipeline.close()
    assert 1 < most <= 3


async def test_sequential_mode_sends_one_chunk_at_a_time(start_node, client):
    hop, node, backend = await start_node("only", 0, 1)
    depths: list[int] = []
    backend.on_call = lambda _: depths.append(node.stage.queue_depth)
    pipeline = RoutePipeline(client, (hop,), PipelineSettings(chunk_tokens=1, window=1))
    await pipeline.forward(stub_activation(6), HIDDEN)
    await pipeline.close()
    assert depths == [1] * 6


async def test_a_failure_in_the_middle_ends_the_rest_and_the_session_can_go_on(start_node, client):
    hop, node, backend = await start_node("only", 0, 1, reorder_wait_s=30.0)

    def fails_once(index: int) -> None:
        if index == 2:
            raise ZeroDivisionError

    backend.on_call = fails_once
    pipeline = RoutePipeline(client, (hop,), PipelineSettings(chunk_tokens=4, window=4))
    sent = stub_activation(24)
    with pytest.raises(MeshError):
        await asyncio.wait_for(pipeline.forward(sent, HIDDEN), BOUND_S)
    assert pipeline.position == 8
    rest = await pipeline.forward(sent[:, 8:], HIDDEN)
    assert join_answers(rest).tobytes() == sent[:, 8:].tobytes()
    await pipeline.close()
    assert len(node.stage.sessions) == 0
