"""Asks the control plane for routes, and waits for one where a session needs another."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from meshnet.codec import ENCODINGS
from meshnet.control.client import ControlClient
from meshnet.control.hops import to_hops
from meshnet.errors import Code, MeshError, RouteError
from meshnet.topology import Hop, NodeId, Route, SessionId
from meshnet.v1 import route_service_pb2 as route_pb
from meshnet.v1 import types_pb2
from meshnet.wire import WIRE_VERSION
from meshnet_gateway.suspects import SuspectNodes

__all__ = ["RouteGrant", "RouteSelector", "SelectedRoute"]

_RETRY_S: Final = 0.25


@dataclass(frozen=True, slots=True)
class RouteGrant:
    """The control plane's grant of a route to a session.

    Attributes:
        token: for X-Meshnet-Grant.
        session: whose it is.
        hops: that it names.
        fresh_until: until when nodes that do not know it will take it for sure; of the
            monotonic clock.
    """

    token: str
    session: SessionId
    hops: Route
    fresh_until: float


@dataclass(frozen=True, slots=True)
class SelectedRoute:
    """A route, and which start of each of its nodes it was selected with.

    Attributes:
        hops: in order of layers.
        incarnations: of the nodes, by id.
        grant: where nodes ask for one; None where they do not.
    """

    hops: Route
    incarnations: Mapping[NodeId, int]
    grant: RouteGrant | None = None

    @property
    def token(self) -> str | None:
        """What nodes are shown."""
        return None if self.grant is None else self.grant.token

    @property
    def borders(self) -> tuple[int, ...]:
        """Layers at which the hops after the first begin.

        Hidden states are rounded to bfloat16 there, so that nodes that compute in float32
        give a session's very tokens only where its borders stay.
        """
        return tuple(hop.layers.start for hop in self.hops[1:])


class RouteSelector:
    """Selects routes for one gateway.

    Args:
        control: asked.
        region: of the gateway, for the way to the first hop; empty for none.
        tls: the gateway connects to nodes with TLS.

    Attributes:
        suspects: nodes to leave out where others can serve a session.
    """

    def __init__(self, control: ControlClient, region: str = "", *, tls: bool = False) -> None:
        self._control = control
        self._region = region
        self._tls = tls
        self._served: set[str] = set()
        self.suspects = SuspectNodes()

    async def select(
        self, model: str, session: SessionId, *, max_tokens: int, wait_s: float = 0.0
    ) -> SelectedRoute:
        """Select a route for a new session; waits while a known model's layers are uncovered.

        A model is known when it was served before, or when nodes have registered for it:
        they load, or start again.

        Args:
            model: name in the mesh.
            session: that the route is for.
            max_tokens: that the session will need.
            wait_s: seconds to wait for the layers to be covered.

        Raises:
            RouteError: NOT_FOUND, no node has served the model; UNAVAILABLE, its layers
                stayed uncovered.
            MeshError: the control plane did not answer.
        """
        deadline = time.monotonic() + wait_s
        while True:
            try:
                route = await self._select_first(model, session, max_tokens)
            except MeshError as error:
                if not self._may_pass(model, error):
                    raise
                if time.monotonic() + _RETRY_S > deadline:
                    raise _uncovered(model, error) from error
            else:
                self._served.add(model)
                return route
            await asyncio.sleep(_RETRY_S)

    async def replace(
        self,
        model: str,
        session: SessionId,
        *,
        max_tokens: int,
        failed: Mapping[NodeId, int],
        healthy: Mapping[NodeId, int],
        borders: Sequence[int],
        answers: Callable[[Hop], Awaitable[bool]],
        wait_s: float,
    ) -> SelectedRoute:
        """Select a route for a session whose route broke; waits for nodes to register.

        Where only nodes that failed are left, those that answer are used again: their
        connections broke, or their lease ended and they have registered since.

        Args:
            model: as before.
            session: as before.
            max_tokens: of the session.
            failed: nodes to leave out, with the incarnation that failed; a later start of
                one is another node.
            healthy: nodes to prefer.
            borders: of the route that broke; kept wherever a route has them.
            answers: tells whether a node that failed is there again.
            wait_s: seconds to wait for the layers to be covered.

        Raises:
            RouteError: no route was found in time, with the last reason.
        """
        deadline = time.monotonic() + wait_s
        while True:
            suspects = self.suspects.now() - healthy.keys()
            for avoided in ({*failed, *suspects}, failed, {}):
                try:
                    route = await self._select(
                        model, session, max_tokens, avoided, healthy, borders
                    )
                except MeshError as error:
                    reason = error
                else:
                    again = [
                        hop
                        for hop in route.hops
                        if failed.get(hop.node) == route.incarnations[hop.node]
                    ]
                    if all(await asyncio.gather(*map(answers, again))):
                        return route
                    had = ", ".join(f"{hop.layers} of {hop.node}" for hop in again)
                    reason = MeshError(
                        Code.UNAVAILABLE,
                        f"no other node has layers {had}",
                        reason="LAYERS_UNCOVERED",
                    )
            if time.monotonic() + _RETRY_S > deadline:
                raise _uncovered(model, reason)
            await asyncio.sleep(_RETRY_S)

    async def without(
        self,
        model: str,
        session: SessionId,
        leaving: Collection[NodeId],
        *,
        max_tokens: int,
        route: SelectedRoute,
    ) -> SelectedRoute:
        """Select a route for a session that is to leave some nodes of its `route`, if there is one.

        Raises:
            RouteError: there is none now.
            MeshError: the control plane did not answer.
        """
        left = {node: route.incarnations[node] for node in leaving}
        kept = {node: start for node, start in route.incarnations.items() if node not in left}
        return await self._select(model, session, max_tokens, left, kept, route.borders)

    async def granted(self, model: str, session: SessionId, route: SelectedRoute) -> SelectedRoute:
        """Give a route with a grant that can be shown to its nodes now.

        It is granted anew where it was cut otherwise than it was selected, is for another
        session by now, or was granted a while ago; left as it is where nodes want no grants.

        Raises:
            MeshError: FAILED_PRECONDITION, reason ``HOP_UNKNOWN``: its nodes are not as
                they were; or the control plane did not answer.
        """
        grant = route.grant
        if grant is None:
            return route
        is_fresh = time.monotonic() < grant.fresh_until
        if is_fresh and grant.session == session and grant.hops == route.hops:
            return route
        hops = [
            route_pb.Hop(
                node=f"nodes/{hop.node}",
                incarnation=route.incarnations[hop.node],
                layers=types_pb2.LayerRange(start=hop.layers.start, end=hop.layers.end),
            )
            for hop in route.hops
        ]
        answer = await self._control.grant_route(f"models/{model}", session, hops)
        fresh_until = _fresh_until(answer.grant_ttl.ToSeconds())
        return replace(route, grant=RouteGrant(answer.grant, session, route.hops, fresh_until))

    async def _select_first(self, model: str, session: SessionId, max_tokens: int) -> SelectedRoute:
        suspects = self.suspects.now()
        if suspects:
            with suppress(MeshError):
                return await self._select(model, session, max_tokens, suspects, {}, ())
        return await self._select(model, session, max_tokens, (), {}, ())

    def _may_pass(self, model: str, error: MeshError) -> bool:
        """Tell whether waiting may help against what kept a new session from its route."""
        if error.reason == "LAYERS_UNCOVERED":
            return True
        is_away = error.code in (Code.NOT_FOUND, Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED)
        return is_away and model in self._served

    async def _select(
        self,
        model: str,
        session: SessionId,
        max_tokens: int,
        exclude: Collection[NodeId],
        prefer: Mapping[NodeId, int],
        borders: Sequence[int],
    ) -> SelectedRoute:
        route = await self._control.select_route(
            f"models/{model}",
            exclude=exclude,
            prefer=prefer,
            borders=borders,
            region=self._region,
            encodings=ENCODINGS,
            wire_versions=(WIRE_VERSION,),
            expected_tokens=max_tokens,
            session=session,
        )
        hops = to_hops(route, tls=self._tls)
        incarnations = {
            hop.node: chosen.incarnation for hop, chosen in zip(hops, route.hops, strict=True)
        }
        grant = None
        if route.grant:
            fresh_until = _fresh_until(route.grant_ttl.ToSeconds())
            grant = RouteGrant(route.grant, session, hops, fresh_until)
        return SelectedRoute(hops, incarnations, grant)


def _fresh_until(ttl_s: float) -> float:
    return time.monotonic() + ttl_s / 2


def _uncovered(model: str, error: MeshError) -> RouteError:
    """Give the error of a model that is known, and that waiting has not brought a route to."""
    if error.code is Code.NOT_FOUND:
        error = MeshError(
            Code.UNAVAILABLE,
            f"no node serves {model!r} now",
            reason="LAYERS_UNCOVERED",
            retry_after_s=1.0,
        )
    return RouteError(
        error.code,
        error.message,
        field="model",
        reason=error.reason,
        retry_after_s=error.retry_after_s,
    )
