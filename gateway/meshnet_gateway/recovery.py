"""A session that outlives its nodes: on a failure it goes on over another route.

The gateway keeps the session's token ids, and nothing else is needed to rebuild every
cache. Random streams, penalties and stop strings live here and are never lost with a node.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from typing import Final

from meshnet.errors import (
    Code,
    MeshError,
    NextHopError,
    PositionError,
    RouteError,
    UnknownSessionError,
)
from meshnet.grammar import Want
from meshnet.plane.client import PlaneClient
from meshnet.topology import Hop, NodeId
from meshnet_gateway.draining import DrainingNodes
from meshnet_gateway.lost import LostNodes
from meshnet_gateway.moving import Departure, SessionMoves
from meshnet_gateway.pipeline import PipelineSettings, RoutePipeline
from meshnet_gateway.selection import RouteSelector, SelectedRoute
from meshnet_gateway.steps import StepOutput

__all__ = ["RecoveringPipeline", "RecoveringPipelines", "Recovery", "RecoverySettings"]

_log = logging.getLogger(__name__)

_TRIES_A_STEP: Final = 5
_HEALTH_TIMEOUT_S: Final = 1.0
_AGAIN: Final = (
    Code.UNAVAILABLE,
    Code.INTERNAL,
    Code.DATA_LOSS,
    Code.DEADLINE_EXCEEDED,
    Code.NEXT_HOP_FAILED,
)


class Recovery(StrEnum):
    """How the tokens so far are fed to the new route."""

    FAST = "fast"
    """In prefill chunks: quick; in bfloat16 kernels round differently by shape, so that the
    text may go on differently where two tokens are nearly equal."""
    EXACT = "exact"
    """In the very steps of the first time: the same bits, and as many steps."""


@dataclass(frozen=True, slots=True)
class RecoverySettings:
    """What a session does when its route breaks.

    Attributes:
        mode: how to feed the tokens again.
        spare_wait_s: seconds to wait for nodes that cover the layers.
    """

    mode: Recovery = Recovery.FAST
    spare_wait_s: float = 30.0


@dataclass(slots=True)
class RecoveryCounts:
    """What happened so far, for metrics.

    Attributes:
        opened: sessions begun.
        recovered: times that a session went on over another route.
        abandoned: sessions that ended with an error all the same.
        replayed_tokens: tokens fed again.
        pause_s: seconds from noticing to the next token, summed.
    """

    opened: int = 0
    recovered: int = 0
    abandoned: int = 0
    replayed_tokens: int = 0
    pause_s: float = 0.0


class RecoveringPipelines:
    """A `PipelineFactory` whose sessions go on when nodes fail."""

    def __init__(
        self,
        selector: RouteSelector,
        client: PlaneClient,
        lost: LostNodes,
        draining: DrainingNodes,
        pipeline: PipelineSettings,
        recovery: RecoverySettings,
    ) -> None:
        self.counts = RecoveryCounts()
        self.moves = SessionMoves(selector, client, draining, timeout_s=pipeline.step_timeout_s)
        self.selector = selector
        self.client = client
        self.lost = lost
        self.pipeline = pipeline
        self.recovery = recovery

    async def open(self, model: str, *, max_tokens: int) -> RecoveringPipeline:
        """Select a route for `model` and begin a session on it; waits as `select` does.

        Raises:
            RouteError: the model is unknown, or its layers stay uncovered.
        """
        route = await self.selector.select(
            model, max_tokens=max_tokens, wait_s=self.recovery.spare_wait_s
        )
        self.counts.opened += 1
        return RecoveringPipeline(self, model, max_tokens, route)


class RecoveringPipeline:
    """One session, on one route after another.

    Args:
        shared: of the gateway.
        model: name in the mesh.
        max_tokens: that the session will need in all.
        route: to begin with.
    """

    def __init__(
        self, shared: RecoveringPipelines, model: str, max_tokens: int, route: SelectedRoute
    ) -> None:
        self._shared = shared
        self._model = model
        self._max_tokens = max_tokens
        self._failed: dict[NodeId, int] = {}
        self._steps: list[list[int]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._departure = Departure(shared.moves, model, max_tokens)
        self._begin(route)

    async def step(self, token_ids: Sequence[int], want: Want) -> StepOutput:
        """Feed the session's next tokens; a failure on the way is a pause, not an error.

        Raises:
            MeshError: no other route was found in time, or what no other route can mend.
        """
        self._steps.append(list(token_ids))
        error = None
        try:
            await self._leave_draining()
            return await self._guarded(token_ids, want)
        except MeshError as failure:
            if not _can_recover(failure):
                raise
            error = first = failure
        noticed = time.perf_counter()
        for _ in range(_TRIES_A_STEP):
            try:
                output = await self._recover(error, want)
            except MeshError as failure:
                if isinstance(failure, RouteError) or not _can_recover(failure):
                    self._shared.counts.abandoned += 1
                    raise _after(failure, first) from first
                error = failure
            else:
                pause_s = time.perf_counter() - noticed
                self._shared.counts.recovered += 1
                self._shared.counts.pause_s += pause_s
                _log.warning(
                    "session %s: goes on after %.2f s over %s",
                    self._pipeline.session,
                    pause_s,
                    ", ".join(hop.node for hop in self._route.hops),
                )
                return output
        self._shared.counts.abandoned += 1
        raise _after(error, first) from first

    async def close(self) -> None:
        """Free the session's caches, also on routes that it has left."""
        await self._departure.close()
        await self._pipeline.close()
        if self._closing:
            await asyncio.wait(self._closing)

    async def _leave_draining(self) -> None:
        """Move the session off nodes that drain, where others are found to take its layers over.

        Raises:
            NextHopError: it could not be moved, and is to be rebuilt without them.
        """
        route = self._departure.find(self._route)
        if route is None or not self._pipeline.position:
            return
        self._pipeline.spread(route.hops)
        with self._shared.lost.guard(self._nodes | route.incarnations.keys()):
            has_moved = await self._shared.moves.ship(
                self._pipeline.session, self._pipeline.position, self._route, route
            )
        if has_moved:
            self._pipeline.reroute(route.hops)
            self._use(route)
        else:
            self._departure.stay()

    def _use(self, route: SelectedRoute) -> None:
        self._route = route
        self._nodes = frozenset(route.incarnations)

    def _begin(self, route: SelectedRoute) -> None:
        self._use(route)
        self._pipeline = RoutePipeline(
            self._shared.client, route.hops, self._shared.pipeline, max_tokens=self._max_tokens
        )

    async def _guarded(
        self, token_ids: Sequence[int], want: Want, sizes: Sequence[int] | None = None
    ) -> StepOutput:
        with self._shared.lost.guard(self._nodes):
            return await self._pipeline.step(token_ids, want, sizes=sizes)

    async def _recover(self, error: MeshError, want: Want) -> StepOutput:
        """Leave the route, take another, feed every token again."""
        if isinstance(error, NextHopError):
            node = NodeId(error.failed_node)
            self._failed[node] = self._route.incarnations.get(node, 0)
        _log.warning("session %s: %s", self._pipeline.session, error)
        self._pipeline.spread(())  # the hops after one that failed hear of it from none else
        task = asyncio.create_task(self._pipeline.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        healthy = {
            node: start
            for node, start in self._route.incarnations.items()
            if node not in self._failed
        }
        route = await self._shared.selector.replace(
            self._model,
            max_tokens=self._max_tokens,
            failed=self._failed,
            healthy=healthy,
            answers=self._answers,
            wait_s=self._shared.recovery.spare_wait_s,
        )
        self._begin(route)
        tokens = [token for step in self._steps for token in step]
        self._shared.counts.replayed_tokens += len(tokens)
        return await self._guarded(tokens, want, self._sizes())

    async def _answers(self, hop: Hop) -> bool:
        """Tell whether a node that failed says that it is well."""
        try:
            status, _ = await self._shared.client.get(
                hop.address, "/healthz", timeout_s=_HEALTH_TIMEOUT_S
            )
        except MeshError:
            return False
        return status == HTTPStatus.OK

    def _sizes(self) -> list[int] | None:
        """Give the chunks to replay in: those of the first time, or None for the usual ones."""
        if self._shared.recovery.mode is Recovery.FAST:
            return None
        most = self._shared.pipeline.chunk_tokens
        return [
            min(most, len(step) - start)
            for step in self._steps
            for start in range(0, len(step), most)
        ]


def _after(error: MeshError, first: MeshError) -> MeshError:
    """Have an error say too what another route was needed for."""
    error.message = f"{error.message}; another route was needed, since {first.message}"
    error.args = (error.message,)
    return error


def _can_recover(error: MeshError) -> bool:
    """Tell whether another route could serve what this one could not."""
    if isinstance(error, PositionError | UnknownSessionError | NextHopError):
        return True
    return error.code in _AGAIN or error.reason == "SESSION_RELEASED"
