"""What one token costs on the wire: hidden x 2 bytes a boundary, in one request a hop."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace

from meshnet.grammar import Want
from meshnet.model_dir import read_model_dir
from meshnet.plane.client import PlaneClient
from meshnet_gateway.pipeline import PipelineSettings, RoutePipeline
from tests.e2e.counting import counting_proxy
from tests.e2e.mesh import node_processes, shards_of

DECODE_STEPS = 8
BYTES_PER_TOKEN_ID = 4
HEAD_LIMIT = 1024


async def test_a_decode_step_moves_one_hidden_state_a_boundary_in_one_request(smollm2):
    hidden = read_model_dir(smollm2).hidden_size
    client = PlaneClient()
    async with AsyncExitStack() as stack:
        route = await stack.enter_async_context(node_processes(smollm2, shards_of(smollm2, 3)))
        counts = [await stack.enter_async_context(counting_proxy(hop.address)) for hop in route]
        counted = tuple(
            replace(hop, address=count.address) for hop, count in zip(route, counts, strict=True)
        )
        pipeline = RoutePipeline(client, counted, PipelineSettings(), max_tokens=64)
        output = await pipeline.step([1, 4093, 198, 1780], Want("logits"))
        before = [len(count.forwards()) for count in counts]
        for _ in range(DECODE_STEPS):
            output = await pipeline.step([int(output.logits.argmax())], Want("logits"))
        sizes = [count.forwards()[already:] for count, already in zip(counts, before, strict=True)]
        await pipeline.close()
        await client.close()

    bodies = [[body for _, body in hop] for hop in sizes]
    assert bodies == [
        [BYTES_PER_TOKEN_ID] * DECODE_STEPS,
        [hidden * 2] * DECODE_STEPS,
        [hidden * 2] * DECODE_STEPS,
    ]
    assert all(head < HEAD_LIMIT for hop in sizes for head, _ in hop)
    assert [count.connections for count in counts] == [1, 1, 1]
    assert [line for count in counts for line, _, _ in count.requests[-1:]] == [
        f"DELETE /sessions/{pipeline.session}"
    ] * 3
