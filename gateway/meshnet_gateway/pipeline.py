"""Drives one session through the nodes of a route: prompts in chunks, then step by step."""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from meshnet.chunk import Answer
from meshnet.codec import ENCODINGS
from meshnet.dtypes import BFLOAT16, INT32
from meshnet.errors import Code, MeshError
from meshnet.grammar import Phase, Want
from meshnet.operations import OwnerId, Rebuild, RebuildMode, Reservation
from meshnet.plane.client import PlaneClient
from meshnet.timing import parse_timings
from meshnet.topology import Hop, NodeId, Route, SessionId
from meshnet.wire import ChunkHeader
from meshnet_gateway.cutting import cut_tokens, split_tokens
from meshnet_gateway.sending import ChunkSender
from meshnet_gateway.steps import StepOutput
from meshnet_gateway.window import Window

__all__ = ["PipelineSettings", "RoutePipeline", "new_session"]

_log = logging.getLogger(__name__)

_NO_ANSWER = Want("none")
_NOT_KNOWN: Final = (Code.NOT_FOUND, Code.METHOD_NOT_ALLOWED, Code.UNIMPLEMENTED)
"""What nodes answer that do not serve a request."""


@dataclass(frozen=True, slots=True)
class PipelineSettings:
    """How chunks are cut and how long they may take.

    Attributes:
        chunk_tokens: token positions per chunk of a prompt (MESHNET_CHUNK_TOKENS).
        step_timeout_s: seconds for one chunk through the whole route.
        window: chunks of a prompt in flight; 1 is sequential, None follows the measured
            stage times.
    """

    chunk_tokens: int = 128
    step_timeout_s: float = 300.0
    window: int | None = None


def new_session() -> SessionId:
    """Make an id that nobody can guess."""
    return SessionId(str(uuid.uuid4()))


class RoutePipeline:
    """One session on one route. Not for concurrent use: a session's steps follow one another.

    Args:
        client: the activation plane's.
        route: hops that cover the model.
        settings: see there.
        max_tokens: tokens that the session will need in all, reserved at every hop at once,
            before the first chunk; None reserves as it goes.
        owner: whose end is the session's.
        session: its id; a new one if not given.
        grant: of the control plane for session and route, where nodes ask for one.
    """

    def __init__(
        self,
        client: PlaneClient,
        route: Route,
        settings: PipelineSettings,
        *,
        max_tokens: int | None = None,
        owner: OwnerId | None = None,
        session: SessionId | None = None,
        grant: str | None = None,
    ) -> None:
        if not route:
            raise ValueError("a route needs at least one hop")
        self.route = route
        self.session = session or new_session()
        self.position = 0
        self._client = client
        self._settings = settings
        self._max_tokens = max_tokens
        self._owner = owner
        self._grant = grant
        self._has_shown = False
        self._sender = ChunkSender(
            client,
            Window(len(route), settings.window),
            max_tokens=max_tokens,
            timeout_s=settings.step_timeout_s,
        )
        self._begun = False
        self._closed = False
        self.epoch = 0
        self._apart: dict[str, NodeId] = {}

    async def step(
        self, token_ids: Sequence[int], want: Want, *, sizes: Sequence[int] | None = None
    ) -> StepOutput:
        """Feed the session's next tokens; gives what `want` asks of the last position.

        Args:
            token_ids: to feed.
            want: see `SessionPipeline.step`.
            sizes: of the chunks; None cuts by `PipelineSettings.chunk_tokens`.

        Raises:
            MeshError: of the node at fault.
        """
        ids = np.asarray(token_ids, dtype=np.int32)[None]
        answer = (await self.forward(ids, want, others=_NO_ANSWER, sizes=sizes))[-1]
        timings = tuple(parse_timings(answer.header.server_timing))
        tensor = answer.tensor
        if tensor is None or tensor.dtype != np.float32 or tensor.ndim != 3:
            got = f"{answer.header.dtype} of shape {answer.header.shape}"
            raise MeshError(Code.INTERNAL, f"{want} was answered with {got}; expected float32")
        if want.kind == "logits":
            return StepOutput(tensor[0, -1], None, None, None, timings)
        pairs = tensor[0]
        if pairs.shape[1] != 2 or not math.isfinite(float(pairs[-1, 1])):
            raise MeshError(Code.INTERNAL, "the last node's candidates are not pairs with a sum")
        return StepOutput(
            None, pairs[:-1, 0].astype(np.int32), pairs[:-1, 1], float(pairs[-1, 1]), timings
        )

    async def forward(
        self,
        tensor: npt.NDArray[Any],
        want: Want,
        *,
        others: Want | None = None,
        sizes: Sequence[int] | None = None,
    ) -> list[Answer]:
        """Send a tensor of the session's next tokens in chunks, several in flight, in order.

        Stage 2 works on one chunk while stage 1 works on the next. Every stage keeps the
        order: a chunk that arrives early waits there for the one before it.

        Args:
            tensor: int32 ``[1, seq]`` token ids or bfloat16 ``[1, seq, hidden]``.
            want: of the last chunk.
            others: of the chunks before it; `want` if not given.
            sizes: of the chunks; None cuts by `PipelineSettings.chunk_tokens`.

        Raises:
            MeshError: of the node at fault; the chunks before it stay in the caches.
        """
        chunks = self._cut(tensor, sizes)
        if not chunks:
            raise MeshError(Code.INVALID_ARGUMENT, "a step needs at least one token")
        if not self._begun:
            self._begun = True
            await self._reserve()
        answers: list[Answer] = []
        header = self._header(self.route, tensor)
        try:
            await self._sender.send(self.route, header, chunks, (others or want, want), answers)
        finally:
            self.position += sum(chunk.shape[1] for chunk in chunks[: len(answers)])
        self._apart.clear()
        self._has_shown = True
        return answers

    async def feed(
        self, hops: Route, token_ids: Sequence[int], *, sizes: Sequence[int] | None = None
    ) -> None:
        """Have hops that replace the route's first ones compute the session's first tokens.

        Args:
            hops: the replacements, in order.
            token_ids: all that the other hops hold.
            sizes: of the chunks; None cuts by `PipelineSettings.chunk_tokens`.

        Raises:
            MeshError: of the node at fault.
        """
        self.epoch += 1
        self.spread(hops)
        tensor = np.asarray(token_ids, dtype=np.int32)[None]
        header = self._header(hops, tensor)._replace(position=0, journal=True, grant=self._grant)
        wants = (_NO_ANSWER, _NO_ANSWER)
        await self._sender.send(hops, header, self._cut(tensor, sizes), wants, [])

    async def rebuild(self, before: Hop, hops: Route, mode: RebuildMode) -> None:
        """Have a node feed its journal to the hops that replace those after it.

        Raises:
            NextHopError: naming the node or the replacement that failed.
            MeshError: what one of them answered.
        """
        self.epoch += 1
        self.spread(hops)
        asked = Rebuild(
            self.session, self.position, hops, mode, self._max_tokens, self.epoch, self._grant
        )
        await self._client.rebuild(
            before.address, before.node, asked, timeout_s=self._settings.step_timeout_s
        )

    def show(self, grant: str | None) -> None:
        """Show nodes this grant from now on.

        It goes with all that is asked beside the route's steps, and with the steps until one
        has gone over the whole route.
        """
        if grant != self._grant:
            self._grant = grant
            self._has_shown = False

    def spread(self, route: Route) -> None:
        """Note that the session may be held at `route` too, of which its other hops do not know.

        Until a step has gone over the pipeline's route, closing frees each hop by itself.
        """
        self._apart.update((hop.address, hop.node) for hop in (*self.route, *route))

    def reroute(self, route: Route) -> None:
        """Go on over another route, whose hops hold the session's caches."""
        self.spread(route)
        self.route = route
        self.epoch += 1

    def strays(self) -> dict[str, NodeId]:
        """Give nodes, by address, that may hold the session though its route has left them."""
        addresses = {hop.address for hop in self.route}
        return {place: node for place, node in self._apart.items() if place not in addresses}

    async def leave(self, places: Mapping[str, NodeId]) -> None:
        """Free the session at nodes that its route has left, and nowhere else."""
        await asyncio.gather(*(self._release(*place, alone=True) for place in places.items()))

    async def own(self) -> None:
        """Tell hops that have joined the route whose session they hold, if they care to know."""
        try:
            await self._reserve()
        except MeshError as error:
            _log.debug("session %s: some hops do not know its owner: %s", self.session, error)

    async def _reserve(self) -> None:
        """Have every hop hold the session's cache before anything is computed.

        Nodes that know no reservations make one with the first chunk, each for itself.
        """
        if self._max_tokens is None:
            return
        first = self.route[0]
        asked = Reservation(
            self.session,
            self._max_tokens,
            first.layers,
            self.route[1:],
            self._owner,
            self._grant,
        )
        try:
            await self._client.reserve(
                first.address, first.node, asked, timeout_s=self._settings.step_timeout_s
            )
        except MeshError as error:
            if error.code not in _NOT_KNOWN:
                raise
            _log.debug("session %s: reserves as it goes: %s", self.session, error)

    async def close(self) -> None:
        """Free the session's caches along the route; a silent node frees them by idle time."""
        if self._closed:
            return
        self._closed = True
        if not self._begun:
            return
        first = self.route[0]
        places = {**self._apart, first.address: first.node}
        await asyncio.gather(*(self._release(*place) for place in places.items()))

    async def _release(self, address: str, node: NodeId, *, alone: bool = False) -> None:
        try:
            await self._client.release(address, self.session, alone=alone, node=node)
        except MeshError as error:
            level = logging.DEBUG if alone else logging.WARNING  # who was left is often dead
            _log.log(level, "session %s: release failed: %s", self.session, error)

    def _cut(self, tensor: npt.NDArray[Any], sizes: Sequence[int] | None) -> list[npt.NDArray[Any]]:
        if sizes is None:
            return split_tokens(tensor, self._settings.chunk_tokens)
        return cut_tokens(tensor, sizes)

    def _header(self, route: Route, tensor: npt.NDArray[Any]) -> ChunkHeader:
        """Give what the chunks of a tensor have in common, at the session's position."""
        phase = Phase.PREFILL if tensor.shape[1] > 1 else Phase.DECODE
        return ChunkHeader(
            shape=tensor.shape,
            dtype=INT32 if tensor.dtype == np.int32 else BFLOAT16,
            session=self.session,
            position=self.position,
            layers=route[0].layers,
            phase=phase,
            accept_encoding=ENCODINGS if phase is Phase.PREFILL else (),
            route=route[1:],
            epoch=self.epoch,
            grant=None if self._has_shown else self._grant,
        )
