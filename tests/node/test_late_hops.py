"""A hop that falls silent is named by the node before it, through every hop before that."""

from __future__ import annotations

import asyncio
import socket
import threading

import pytest

from meshnet.errors import NextHopError
from meshnet.grammar import Phase, Want
from meshnet.patience import Flights, Patience, PatienceLimits
from meshnet.topology import Hop, LayerRange, NodeId
from meshnet_gateway.pipeline import PipelineSettings, RoutePipeline
from meshnet_node.running import RunningStep

TOP = Want("top", 3)
FAR_S = 600.0
"""No timeout of a chunk is waited for."""


def make_hasty(node, answer_s: float) -> None:
    """Have a node find answers late in a moment, and give the next hop `answer_s` to say a word."""
    node._late._flights = Flights(PatienceLimits(least_s=0.05, first_s=0.1, most_s=0.2))
    node._late._answer_s = answer_s


async def test_the_silent_hop_is_named_and_not_those_that_wait_for_it(start_node, client):
    first, first_node, _ = await start_node("first", 0, 1, num_layers=3)
    second, second_node, _ = await start_node("second", 1, 2, num_layers=3)
    make_hasty(first_node, FAR_S)
    make_hasty(second_node, 0.5)
    with socket.create_server(("127.0.0.1", 0), backlog=16) as hung:  # nobody accepts
        address = f"127.0.0.1:{hung.getsockname()[1]}"
        silent = Hop(NodeId("silent"), address, LayerRange(2, 3))
        pipeline = RoutePipeline(
            client, (first, second, silent), PipelineSettings(step_timeout_s=FAR_S)
        )
        with pytest.raises(NextHopError) as caught:
            await asyncio.wait_for(pipeline.step([1, 2, 3], TOP), 60.0)
    assert caught.value.failed_node == "silent"
    assert caught.value.code.http_status == 504
    await pipeline.close()


async def test_a_hop_that_computes_for_long_is_waited_for(start_node, client):
    first, first_node, _ = await start_node("first", 0, 1, num_layers=2)
    slow, _, backend = await start_node("slow", 1, 2)
    make_hasty(first_node, FAR_S)
    asked = asyncio.Event()
    ask = first_node._late._ask

    async def counted(address: str, timeout_s: float) -> None:
        await ask(address, timeout_s)
        asked.set()

    first_node._late._ask = counted
    backend.block = threading.Event()
    pipeline = RoutePipeline(client, (first, slow), PipelineSettings(step_timeout_s=FAR_S))
    step = asyncio.create_task(pipeline.step([1, 2, 3], TOP))
    for _ in range(3):
        await asyncio.wait_for(asked.wait(), 60.0)
        asked.clear()
    assert not step.done()
    backend.block.set()
    assert (await asyncio.wait_for(step, 60.0)).token_ids is not None
    await pipeline.close()


async def test_a_shard_that_hangs_is_told_from_one_that_is_slow(start_node, client):
    """Its HTTP side answers: it is the node itself that says what its step takes."""
    first, first_node, _ = await start_node("first", 0, 1, num_layers=2)
    hung, hung_node, backend = await start_node("hung", 1, 2)
    hung_node.stage.running = RunningStep(FAR_S)
    hung_node.stage.running._usual = Patience(
        PatienceLimits(least_s=0.5, first_s=FAR_S, most_s=FAR_S)
    )
    make_hasty(first_node, FAR_S)
    pipeline = RoutePipeline(client, (first, hung), PipelineSettings(step_timeout_s=FAR_S))
    for _ in range(4):
        await pipeline.step([1], TOP)
    assert await asyncio.to_thread(hung_node.healthy)
    backend.block = threading.Event()
    with pytest.raises(NextHopError) as caught:
        await asyncio.wait_for(pipeline.step([1], TOP), 60.0)
    assert caught.value.failed_node == "hung"
    assert "answered 503" in str(caught.value)
    assert not await asyncio.to_thread(hung_node.healthy)
    backend.block.set()
    await pipeline.close()


def test_when_a_step_hangs():
    running = RunningStep(120.0)
    assert not running.hangs(0.0)
    for start in range(3):
        running.begin(Phase.DECODE, 1, start)
        running.end(start + 0.5, went_well=True)
    running.begin(Phase.DECODE, 1, 100.0)
    running.end(190.0, went_well=False)  # nothing is learned from it
    running.begin(Phase.DECODE, 1, 200.0)
    assert not running.hangs(210.0)
    assert running.hangs(210.1), "16 times 0.5 s is less than 10 s"
    running.end(211.0, went_well=True)
    assert not running.hangs(400.0)
    running.begin(Phase.PREFILL, 128, 500.0)  # none of its size is known
    assert not running.hangs(619.0)
    assert running.hangs(621.0)
