"""A session that outlives its nodes: on a failure it goes on over another route.

Nodes that are kept keep their caches; a lost cache is computed again from what the node
before it had sent on. Where that does not work the gateway feeds the session's token ids,
which it keeps: nothing else is needed to rebuild every cache. Random streams, penalties
and stop strings live here and are never lost with a node.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Sequence
from http import HTTPStatus
from typing import Final

from meshnet.errors import (
    CacheFullError,
    Code,
    MeshError,
    NextHopError,
    RouteError,
)
from meshnet.grammar import Want
from meshnet.operations import RebuildMode
from meshnet.plane.client import PlaneClient
from meshnet.topology import Hop, NodeId, SessionId
from meshnet_gateway.draining import DrainingNodes
from meshnet_gateway.lost import WRONG_NUMBERS, LostNodes
from meshnet_gateway.moving import Departure, SessionMoves
from meshnet_gateway.pipeline import PipelineSettings, RoutePipeline, new_session
from meshnet_gateway.presence import Presence
from meshnet_gateway.recoveries import (
    RecoveryCounts,
    RecoverySettings,
    Way,
    can_recover,
    with_cause,
)
from meshnet_gateway.repairs import Repair, keep_layers, plan_repairs, widen
from meshnet_gateway.selection import RouteSelector, SelectedRoute
from meshnet_gateway.steps import StepOutput

__all__ = ["RecoveringPipeline", "RecoveringPipelines"]

_log = logging.getLogger(__name__)

_TRIES_A_STEP: Final = 5
_HEALTH_TIMEOUT_S: Final = 1.0
_AGAIN_S: Final = 0.5
"""Until a node that was full, or failed again, is tried once more; others may come meanwhile."""


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
        presence: Presence,
    ) -> None:
        self.presence = presence
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
        session = new_session()
        route = await self.selector.select(
            model, session, max_tokens=max_tokens, wait_s=self.recovery.spare_wait_s
        )
        self.counts.opened += 1
        return RecoveringPipeline(self, model, max_tokens, route, session)


class RecoveringPipeline:
    """One session, on one route after another.

    Args:
        shared: of the gateway.
        model: name in the mesh.
        max_tokens: that the session will need in all.
        route: to begin with.
        session: that it was selected for.
    """

    def __init__(
        self,
        shared: RecoveringPipelines,
        model: str,
        max_tokens: int,
        route: SelectedRoute,
        session: SessionId,
    ) -> None:
        self._shared = shared
        self._model = model
        self._max_tokens = max_tokens
        self._failed: dict[NodeId, int] = {}
        self._incarnations = dict(route.incarnations)
        self._steps: list[list[int]] = []
        self._closing: set[asyncio.Task[None]] = set()
        self._is_spoiled = False
        self._departure = Departure(shared.moves, model, max_tokens)
        self._begin(route, session)

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
            if not can_recover(failure):
                raise
            error = first = failure
        noticed = time.perf_counter()
        tries = 0
        known: set[str] = set()
        while tries < _TRIES_A_STEP:
            try:
                output, way = await self._recover(error, want)
            except MeshError as failure:
                error = failure
                if self._may_pass(failure, known, noticed):
                    await asyncio.sleep(_AGAIN_S)
                    continue
                if isinstance(failure, RouteError) or not can_recover(failure):
                    break
                tries += 1
            else:
                self._count(way, time.perf_counter() - noticed)
                return output
        self._shared.counts.abandoned += 1
        raise with_cause(error, first) from first

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
        route = self._departure.find(self._pipeline.session, self._route)
        if route is None or not self._pipeline.position:
            return
        try:
            route = await self._granted(route)
        except MeshError as error:
            _log.info("session %s stays for now: %s", self._pipeline.session, error)
            self._departure.stay()
            return
        self._pipeline.spread(route.hops)
        with self._shared.lost.guard(self._nodes | route.incarnations.keys()):
            has_moved = await self._shared.moves.ship(
                self._pipeline.session, self._pipeline.position, self._route, route
            )
        if has_moved:
            self._pipeline.reroute(route.hops)
            self._pipeline.show(route.token)
            self._use(route)
            try:
                await self._show(route)
            except MeshError as error:
                _log.debug("session %s: no newer grant: %s", self._pipeline.session, error)
        else:
            self._departure.stay()

    def _use(self, route: SelectedRoute) -> None:
        self._route = route
        self._incarnations.update(route.incarnations)
        self._nodes = frozenset(route.incarnations)
        for node in self._nodes:
            self._failed.pop(node, None)  # it answers again
        self._shared.presence.show(route.hops)

    def _begin(self, route: SelectedRoute, session: SessionId) -> None:
        self._use(route)
        self._is_spoiled = False
        self._pipeline = RoutePipeline(
            self._shared.client,
            route.hops,
            self._shared.pipeline,
            max_tokens=self._max_tokens,
            owner=self._shared.presence.owner,
            session=session,
            grant=route.token,
        )

    async def _guarded(
        self, token_ids: Sequence[int], want: Want, sizes: Sequence[int] | None = None
    ) -> StepOutput:
        with self._shared.lost.guard(self._nodes):
            return await self._pipeline.step(token_ids, want, sizes=sizes)

    async def _recover(self, error: MeshError, want: Want) -> tuple[StepOutput, Way]:
        """Find a route without what failed, and go on over it.

        Raises:
            MeshError: this route failed too, or there is none.
        """
        if isinstance(error, NextHopError):
            node = NodeId(error.failed_node)
            self._failed[node] = self._incarnations.get(node, 0)
            self._shared.selector.suspects.add(node)
        _log.warning("session %s: %s", self._pipeline.session, error)
        if error.reason == WRONG_NUMBERS:
            self._is_spoiled = True  # the caches after that node too
        route = await self._replace()
        if self._is_spoiled:
            return await self._replay(route, want, error)
        try:
            way = await self._rebuild(route)
            return await self._go_on(want), way
        except (NextHopError, CacheFullError):
            raise
        except MeshError as failure:
            reason = failure
        return await self._replay(route, want, reason)

    async def _replace(self) -> SelectedRoute:
        """Select a route without the nodes that failed, that keeps the others as they are."""
        healthy = {
            node: start
            for node, start in self._route.incarnations.items()
            if node not in self._failed
        }
        route = await self._shared.selector.replace(
            self._model,
            self._pipeline.session,
            max_tokens=self._max_tokens,
            failed=self._failed,
            healthy=healthy,
            borders=self._route.borders,
            answers=self._answers,
            wait_s=self._shared.recovery.spare_wait_s,
        )
        self._incarnations.update(route.incarnations)
        return keep_layers(self._route, route)

    async def _rebuild(self, route: SelectedRoute) -> Way:
        """Have the caches that `route` lacks computed again, and take it.

        Raises:
            MeshError: they cannot be.
        """
        pipeline = self._pipeline
        repairs = plan_repairs(self._route, route)
        if repairs is None or not pipeline.position:
            raise MeshError(Code.ABORTED, "no node of the new route holds any of them")
        with self._shared.lost.guard(frozenset(route.incarnations)):
            for repair in repairs:
                route = await self._show(route)
                await self._repair(repair, route)
            route = await self._show(route)
        pipeline.reroute(route.hops)
        self._use(route)
        if repairs:
            with self._shared.lost.guard(self._nodes):
                await pipeline.own()
        self._in_background(pipeline.leave(pipeline.strays()))
        return Way.JOURNAL if repairs else Way.RESENT

    async def _granted(self, route: SelectedRoute) -> SelectedRoute:
        """Give the route with a grant for this session, where nodes ask for one.

        Raises:
            MeshError: of `RouteSelector.granted`.
        """
        return await self._shared.selector.granted(self._model, self._pipeline.session, route)

    async def _show(self, route: SelectedRoute) -> SelectedRoute:
        """The same, and show that grant to nodes from now on."""
        route = await self._granted(route)
        self._pipeline.show(route.token)
        return route

    async def _repair(self, repair: Repair, route: SelectedRoute) -> None:
        """Have caches computed again, with those before them whose nodes keep no journal.

        A cache that was moved to its node came without one.
        """
        try:
            await self._compute_again(repair)
        except MeshError as error:
            wider = widen(repair, route.hops)
            if error.reason != "JOURNAL_LOST" or wider is None:
                raise
            await self._repair(wider, route)

    async def _compute_again(self, repair: Repair) -> None:
        pipeline, mode = self._pipeline, self._shared.recovery.mode
        _log.info(
            "session %s: %d tokens of layers %d-%d are computed again at %s, in mode %s, from %s",
            pipeline.session,
            pipeline.position,
            repair.hops[0].layers.start,
            repair.hops[-1].layers.end,
            ", ".join(hop.node for hop in repair.hops),
            mode,
            f"the journal of {repair.before.node}" if repair.before else "the token ids",
        )
        if repair.before is not None:
            await pipeline.rebuild(repair.before, repair.hops, mode)
        else:
            tokens = self._tokens()[: pipeline.position]
            await pipeline.feed(repair.hops, tokens, sizes=self._sizes(0, pipeline.position))
        self._shared.counts.recomputed_tokens[Way.JOURNAL] += pipeline.position

    async def _go_on(self, want: Want) -> StepOutput:
        """Feed the tokens that the caches lack."""
        tokens, start = self._tokens(), self._pipeline.position
        return await self._guarded(tokens[start:], want, self._sizes(start, len(tokens)))

    async def _replay(
        self, route: SelectedRoute, want: Want, reason: MeshError
    ) -> tuple[StepOutput, Way]:
        """Begin a new session on `route`, and feed every token again."""
        num_computed = self._pipeline.position
        if num_computed:
            _log.warning(
                "session %s: all of its %d tokens are computed again: %s",
                self._pipeline.session,
                num_computed,
                reason,
            )
        self._pipeline.spread(())  # the hops after one that failed hear of it from none else
        self._in_background(self._pipeline.close())
        session = new_session()
        self._begin(await self._shared.selector.granted(self._model, session, route), session)
        self._shared.counts.recomputed_tokens[Way.REPLAY] += num_computed
        return await self._go_on(want), Way.REPLAY if num_computed else Way.ANEW

    def _count(self, way: Way, pause_s: float) -> None:
        counts = self._shared.counts
        counts.ways[way] += 1
        counts.pause_s += pause_s
        self._shared.selector.suspects.clear(self._nodes)
        _log.warning(
            "session %s: goes on after %.2f s over %s, by %s",
            self._pipeline.session,
            pause_s,
            ", ".join(hop.node for hop in self._route.hops),
            way,
        )

    def _may_pass(self, failure: MeshError, known: set[str], since: float) -> bool:
        """Tell whether to wait for what failed: a node without room, or one that fails again.

        `known` are the nodes that failed before; one more is left, and not waited for.
        """
        if isinstance(failure, NextHopError):
            is_known = failure.failed_node in known
            known.add(failure.failed_node)
            if not is_known:
                return False
        elif not isinstance(failure, CacheFullError):
            return False
        return time.perf_counter() + _AGAIN_S < since + self._shared.recovery.spare_wait_s

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        """Do what nobody waits for before the session ends."""
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _tokens(self) -> list[int]:
        return [token for step in self._steps for token in step]

    async def _answers(self, hop: Hop) -> bool:
        """Tell whether a node that failed says that it is well."""
        try:
            status, _ = await self._shared.client.get(
                hop.address, "/healthz", timeout_s=_HEALTH_TIMEOUT_S
            )
        except MeshError:
            return False
        return status == HTTPStatus.OK

    def _sizes(self, start: int, end: int) -> list[int] | None:
        """Give the chunks to feed tokens in: those of the first time, or None for the usual ones.

        `start` and `end` are where chunks of the first time began or ended.
        """
        if self._shared.recovery.mode is RebuildMode.FAST:
            return None
        most = self._shared.pipeline.chunk_tokens
        found = []
        position = 0
        for step in self._steps:
            for first in range(0, len(step), most):
                size = min(most, len(step) - first)
                if start <= position < end:
                    found.append(size)
                position += size
        return found
