"""Sessions over real tiny models that lose nodes: the same logits, and who computed what.

Nodes and gateway run in this process, on real sockets; only the choice of routes is a list.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from meshnet.compression import CompressionPolicies
from meshnet.errors import CacheFullError, Code, MeshError, NextHopError, RouteError
from meshnet.grammar import Want
from meshnet.operations import RebuildMode
from meshnet.plane.client import PlaneClient
from meshnet.topology import Hop, LayerRange, NodeId
from meshnet_gateway.draining import DrainingNodes
from meshnet_gateway.lost import LostNodes
from meshnet_gateway.moving import SessionMoves
from meshnet_gateway.pipeline import PipelineSettings
from meshnet_gateway.presence import Presence
from meshnet_gateway.recoveries import RecoverySettings, Way
from meshnet_gateway.recovery import RecoveringPipeline, RecoveringPipelines
from meshnet_gateway.routed import Shared
from meshnet_gateway.selection import SelectedRoute
from meshnet_gateway.suspects import SuspectNodes
from meshnet_node.app import Node
from meshnet_node.budget import SessionLimits
from meshnet_node.hf.cache import SessionCache
from meshnet_node.hf.shard import TransformersShard
from meshnet_node.journals import JournalLimits
from meshnet_node.settings import NodeSettings
from tests.node.tiny import save_tiny

LOGITS = Want("logits")
CHUNK = 32
PROMPT = np.random.default_rng(5).integers(3, 128, 100).tolist()
STEPS = 10
SPANS = {"first": (0, 2), "middle": (2, 4), "last": (4, 5)}
BOUND_S = 30.0


@dataclass
class Pool:
    """Nodes by name, and routes in the order in which they are chosen."""

    model: Path
    presence: Presence
    routes: list[str] = field(default_factory=list)
    hops: dict[str, Hop] = field(default_factory=dict)
    nodes: dict[str, Node] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    suspects: SuspectNodes = field(default_factory=SuspectNodes)

    async def start(
        self,
        name: str,
        start: int,
        end: int,
        *,
        dtype: str = "float32",
        journal_bytes: int = 1 << 20,
        wrap=lambda backend: backend,
        **limits,
    ) -> Node:
        layers = LayerRange(start, end)

        def load() -> Any:
            shard = TransformersShard(
                self.model, layers, model="tiny", digest="", dtype=dtype, threads=1
            )
            return wrap(shard)

        settings = NodeSettings(
            NodeId(name),
            port=0,
            grace_s=0.1,
            sessions=SessionLimits(**{"reorder_wait_s": 1.0, **limits}),
            journals=JournalLimits(memory_bytes=journal_bytes),
        )
        node = Node(settings, load, CompressionPolicies())
        address = await node.listen()
        await node.load()
        self.nodes[name] = node
        self.hops[name] = Hop(NodeId(name), address, layers)
        node.stage.num_tokens = 0
        return node

    def route(self, names: str) -> SelectedRoute:
        hops = tuple(self.hops[name] for name in names.split())
        return SelectedRoute(hops, {hop.node: self.restarts.get(hop.node, 1) for hop in hops})

    async def select(self, model: str, session, *, max_tokens: int, wait_s: float) -> SelectedRoute:
        return self.route(self.routes[0])

    async def granted(self, model: str, session, route: SelectedRoute) -> SelectedRoute:
        return route

    async def replace(self, model: str, session, *, failed, answers, **_) -> SelectedRoute:
        for names in self.routes:
            route = self.route(names)
            again = [h for h in route.hops if failed.get(h.node) == route.incarnations[h.node]]
            if not again:
                return route
        raise RouteError(Code.UNAVAILABLE, "no route", reason="LAYERS_UNCOVERED")

    def computed(self, *names: str) -> list[int]:
        return [self.nodes[name].stage.num_tokens for name in names]

    def held(self) -> dict[str, tuple[int, int, int]]:
        """Give sessions, reserved tokens and journal bytes of each node that has any."""
        found = {}
        for name, node in self.nodes.items():
            sessions = node.stage.sessions
            figures = (len(sessions), sessions.reserved_tokens, sessions.journals.memory_bytes)
            if any(figures):
                found[name] = figures
        return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
async def pool(model, client) -> AsyncIterator[Pool]:
    made = Pool(model, Presence(client))
    yield made
    await made.presence.close()
    for node in made.nodes.values():
        await node.close()


@pytest.fixture
async def client() -> AsyncIterator[PlaneClient]:
    plane = PlaneClient()
    yield plane
    await plane.close()


def share(pool: Pool, client: PlaneClient, **settings: Any) -> Shared:
    return Shared(
        pool,
        client,
        LostNodes(),
        SessionMoves(pool, client, DrainingNodes(), timeout_s=BOUND_S),
        PipelineSettings(chunk_tokens=CHUNK, window=settings.pop("window", None)),
        RecoverySettings(**{"spare_wait_s": 5.0, **settings}),
        pool.presence,
    )


async def open_session(shared: Shared) -> RecoveringPipeline:
    return await RecoveringPipelines(shared).open("tiny", max_tokens=len(PROMPT) + STEPS)


async def generate(pipeline: RecoveringPipeline, events: Mapping[int, Any] | None = None):
    """Drive a greedy completion, awaiting `events` before the steps of these numbers."""
    found = []
    fed = PROMPT
    for number in range(STEPS):
        if events and number in events:
            await events[number]()
        output = await asyncio.wait_for(pipeline.step(fed, LOGITS), BOUND_S)
        found.append(output.logits)
        fed = [int(output.logits.argmax())]
    return found


def texts(logits) -> list[int]:
    return [int(each.argmax()) for each in logits]


async def undisturbed(pool: Pool, client: PlaneClient):
    """Run a session to its end, and set the counters back."""
    pipeline = await open_session(share(pool, client))
    found = await generate(pipeline)
    await pipeline.close()
    for node in pool.nodes.values():
        node.stage.num_tokens = 0
    return found


async def settled(pool: Pool, *gone: str) -> None:
    """Wait until no node but those gone holds anything."""
    async with asyncio.timeout(BOUND_S):
        while pool.held().keys() - set(gone):
            await asyncio.sleep(0.01)


async def start_three(pool: Pool, **options: Any) -> None:
    for name, span in SPANS.items():
        await pool.start(name, *span, **options)
    pool.routes.append("first middle last")


@pytest.mark.parametrize("mode", list(RebuildMode))
@pytest.mark.parametrize("lost", list(SPANS))
async def test_only_the_lost_layers_are_computed_again(pool, client, lost, mode):
    await start_three(pool)
    await pool.start("spare", *SPANS[lost])
    expected = await undisturbed(pool, client)
    pool.routes.append("first middle last".replace(lost, "spare"))
    shared = share(pool, client, mode=mode)
    pipeline = await open_session(shared)

    found = await generate(pipeline, {6: pool.nodes[lost].close})

    assert texts(found) == texts(expected)
    if mode is RebuildMode.EXACT:
        assert [each.tobytes() for each in found] == [each.tobytes() for each in expected]
    assert shared.counts.ways == {Way.JOURNAL: 1}
    before = len(PROMPT) + 5
    assert shared.counts.recomputed_tokens == {Way.JOURNAL: before}
    total = len(PROMPT) + STEPS - 1
    assert pool.computed("spare") == [total]
    for name in SPANS:
        if name != lost:
            assert total <= pool.computed(name)[0] <= total + 1
    await pipeline.close()
    await settled(pool, lost)


@pytest.mark.parametrize("wrong", list(SPANS))
async def test_nothing_that_a_node_in_quarantine_made_is_kept(pool, client, wrong):
    await start_three(pool)
    await pool.start("spare", *SPANS[wrong])
    expected = await undisturbed(pool, client)
    pool.routes.append("first middle last".replace(wrong, "spare"))
    shared = share(pool, client)
    pipeline = await open_session(shared)

    async def quarantine() -> None:
        shared.lost.quarantine(NodeId(wrong))

    found = await generate(pipeline, {6: quarantine})

    assert texts(found) == texts(expected)
    assert shared.counts.ways == {Way.REPLAY: 1}
    total, before = len(PROMPT) + STEPS - 1, len(PROMPT) + 5
    assert pool.computed("spare") == [total]
    for name in SPANS:
        assert pool.computed(name)[0] == (before if name == wrong else total + before)
    await pipeline.close()
    await settled(pool)


@pytest.mark.parametrize(
    ("lost", "spans"),
    [
        (("first", "middle"), [(0, 4)]),
        (("middle", "last"), [(2, 5)]),
        (("middle", "last"), [(2, 3), (3, 5)]),
        (("first", "last"), [(0, 2), (4, 5)]),
    ],
)
async def test_two_nodes_are_lost_at_once(pool, client, lost, spans):
    await start_three(pool)
    for number, span in enumerate(spans):
        await pool.start(f"spare{number}", *span)
    expected = await undisturbed(pool, client)
    spares = [(pool.hops[f"spare{n}"].layers.start, f"spare{n}") for n in range(len(spans))]
    kept = [(span[0], name) for name, span in SPANS.items() if name not in lost]
    pool.routes.append(" ".join(name for _, name in sorted(spares + kept)))
    shared = share(pool, client)
    pipeline = await open_session(shared)

    async def kill() -> None:
        for name in lost:
            await pool.nodes[name].close()

    found = await generate(pipeline, {4: kill})
    assert texts(found) == texts(expected)
    assert shared.counts.ways == {Way.JOURNAL: 1}
    total = len(PROMPT) + STEPS - 1
    assert all(count == total for count in pool.computed(*(name for _, name in spares)))
    for _, name in kept:
        assert total <= pool.computed(name)[0] <= total + 1
    await pipeline.close()
    await settled(pool, *lost)


async def test_a_second_failure_uses_the_journal_again(pool, client):
    """First the middle goes; then the last, whose cache comes from the middle's replacement."""
    await start_three(pool)
    await pool.start("spare", *SPANS["middle"])
    await pool.start("other", *SPANS["last"])
    expected = await undisturbed(pool, client)
    pool.routes += ["first spare last", "first spare other"]
    shared = share(pool, client, mode=RebuildMode.EXACT)
    pipeline = await open_session(shared)
    kills = {3: pool.nodes["middle"].close, 7: pool.nodes["last"].close}
    found = await generate(pipeline, kills)
    assert [each.tobytes() for each in found] == [each.tobytes() for each in expected]
    assert shared.counts.ways == {Way.JOURNAL: 2}
    total = len(PROMPT) + STEPS - 1
    assert pool.computed("other") == [total]
    assert pool.computed("first")[0] <= total + 2
    await pipeline.close()
    await settled(pool, "middle", "last")


async def test_exact_gives_the_same_bits_in_bfloat16(pool, client):
    await start_three(pool, dtype="bfloat16")
    await pool.start("spare", *SPANS["middle"], dtype="bfloat16")
    expected = await undisturbed(pool, client)
    pool.routes.append("first spare last")
    pipeline = await open_session(share(pool, client, mode=RebuildMode.EXACT))
    found = await generate(pipeline, {6: pool.nodes["middle"].close})
    assert [each.tobytes() for each in found] == [each.tobytes() for each in expected]
    await pipeline.close()


async def test_without_a_journal_all_tokens_go_through_the_route_again(pool, client, caplog):
    await start_three(pool, journal_bytes=0)
    await pool.start("spare", *SPANS["last"])
    expected = await undisturbed(pool, client)
    pool.routes.append("first middle spare")
    shared = share(pool, client)
    pipeline = await open_session(shared)
    found = await generate(pipeline, {6: pool.nodes["last"].close})
    assert texts(found) == texts(expected)
    assert shared.counts.ways == {Way.REPLAY: 1}
    assert "the journal of this session does not hold its first 105 tokens" in caplog.text
    total = len(PROMPT) + STEPS - 1
    assert pool.computed("first", "spare") == [total + 106, total]
    await pipeline.close()
    await settled(pool, "last")


@pytest.mark.parametrize(
    ("lost", "without", "again"),
    [
        ("last", "middle", {"first": 0, "middle": 105}),
        ("middle", "first", {"first": 105, "last": 0}),
    ],
)
async def test_a_hop_without_a_journal_is_computed_again_with_the_lost_one(
    pool, client, lost, without, again
):
    """A cache that was moved to it came without one; the others are not disturbed."""
    await start_three(pool)
    await pool.start("spare", *SPANS[lost])
    expected = await undisturbed(pool, client)
    pool.routes.append("first middle last".replace(lost, "spare"))

    async def lose() -> None:
        sessions = pool.nodes[without].stage.sessions
        (session,) = sessions._sessions.values()
        sessions.journals.drop(session.journal, "moved")
        await pool.nodes[lost].close()

    shared = share(pool, client)
    pipeline = await open_session(shared)
    found = await generate(pipeline, {6: lose})
    assert texts(found) == texts(expected)
    assert shared.counts.ways == {Way.JOURNAL: 1}
    once = len(PROMPT) + STEPS - 1
    for name, tokens in again.items():
        assert pool.computed(name)[0] - once in (tokens, tokens + 1), (
            "the step itself twice at most"
        )
    await pipeline.close()
    await settled(pool, lost)


async def test_a_node_that_knows_no_journals_is_replayed(pool, client, monkeypatch):
    await start_three(pool)
    await pool.start("spare", *SPANS["middle"])
    expected = await undisturbed(pool, client)
    pool.routes.append("first spare last")

    def unknown(*_: Any) -> None:
        raise MeshError(Code.METHOD_NOT_ALLOWED, "POST is not served here")

    monkeypatch.setattr(pool.nodes["first"], "rebuild", unknown)
    shared = share(pool, client)
    pipeline = await open_session(shared)
    found = await generate(pipeline, {6: pool.nodes["middle"].close})
    assert texts(found) == texts(expected)
    assert shared.counts.ways == {Way.REPLAY: 1}
    await pipeline.close()


async def test_a_replacement_that_fails_too_is_replaced(pool, client):
    """The first spare is gone already: the rebuild names it, and the second one serves."""
    await start_three(pool)
    await pool.start("gone", *SPANS["middle"])
    await pool.start("spare", *SPANS["middle"])
    expected = await undisturbed(pool, client)
    await pool.nodes["gone"].close()
    pool.routes += ["first gone last", "first spare last"]
    shared = share(pool, client)
    pipeline = await open_session(shared)
    found = await generate(pipeline, {6: pool.nodes["middle"].close})
    assert texts(found) == texts(expected)
    assert shared.counts.ways == {Way.JOURNAL: 1}
    await pipeline.close()
    await settled(pool, "middle", "gone")


async def test_a_full_replacement_is_waited_for(pool, client):
    await start_three(pool)
    spare = await pool.start("spare", *SPANS["middle"], cache_tokens=len(PROMPT) + STEPS)
    expected = await undisturbed(pool, client)
    pool.routes.append("first spare last")
    shared = share(pool, client)
    pipeline = await open_session(shared)
    other, _ = spare.stage.sessions.reserve("8d7f2f0a-0000-4000-8000-000000000001", 50)
    reserve = spare.stage.sessions._budget.reserve

    def count(session: Any, tokens: int) -> None:
        try:
            reserve(session, tokens)
        except CacheFullError:
            refused.set()
            raise

    refused = threading.Event()
    spare.stage.sessions._budget.reserve = count

    async def make_room() -> None:
        assert await asyncio.to_thread(refused.wait, BOUND_S)
        await asyncio.to_thread(spare.stage.sessions.release, other.id)

    room = asyncio.create_task(make_room())
    found = await generate(pipeline, {6: pool.nodes["middle"].close})
    await room
    assert texts(found) == texts(expected)
    assert shared.counts.ways == {Way.JOURNAL: 1}
    await pipeline.close()


async def test_a_node_that_restarted_is_rebuilt_where_it_is(pool, client):
    await start_three(pool)
    expected = await undisturbed(pool, client)
    shared = share(pool, client)
    pipeline = await open_session(shared)

    async def restart() -> None:
        await pool.nodes["middle"].close()
        await pool.start("middle", *SPANS["middle"])
        pool.restarts["middle"] = 2

    found = await generate(pipeline, {6: restart})
    assert texts(found) == texts(expected)
    assert shared.counts.ways == {Way.JOURNAL: 1}
    assert pool.computed("middle") == [len(PROMPT) + STEPS - 1]
    await pipeline.close()
    await settled(pool)


class Stopping:
    """A backend whose computation of one chunk waits, and does not end until told."""

    def __init__(self, backend: TransformersShard) -> None:
        self._backend = backend
        self.at = -1
        self.num_calls = 0
        self.stopped = threading.Event()
        self.go_on = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == self.at:
            self.stopped.set()
            assert self.go_on.wait(BOUND_S)
        return self._backend.forward(*arguments, **options)


@pytest.mark.parametrize("window", [1, None])
async def test_a_node_lost_in_the_prompt_costs_the_others_a_window(pool, client, window):
    """The middle node stops in the prompt's third chunk of four."""
    stopping: list[Stopping] = []

    def wrap(backend: TransformersShard) -> Stopping:
        stopping.append(Stopping(backend))
        return stopping[-1]

    await pool.start("first", *SPANS["first"])
    await pool.start("middle", *SPANS["middle"], wrap=wrap)
    await pool.start("last", *SPANS["last"])
    await pool.start("spare", *SPANS["middle"])
    pool.routes.append("first middle last")
    expected = await undisturbed(pool, client)
    pool.routes.append("first spare last")
    shared = share(pool, client, window=window)
    pipeline = await open_session(shared)
    stopping[0].at = stopping[0].num_calls + 3

    async def kill() -> None:
        assert await asyncio.to_thread(stopping[0].stopped.wait, BOUND_S)
        await pool.nodes["middle"].close()
        stopping[0].go_on.set()

    killing = asyncio.create_task(kill())
    found = await generate(pipeline)
    await killing
    assert texts(found) == texts(expected)
    assert shared.counts.ways == {Way.JOURNAL: 1}
    assert shared.counts.recomputed_tokens == {Way.JOURNAL: 2 * CHUNK}
    total = len(PROMPT) + STEPS - 1
    assert pool.computed("spare", "last") == [total, total]
    assert pool.computed("first")[0] <= total + len(PROMPT) - 2 * CHUNK
    await pipeline.close()
    await settled(pool, "middle")


def keep_choosing(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choose the first route whatever failed."""

    async def same_again(*_: Any, **__: Any) -> SelectedRoute:
        return pool.route(pool.routes[0])

    monkeypatch.setattr(pool, "replace", same_again)


async def test_a_step_is_sent_again_where_every_cache_is_still_there(pool, client, monkeypatch):
    """A connection breaks, the node is well: nothing is computed again but that step."""
    await start_three(pool)
    expected = await undisturbed(pool, client)

    keep_choosing(pool, monkeypatch)
    shared = share(pool, client)
    pipeline = await open_session(shared)
    node = pool.nodes["middle"]
    forward = node.forward

    def broken(*arguments: Any) -> Any:
        node.forward = forward
        raise MeshError(Code.UNAVAILABLE, "a test breaks it")

    async def break_it() -> None:
        node.forward = broken

    found = await generate(pipeline, {6: break_it})
    assert texts(found) == texts(expected)
    assert shared.counts.ways == {Way.RESENT: 1}
    assert pool.computed("middle", "last") == [len(PROMPT) + STEPS - 1] * 2
    await pipeline.close()
    await settled(pool)


async def test_a_state_that_cannot_be_cut_back_is_replayed(pool, client, monkeypatch):
    """As of recurrent layers: the first node is past the step that is to be repeated."""
    await start_three(pool)
    await pool.start("spare", *SPANS["middle"])
    expected = await undisturbed(pool, client)
    monkeypatch.setattr(SessionCache, "can_truncate", property(lambda _: False))
    pool.routes.append("first spare last")
    shared = share(pool, client)
    pipeline = await open_session(shared)
    found = await generate(pipeline, {6: pool.nodes["middle"].close})
    assert texts(found) == texts(expected)
    assert shared.counts.ways == {Way.REPLAY: 1}
    await pipeline.close()
    await settled(pool, "middle")


async def test_a_node_that_fails_for_a_while_is_gone_back_to(pool, client, monkeypatch):
    """It says that it is well, and there is no other; it fails more often than is tried at once."""
    await start_three(pool)
    expected = await undisturbed(pool, client)

    keep_choosing(pool, monkeypatch)
    monkeypatch.setattr("meshnet_gateway.recovery._AGAIN_S", 0.01)
    shared = share(pool, client)
    pipeline = await open_session(shared)
    node, left = pool.nodes["middle"], 9
    forward = node.forward

    def failing(*arguments: Any) -> Any:
        nonlocal left
        if left:
            left -= 1
            raise NextHopError("a test breaks it", failed_node="last")
        return forward(*arguments)

    async def break_it() -> None:
        node.forward = failing

    found = await generate(pipeline, {6: break_it})
    assert texts(found) == texts(expected)
    assert shared.counts.ways == {Way.RESENT: 1}
    assert left == 0
    await pipeline.close()
    await settled(pool)
