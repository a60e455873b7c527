"""Requests while layers have no node: they wait where nodes may come back, and always end."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest

from tests.gateway.mesh import NUM_LAYERS, Mesh, stub_mesh

LONG_S = 60.0


@pytest.fixture
async def waiting(text) -> AsyncIterator[Mesh]:
    """A mesh whose gateway waits for longer than any test."""
    async with stub_mesh(text, spare_wait_s=LONG_S) as mesh:
        yield mesh


@pytest.fixture
async def hasty(text) -> AsyncIterator[Mesh]:
    async with stub_mesh(text, spare_wait_s=0.6) as mesh:
        yield mesh


class Selections:
    """Counts how often the gateway asked for a route."""

    def __init__(self, mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._changed = asyncio.Condition()
        selector = mesh.gateway._pipelines.shared.selector
        select = selector._select

        async def counted(*arguments):
            try:
                return await select(*arguments)
            finally:
                self.count += 1
                async with self._changed:
                    self._changed.notify_all()

        monkeypatch.setattr(selector, "_select", counted)

    async def more(self, timeout_s: float = 20.0) -> None:
        """Wait for one more."""
        count = self.count
        async with asyncio.timeout(timeout_s), self._changed:
            await self._changed.wait_for(lambda: self.count > count)

    async def none_more(self, timeout_s: float = 20.0) -> None:
        """Wait until nothing asks any more; what waits for a route asks four times a second."""
        count = -1
        async with asyncio.timeout(timeout_s):
            while count != self.count:
                count = self.count
                await asyncio.sleep(1.0)


@pytest.fixture
def selections(waiting, monkeypatch) -> Selections:
    return Selections(waiting, monkeypatch)


async def test_health_is_200_when_every_layer_has_a_node_and_else_503(hasty):
    status, body = await hasty.health()
    assert status == 503
    assert body["status"] == "waiting for nodes"
    assert list(body["uncovered"]) == [hasty.model]
    first = await hasty.join("first", 0, 2)
    status, body = await hasty.health()
    assert status == 503
    assert "2-4" in body["uncovered"][hasty.model]
    last = await hasty.join("last", 2, NUM_LAYERS, load=False)
    assert (await hasty.health())[0] == 503  # it loads
    await hasty.load(last)
    assert await hasty.health() == (
        200,
        {"status": "ready", "models": [hasty.model], "uncovered": {}},
    )
    await first.leave()
    status, body = await hasty.health()
    assert status == 503
    assert "0-2" in body["uncovered"][hasty.model]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_new_request_waits_for_a_node_that_starts_again(waiting, selections, stream):
    first = await waiting.join("first", 0, 2)
    await waiting.join("last", 2, NUM_LAYERS)
    undisturbed = await waiting.ask(stream=stream)
    await first.leave()
    asked = asyncio.create_task(waiting.ask(stream=stream))
    await selections.more()
    await waiting.join("first", 0, 2)
    assert await asyncio.wait_for(asked, LONG_S) == undisturbed


async def test_a_new_request_waits_when_every_node_starts_again(waiting, selections):
    """Nobody is registered for the model meanwhile; it was served before."""
    only = await waiting.join("only", 0, NUM_LAYERS)
    undisturbed = await waiting.ask()
    await only.leave()
    asked = asyncio.create_task(waiting.ask())
    await selections.more()
    await waiting.join("only", 0, NUM_LAYERS)
    assert await asyncio.wait_for(asked, LONG_S) == undisturbed


async def test_a_new_request_waits_for_nodes_that_load(waiting, selections):
    loading = await waiting.join("only", 0, NUM_LAYERS, load=False)
    asked = asyncio.create_task(waiting.ask())
    await selections.more()
    await waiting.load(loading)
    assert await asyncio.wait_for(asked, LONG_S) == "hhh"


@pytest.mark.parametrize("stream", [False, True])
async def test_layers_that_stay_uncovered_are_503_before_any_stream_begins(hasty, stream):
    await hasty.join("first", 0, 2)
    began = time.monotonic()
    async with hasty.http.post(
        f"{hasty.url}/v1/completions", json=hasty.request(stream=stream)
    ) as response:
        assert response.status == 503
        assert response.content_type == "application/json"
        assert response.headers["Retry-After"]
        error = (await response.json())["error"]
    assert time.monotonic() - began >= 0.3  # it waited
    assert (error["code"], error["type"]) == ("layers_uncovered", "server_error")
    assert "2-4" in error["message"]


async def test_a_model_served_before_whose_nodes_all_left_is_503(hasty):
    only = await hasty.join("only", 0, NUM_LAYERS)
    assert (await hasty.complete())[0] == 200
    await only.leave()
    status, body = await hasty.complete()
    assert (status, body["error"]["code"]) == (503, "layers_uncovered")


async def test_unknown_models_are_404_at_once(waiting):
    """One that the gateway has no text of, and one that no node has ever served."""
    began = time.monotonic()
    status, body = await waiting.complete(model="no-such")
    assert (status, body["error"]["code"]) == (404, "model_not_found")
    status, body = await waiting.complete()
    assert (status, body["error"]["code"]) == (404, "model_unknown")
    assert time.monotonic() - began < LONG_S / 2


async def test_a_client_that_leaves_while_it_waits_ends_the_wait(waiting, selections):
    await waiting.join("first", 0, 2)
    asked = asyncio.create_task(waiting.ask())
    await selections.more()
    asked.cancel()
    await asyncio.wait({asked})
    await selections.none_more()


async def test_a_stream_whose_layers_go_for_good_ends_with_an_error_event(hasty):
    await hasty.join("first", 0, 2)
    last = await hasty.join("last", 2, NUM_LAYERS, delay_s=0.05)
    async with hasty.http.post(
        f"{hasty.url}/v1/completions", json=hasty.request(stream=True, max_tokens=200)
    ) as response:
        assert response.status == 200
        events = [await event_of(response)]
        await last.leave()
        while (event := await asyncio.wait_for(event_of(response), 30.0)) is not None:
            events.append(event)
    assert events[-1]["error"]["code"] == "layers_uncovered"
    assert all(event["choices"][0]["finish_reason"] is None for event in events[:-1])


async def event_of(response) -> dict | None:
    """Read one event; None where the stream has ended."""
    while line := await response.content.readline():
        if line.startswith(b"data: "):
            data = line.removeprefix(b"data: ").strip()
            return {"done": True} if data == b"[DONE]" else json.loads(data)
    return None
