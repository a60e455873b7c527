"""Moves sessions off nodes that drain: their KV cache goes to other nodes between two steps."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from meshnet.cache_wire import MoveHeader
from meshnet.errors import Code, MeshError, NextHopError
from meshnet.plane.client import PlaneClient
from meshnet.topology import Hop, NodeId, Route, SessionId
from meshnet_gateway.draining import DrainingNodes
from meshnet_gateway.repairs import keep_layers
from meshnet_gateway.selection import RouteSelector, SelectedRoute

__all__ = ["Departure", "MoveCounts", "SessionMoves", "replacements"]

_log = logging.getLogger(__name__)

_LOOK_AGAIN_S: Final = 1.0
"""How long a session stays before another node is looked for again."""


@dataclass(slots=True)
class MoveCounts:
    """What was moved so far, for metrics.

    Attributes:
        moved: times that a session left nodes that drain with its cache.
        failed: times that this failed, and the session was rebuilt elsewhere.
        pause_s: seconds that moving took, summed.
    """

    moved: int = 0
    failed: int = 0
    pause_s: float = 0.0


class SessionMoves:
    """Moves the sessions of one gateway.

    Args:
        selector: finds where they can go.
        client: asks nodes to hand their caches over.
        draining: which nodes are to be left.
        timeout_s: that handing over may take.
    """

    def __init__(
        self,
        selector: RouteSelector,
        client: PlaneClient,
        draining: DrainingNodes,
        *,
        timeout_s: float,
    ) -> None:
        self.counts = MoveCounts()
        self.draining = draining
        self.selector = selector
        self._client = client
        self._timeout_s = timeout_s

    async def ship(
        self, session: SessionId, position: int, old: SelectedRoute, new: SelectedRoute
    ) -> bool:
        """Hand the caches of a session's nodes that `new` leaves out to those it has instead.

        Gives False where the session is best left where it is for now.

        Raises:
            NextHopError: naming a node that could not be left; the session may be in both
                places then, and goes on in neither for sure.
        """
        began = time.perf_counter()
        leaving = old.incarnations.keys() - new.incarnations.keys()
        moved = False
        try:
            for hop, hops in replacements(old.hops, new.hops, leaving):
                asked = MoveHeader(session, hops, position, new.token)
                try:
                    await self._client.move(hop.address, hop.node, asked, timeout_s=self._timeout_s)
                except MeshError as error:
                    if not moved and _is_whole(error, hop.node):
                        _log.info("session %s stays on %s for now: %s", session, hop.node, error)
                        return False
                    raise _unmoved(hop.node, error) from error
                moved = True
        except NextHopError:
            self.counts.failed += 1
            raise
        pause_s = time.perf_counter() - began
        self.counts.moved += 1
        self.counts.pause_s += pause_s
        _log.info(
            "session %s: its cache of %d tokens left %s in %.3f s",
            session,
            position,
            ", ".join(sorted(leaving)),
            pause_s,
        )
        return True


class Departure:
    """One session's way off nodes that drain.

    Another route is looked for while the session's steps go on, so that a session which has
    to stay is not held up by asking.

    Args:
        moves: of the gateway.
        model: name in the mesh.
        max_tokens: of the session.
    """

    def __init__(self, moves: SessionMoves, model: str, max_tokens: int) -> None:
        self._moves = moves
        self._model = model
        self._max_tokens = max_tokens
        self._search: asyncio.Task[SelectedRoute] | None = None
        self._searched: SelectedRoute | None = None
        self._again = 0.0
        self._has_said = False

    def find(self, session: SessionId, route: SelectedRoute) -> SelectedRoute | None:
        """Give the route to go on over instead, once there is one; asked before every step."""
        leaving = self._moves.draining.among(route.incarnations)
        if not leaving:
            return None
        search = self._search
        if search is None:
            if time.monotonic() >= self._again:
                selector = self._moves.selector
                self._search = asyncio.create_task(
                    selector.without(
                        self._model, session, leaving, max_tokens=self._max_tokens, route=route
                    )
                )
                self._searched = route
            return None
        if not search.done():
            return None
        self._search = None
        try:
            found = search.result()
        except MeshError as error:
            self.stay()
            if not self._has_said:
                self._has_said = True
                _log.info("a session stays on %s, which drains: %s", ", ".join(leaving), error)
            return None
        return keep_layers(route, found) if self._searched is route else None

    def stay(self) -> None:
        """Look again after a while."""
        self._again = time.monotonic() + _LOOK_AGAIN_S

    async def close(self) -> None:
        """End what is looked for."""
        if self._search is not None:
            self._search.cancel()
            await asyncio.gather(self._search, return_exceptions=True)


def replacements(old: Route, new: Route, leaving: Collection[NodeId]) -> list[tuple[Hop, Route]]:
    """Give each hop of `old` that is left, with the hops of `new` that take its layers over.

    Raises:
        NextHopError: naming a hop that is left, where `new` does not keep all other hops as
            they are, or cuts the layers elsewhere.
    """
    found = []
    remaining = list(new)
    for hop in old:
        taken: list[Hop] = []
        while remaining and remaining[0].layers.end <= hop.layers.end:
            taken.append(remaining.pop(0))
        covers = bool(taken) and (taken[0].layers.start, taken[-1].layers.end) == (
            hop.layers.start,
            hop.layers.end,
        )
        if not covers or (hop.node not in leaving and taken != [hop]):
            left = next(each.node for each in old if each.node in leaving)
            reason = MeshError(Code.FAILED_PRECONDITION, "no other route keeps the other hops")
            raise _unmoved(left, reason)
        if hop.node in leaving:
            found.append((hop, tuple(taken)))
    return found


def _is_whole(error: MeshError, node: NodeId) -> bool:
    """Tell whether a failed move left the session at `node`, and may do better later.

    Then the node that was to take the cache is away, full or busy; the draining one says so.
    """
    if isinstance(error, NextHopError):
        return error.failed_node != node
    return error.code in (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE, Code.ABORTED)


def _unmoved(node: NodeId, error: MeshError) -> NextHopError:
    return NextHopError(
        f"node {node} drains and its cache was not moved: {error}", failed_node=node
    )
