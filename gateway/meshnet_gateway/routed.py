"""One session on one route after another: each way to take it over, without deciding when.

Nodes that are kept keep their caches; a lost cache is computed again from what the node
before it had sent on, or from the session's token ids, which the gateway keeps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field

from meshnet.errors import Code, MeshError
from meshnet.grammar import Want
from meshnet.plane.client import PlaneClient
from meshnet.topology import NodeId, SessionId
from meshnet_gateway.history import History
from meshnet_gateway.lost import LostNodes
from meshnet_gateway.moving import Departure, SessionMoves
from meshnet_gateway.pipeline import PipelineSettings, RoutePipeline, new_session
from meshnet_gateway.presence import Presence
from meshnet_gateway.recoveries import RecoveryCounts, RecoverySettings, Way
from meshnet_gateway.repairs import Repair, plan_repairs, widen
from meshnet_gateway.selection import RouteSelector, SelectedRoute
from meshnet_gateway.steps import StepOutput

__all__ = ["RoutedSession", "Shared"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shared:
    """What the sessions of one gateway share.

    Attributes:
        selector: of routes.
        client: the activation plane's.
        lost: interrupts what waits for nodes that are lost.
        moves: off nodes that drain.
        pipeline: how chunks are cut, and how long they may take.
        recovery: what a session does when its route breaks.
        presence: shows nodes that the gateway lives.
        counts: of what happened.
    """

    selector: RouteSelector
    client: PlaneClient
    lost: LostNodes
    moves: SessionMoves
    pipeline: PipelineSettings
    recovery: RecoverySettings
    presence: Presence
    counts: RecoveryCounts = field(default_factory=RecoveryCounts)


class RoutedSession:
    """One session, and the route that it has now.

    Args:
        shared: of the gateway.
        model: name in the mesh.
        max_tokens: that the session will need in all.
        route: to begin with.
        session: that it was selected for.

    Attributes:
        history: what it was fed.
        route: that it runs on.
        nodes: of that.
        failed: starts of nodes that failed since they last answered.
        incarnations: of all nodes that it ever had.
        is_spoiled: what its caches hold is of no use.
    """

    def __init__(
        self,
        shared: Shared,
        model: str,
        max_tokens: int,
        route: SelectedRoute,
        session: SessionId,
    ) -> None:
        self.history = History(shared.pipeline.chunk_tokens, shared.recovery.mode)
        self.failed: dict[NodeId, int] = {}
        self.incarnations = dict(route.incarnations)
        self._shared = shared
        self._model = model
        self._max_tokens = max_tokens
        self._closing: set[asyncio.Task[None]] = set()
        self._departure = Departure(shared.moves, model, max_tokens)
        self._begin(route, session)

    @property
    def id(self) -> SessionId:
        """Its id at nodes now; another one after a `replay`."""
        return self._pipeline.session

    async def step(
        self, token_ids: Sequence[int], want: Want, sizes: Sequence[int] | None = None
    ) -> StepOutput:
        """Feed tokens over the route.

        Raises:
            MeshError: of the node at fault.
        """
        with self._shared.lost.guard(self.nodes):
            return await self._pipeline.step(token_ids, want, sizes=sizes)

    async def close(self) -> None:
        """Free the session's caches, also on routes that it has left."""
        await self._departure.close()
        await self._pipeline.close()
        if self._closing:
            await asyncio.wait(self._closing)

    async def leave_draining(self) -> None:
        """Move the session off nodes that drain, where others are found to take its layers over.

        Raises:
            NextHopError: it could not be moved, and is to be rebuilt without them.
        """
        route = self._departure.find(self._pipeline.session, self.route)
        if route is None or not self._pipeline.position:
            return
        try:
            route = await self._granted(route)
        except MeshError as error:
            _log.info("session %s stays for now: %s", self.id, error)
            self._departure.stay()
            return
        self._pipeline.spread(route.hops)
        with self._shared.lost.guard(self.nodes | route.incarnations.keys()):
            has_moved = await self._shared.moves.ship(
                self.id, self._pipeline.position, self.route, route
            )
        if has_moved:
            self._pipeline.reroute(route.hops)
            self._pipeline.show(route.token)
            self._use(route)
            try:
                await self._show(route)
            except MeshError as error:
                _log.debug("session %s: no newer grant: %s", self.id, error)
        else:
            self._departure.stay()

    async def rebuild(self, route: SelectedRoute) -> Way:
        """Have the caches that `route` lacks computed again, and take it.

        Raises:
            MeshError: they cannot be.
        """
        pipeline = self._pipeline
        repairs = plan_repairs(self.route, route)
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
            with self._shared.lost.guard(self.nodes):
                await pipeline.own()
        self._in_background(pipeline.leave(pipeline.strays()))
        return Way.JOURNAL if repairs else Way.RESENT

    async def replay(
        self, route: SelectedRoute, want: Want, reason: MeshError
    ) -> tuple[StepOutput, Way]:
        """Begin a new session on `route`, and feed every token again.

        Raises:
            MeshError: of the node at fault.
        """
        num_computed = self._pipeline.position
        if num_computed:
            _log.warning(
                "session %s: all of its %d tokens are computed again: %s",
                self.id,
                num_computed,
                reason,
            )
        self._pipeline.spread(())  # the hops after one that failed hear of it from none else
        self._in_background(self._pipeline.close())
        session = new_session()
        self._begin(await self._shared.selector.granted(self._model, session, route), session)
        self._shared.counts.recomputed_tokens[Way.REPLAY] += num_computed
        return await self.go_on(want), Way.REPLAY if num_computed else Way.ANEW

    async def go_on(self, want: Want) -> StepOutput:
        """Feed the tokens that the caches lack.

        Raises:
            MeshError: of the node at fault.
        """
        tokens, start = self.history.tokens(), self._pipeline.position
        return await self.step(tokens[start:], want, self.history.sizes(start, len(tokens)))

    def _begin(self, route: SelectedRoute, session: SessionId) -> None:
        self._use(route)
        self.is_spoiled = False
        self._pipeline = RoutePipeline(
            self._shared.client,
            route.hops,
            self._shared.pipeline,
            max_tokens=self._max_tokens,
            owner=self._shared.presence.owner,
            session=session,
            grant=route.token,
        )

    def _use(self, route: SelectedRoute) -> None:
        self.route = route
        self.incarnations.update(route.incarnations)
        self.nodes = frozenset(route.incarnations)
        for node in self.nodes:
            self.failed.pop(node, None)  # it answers again
        self._shared.presence.show(route.hops)

    async def _granted(self, route: SelectedRoute) -> SelectedRoute:
        """Give the route with a grant for this session, where nodes ask for one.

        Raises:
            MeshError: of `RouteSelector.granted`.
        """
        return await self._shared.selector.granted(self._model, self.id, route)

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
            self.id,
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
            tokens = self.history.tokens()[: pipeline.position]
            sizes = self.history.sizes(0, pipeline.position)
            await pipeline.feed(repair.hops, tokens, sizes=sizes)
        self._shared.counts.recomputed_tokens[Way.JOURNAL] += pipeline.position

    def _in_background(self, work: Coroutine[None, None, None]) -> None:
        """Do what nobody waits for before the session ends."""
        task = asyncio.create_task(work)
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
