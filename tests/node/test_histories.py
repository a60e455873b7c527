"""Random histories of a session over three nodes, against the whole model in one process.

Whatever a caller does (chunks again, out of order, with gaps, too short, with totals that
cannot be; releases; hops that fail), each node gives the specification's answer, and the
session still finishes with the model's own tokens.
"""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.compression import CompressionPolicies
from meshnet.errors import Code, MeshError, NextHopError, PositionError, UnknownSessionError
from meshnet.grammar import Want
from meshnet.operations import Reservation
from meshnet.plane.hop_client import HopClient
from meshnet.topology import Hop, LayerRange, NodeId, Route, SessionId
from meshnet.wire import ChunkHeader
from meshnet_node.app import Node
from meshnet_node.budget import SessionLimits
from meshnet_node.hf.shard import TransformersShard
from meshnet_node.settings import NodeSettings
from tests.e2e.reference import load_whole
from tests.node.tiny import VOCAB, save_tiny

BORDERS = (0, 2, 4, 5)
MAX_POSITIONS = 512
NUM_FINAL = 3
ROUNDING = 0.02
"""Of the logits' deviation: what other chunk borders may change; another token changes all."""
LOGITS, NONE = Want("logits"), Want("none")
PATIENT = SessionLimits(reorder_wait_s=60.0)
HASTY = replace(PATIENT, reorder_wait_s=0.02)


class Whole:
    """The model in one process, in float32, rounded to bfloat16 where the shards meet."""

    def __init__(self, directory) -> None:
        self._model = load_whole(directory, torch.float32)
        for border in BORDERS[1:-1]:
            self._model.model.layers[border - 1].register_forward_hook(_round)
        self._known: dict[tuple[int, ...], np.ndarray] = {}

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> np.ndarray:
        """Give the logits after `ids`."""
        found = self._known.get(tuple(ids))
        if found is None:
            out = self._model(torch.tensor([ids]), use_cache=False, logits_to_keep=1)
            found = self._known[tuple(ids)] = out.logits[0, -1].numpy()
        return found


def _round(_module, _inputs, output):
    return output.bfloat16().float()


class Nodes:
    """Three nodes on an event loop of their own, which they only need to start and end."""

    def __init__(self, directory) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.nodes: list[Node] = []
        hops = []
        for start, end in pairwise(BORDERS):
            layers = LayerRange(start, end)
            shard = TransformersShard(
                directory, layers, model="tiny", digest="d", dtype="float32", threads=1
            )
            name = NodeId(f"node-{start}")
            node = Node(NodeSettings(name, port=0), lambda s=shard: s, CompressionPolicies())
            hops.append(Hop(name, self._run(node.listen()), layers))
            self._run(node.load())
            self.nodes.append(node)
        self.route: Route = tuple(hops)
        self.client = HopClient()

    def close(self) -> None:
        self.client.close()
        for node in self.nodes:
            self._run(node.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def wait_for_the_chunk_before(self, limits: SessionLimits) -> None:
        for node in self.nodes:
            node.stage.sessions._limits = limits

    def held(self) -> list[tuple[int, int]]:
        """Give sessions and reserved tokens of each node."""
        tables = [node.stage.sessions for node in self.nodes]
        return [(len(table), table.reserved_tokens) for table in tables]

    def _run(self, work) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(60.0)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_tiny("llama", tmp_path_factory.mktemp("llama"), dtype=torch.float32)


@pytest.fixture(scope="module")
def whole(directory) -> Whole:
    return Whole(directory)


@pytest.fixture(scope="module")
def nodes(directory) -> Iterator[Nodes]:
    started = Nodes(directory)
    yield started
    started.close()


@dataclass
class Session:
    """A caller, and what it may count on.

    Attributes:
        tokens: that the specification says are in the caches.
        is_open: whether the first node holds the session.
        last: position and tokens of the last chunk that went well.
    """

    nodes: Nodes
    whole: Whole
    random: random.Random
    id: SessionId = field(default_factory=lambda: SessionId(str(uuid.uuid4())))
    tokens: list[int] = field(default_factory=list)
    is_open: bool = False
    last: tuple[int, list[int]] | None = None

    # --- what a caller may do ---

    def append(self, count: int) -> None:
        self.feed(len(self.tokens), self.draw(count))

    def append_without_a_position(self, count: int) -> None:
        ids = self.draw(count)
        answer = self.send(None, ids)
        self.took(len(self.tokens), ids, answer)

    def append_silently(self, count: int) -> None:
        ids = self.draw(count)
        assert self.send(len(self.tokens), ids, want=NONE) is None
        self.took(len(self.tokens), ids, None)

    def repeat(self, _count: int) -> None:
        if self.last is not None:
            length = len(self.tokens)
            self.feed(*self.last)
            assert len(self.tokens) == length

    def repeat_at_once(self, _count: int) -> None:
        """The same chunk twice at a time, as when a connection broke in its answer."""
        position, ids = len(self.tokens), self.draw(2)
        answers = self.together([(position, ids, 0, 1)] * 2)
        for answer in answers:
            self.tokens = self.tokens[:position]
            self.took(position, ids, answer)

    def go_back(self, count: int) -> None:
        """Cut the cache, as after a guess that was wrong, and go on with other tokens."""
        self.feed(max(0, len(self.tokens) - count), self.draw(count))

    def send_a_part_again(self, count: int) -> None:
        """A late repeat of an earlier chunk: what came after it is gone."""
        position = max(0, len(self.tokens) - 2 * count)
        ids = self.tokens[position : position + count]
        if ids:
            self.feed(position, ids)

    def leave_a_gap(self, count: int) -> None:
        self.nodes.wait_for_the_chunk_before(HASTY)
        expected = len(self.tokens)
        with pytest.raises(MeshError) as caught:
            self.send(expected + count, self.draw(count))
        self.nodes.wait_for_the_chunk_before(PATIENT)
        if self.is_open:
            assert isinstance(caught.value, PositionError)
            assert caught.value.expected == expected
            assert caught.value.code.http_status == 409
        else:
            assert isinstance(caught.value, UnknownSessionError)

    def send_out_of_order(self, count: int) -> None:
        """A prompt's chunks, all at once, the last ones first as like as not."""
        sizes = [self.random.randint(1, 4) for _ in range(count + 1)]
        chunks, position = [], len(self.tokens)
        for index, size in enumerate(sizes):
            chunks.append((position, self.draw(size), index, len(sizes)))
            position += size
        order = self.random.sample(range(len(chunks)), len(chunks))
        answers = self.together([chunks[index] for index in order])
        for index in range(len(chunks)):
            start, ids, _, _ = chunks[index]
            self.took(start, ids, answers[order.index(index)])

    def state_a_wrong_total(self, count: int) -> None:
        for index, total in ((count, count), (count + 1, 1), (0, 0)):
            with pytest.raises(MeshError) as caught:
                self.send(len(self.tokens), self.draw(1), index=index, total=total)
            assert caught.value.code is Code.INVALID_ARGUMENT
            assert caught.value.field.startswith("X-Meshnet-Chunk-")

    def change_the_total(self, count: int) -> None:
        """Totals are the caller's own business, as long as the index is below them."""
        ids = self.draw(count)
        self.took(
            len(self.tokens), ids, self.send(len(self.tokens), ids, index=count, total=count + 7)
        )

    def send_what_no_shard_takes(self, _count: int) -> None:
        with pytest.raises(MeshError) as caught:
            self.send(len(self.tokens), [VOCAB])
        assert caught.value.code is Code.INVALID_ARGUMENT

    def pass_the_models_end(self, _count: int) -> None:
        with pytest.raises(MeshError) as caught:
            self.send(len(self.tokens), self.draw(MAX_POSITIONS + 1))
        assert caught.value.code is Code.OUT_OF_RANGE

    def reserve(self, count: int) -> None:
        first, *after = self.nodes.route
        asked = Reservation(self.id, 10 * count, first.layers, tuple(after))
        self.nodes.client.reserve(first.address, first.node, asked, timeout_s=60.0)
        self.is_open = True

    def release(self, _count: int) -> None:
        self.nodes.client.release(self.nodes.route[0].address, self.id)
        self.lost()

    def release_twice(self, count: int) -> None:
        self.release(count)
        self.release(count)

    def lose_it_downstream(self, count: int) -> None:
        """A node in the middle forgets the session: the caller hears of it and begins anew."""
        lost = 1 + count % 2
        self.nodes.client.release(self.nodes.route[lost].address, self.id)
        if self.tokens:
            with pytest.raises(UnknownSessionError):
                self.send(len(self.tokens), self.draw(1))
            self.feed(0, self.tokens)

    def break_the_route(self, count: int) -> None:
        """A hop that nobody serves: those before it have computed the chunk already."""
        broken = 1 + count % 2
        with socket.socket() as unheard:
            unheard.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{unheard.getsockname()[1]}"
            hops = list(self.nodes.route)
            hops[broken] = replace(hops[broken], node=NodeId("gone"), address=address)
            position, ids = len(self.tokens), self.draw(count)
            with pytest.raises(NextHopError) as caught:
                self.send(position, ids, route=tuple(hops))
        assert caught.value.failed_node == "gone"
        self.feed(position, ids)

    # --- how it is done ---

    def draw(self, count: int) -> list[int]:
        # Token 0 is padding, whose embedding is nothing but zeros.
        return [self.random.randrange(1, VOCAB) for _ in range(count)]

    def feed(self, position: int, ids: list[int]) -> None:
        self.took(position, ids, self.send(position, ids))

    def took(self, position: int, ids: list[int], logits: np.ndarray | None) -> None:
        """Note a chunk that was answered, whose logits must be those of the whole model."""
        self.tokens = [*self.tokens[:position], *ids]
        self.last = (position, ids)
        self.is_open = True
        if logits is not None:
            check_logits(logits, self.whole.logits(self.tokens))

    def lost(self) -> None:
        """Hear that the session is gone, then begin it anew with all that it had."""
        self.is_open = False
        if self.tokens:
            with pytest.raises(UnknownSessionError):
                self.send(len(self.tokens), self.draw(1))
            self.feed(0, self.tokens)

    def send(
        self,
        position: int | None,
        ids: list[int],
        *,
        want: Want = LOGITS,
        index: int = 0,
        total: int = 1,
        route: Route | None = None,
    ) -> np.ndarray | None:
        hops = route or self.nodes.route
        tensor = np.array([ids], dtype=np.int32)
        header = ChunkHeader(
            tensor.shape,
            "int32",
            self.id,
            chunk_index=index,
            chunk_total=total,
            position=position,
            want=want,
            route=hops[1:],
        )
        answer = self.nodes.client.forward(
            hops[0].address, hops[0].node, header, tensor, timeout_s=60.0
        )
        assert (answer.header.chunk_index, answer.header.chunk_total) == (index, total)
        return None if answer.tensor is None else answer.tensor[0, -1]

    def together(self, chunks: list[tuple[int, list[int], int, int]]) -> list[np.ndarray]:
        with ThreadPoolExecutor(len(chunks)) as senders:
            return list(
                senders.map(
                    lambda chunk: self.send(chunk[0], chunk[1], index=chunk[2], total=chunk[3]),
                    chunks,
                )
            )

    def finish(self) -> None:
        """Go on as if nothing had been: the tokens are the whole model's."""
        self.append(1)
        for _ in range(NUM_FINAL):
            expected = self.whole.logits(self.tokens)
            ids = [int(expected.argmax())]
            logits = self.send(len(self.tokens), ids)
            self.took(len(self.tokens), ids, logits)
            expected = self.whole.logits(self.tokens)
            assert expected.max() - expected[logits.argmax()] < ROUNDING * expected.std()


def check_logits(got: np.ndarray, expected: np.ndarray) -> None:
    """Hold logits against the whole model's; chunk borders round differently, by little."""
    assert np.abs(got - expected).max() < ROUNDING * expected.std()


ACTIONS = (
    "append",
    "append_without_a_position",
    "append_silently",
    "repeat",
    "repeat_at_once",
    "go_back",
    "send_a_part_again",
    "leave_a_gap",
    "send_out_of_order",
    "state_a_wrong_total",
    "change_the_total",
    "send_what_no_shard_takes",
    "pass_the_models_end",
    "reserve",
    "release",
    "release_twice",
    "lose_it_downstream",
    "break_the_route",
)
HISTORIES = st.lists(
    st.tuples(st.integers(0, 1), st.sampled_from(ACTIONS), st.integers(1, 6)),
    min_size=1,
    max_size=14,
)


@settings(max_examples=60, deadline=None)
@given(HISTORIES, st.integers(0, 2**32 - 1))
def test_whatever_came_before_a_session_finishes_with_the_right_tokens(nodes, whole, history, seed):
    """Two sessions, their steps interleaved."""
    sessions = [Session(nodes, whole, random.Random(seed + number)) for number in range(2)]
    nodes.wait_for_the_chunk_before(PATIENT)
    try:
        for which, act, count in history:
            getattr(sessions[which], act)(count)
        for session in sessions:
            session.finish()
    finally:
        for session in sessions:
            nodes.client.release(nodes.route[0].address, session.id)
    assert nodes.held() == [(0, 0)] * 3
