"""A session that outlives its nodes: on a failure it goes on over another route.

`RoutedSession` knows the ways, this module what is tried when, and for how long. Random
streams, penalties and stop strings live in the gateway and are never lost with a node.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

from meshnet.errors import CacheFullError, MeshError, NextHopError, RouteError
from meshnet.grammar import Want
from meshnet.topology import Hop, NodeId
from meshnet_gateway.lost import WRONG_NUMBERS
from meshnet_gateway.pipeline import new_session
from meshnet_gateway.recoveries import Way, can_recover, with_cause
from meshnet_gateway.repairs import keep_layers
from meshnet_gateway.routed import RoutedSession, Shared
from meshnet_gateway.selection import SelectedRoute
from meshnet_gateway.steps import StepOutput

__all__ = ["RecoveringPipeline", "RecoveringPipelines"]

_log = logging.getLogger(__name__)

_TRIES_A_STEP: Final = 5
_HEALTH_TIMEOUT_S: Final = 1.0
_AGAIN_S: Final = 0.5
"""Until a node that was full, or failed again, is tried once more; others may come meanwhile."""


class RecoveringPipelines:
    """A `PipelineFactory` whose sessions go on when nodes fail."""

    def __init__(self, shared: Shared) -> None:
        self.shared = shared

    async def open(self, model: str, *, max_tokens: int) -> RecoveringPipeline:
        """Select a route for `model` and begin a session on it; waits as `select` does.

        Raises:
            RouteError: the model is unknown, or its layers stay uncovered.
        """
        shared, session = self.shared, new_session()
        route = await shared.selector.select(
            model, session, max_tokens=max_tokens, wait_s=shared.recovery.spare_wait_s
        )
        shared.counts.opened += 1
        routed = RoutedSession(shared, model, max_tokens, route, session)
        return RecoveringPipeline(shared, model, max_tokens, routed)


class RecoveringPipeline:
    """One session, on one route after another.

    Args:
        shared: of the gateway.
        model: name in the mesh.
        max_tokens: that the session will need in all.
        routed: the session, on its first route.
    """

    def __init__(self, shared: Shared, model: str, max_tokens: int, routed: RoutedSession) -> None:
        self._shared = shared
        self._model = model
        self._max_tokens = max_tokens
        self._routed = routed

    async def step(self, token_ids: Sequence[int], want: Want) -> StepOutput:
        """Feed the session's next tokens; a failure on the way is a pause, not an error.

        Raises:
            MeshError: no other route was found in time, or what no other route can mend.
        """
        routed = self._routed
        routed.history.add(token_ids)
        error = None
        try:
            await routed.leave_draining()
            return await routed.step(token_ids, want)
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
        await self._routed.close()

    async def _recover(self, error: MeshError, want: Want) -> tuple[StepOutput, Way]:
        """Find a route without what failed, and go on over it.

        Raises:
            MeshError: this route failed too, or there is none.
        """
        routed = self._routed
        if isinstance(error, NextHopError):
            node = NodeId(error.failed_node)
            routed.failed[node] = routed.incarnations.get(node, 0)
            self._shared.selector.suspects.add(node)
        _log.warning("session %s: %s", routed.id, error)
        if error.reason == WRONG_NUMBERS:
            routed.is_spoiled = True  # the caches after that node too
        route = await self._replace()
        if routed.is_spoiled:
            return await routed.replay(route, want, error)
        try:
            way = await routed.rebuild(route)
            return await routed.go_on(want), way
        except (NextHopError, CacheFullError):
            raise
        except MeshError as failure:
            reason = failure
        return await routed.replay(route, want, reason)

    async def _replace(self) -> SelectedRoute:
        """Select a route without the nodes that failed, that keeps the others as they are."""
        routed = self._routed
        healthy = {
            node: start
            for node, start in routed.route.incarnations.items()
            if node not in routed.failed
        }
        route = await self._shared.selector.replace(
            self._model,
            routed.id,
            max_tokens=self._max_tokens,
            failed=routed.failed,
            healthy=healthy,
            borders=routed.route.borders,
            answers=self._answers,
            wait_s=self._shared.recovery.spare_wait_s,
        )
        routed.incarnations.update(route.incarnations)
        return keep_layers(routed.route, route)

    async def _answers(self, hop: Hop) -> bool:
        """Tell whether a node that failed says that it is well."""
        try:
            status, _ = await self._shared.client.get(
                hop.address, "/healthz", timeout_s=_HEALTH_TIMEOUT_S
            )
        except MeshError:
            return False
        return status == HTTPStatus.OK

    def _count(self, way: Way, pause_s: float) -> None:
        counts = self._shared.counts
        counts.ways[way] += 1
        counts.pause_s += pause_s
        self._shared.selector.suspects.clear(self._routed.nodes)
        _log.warning(
            "session %s: goes on after %.2f s over %s, by %s",
            self._routed.id,
            pause_s,
            ", ".join(hop.node for hop in self._routed.route.hops),
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
