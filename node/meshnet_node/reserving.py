"""Sessions opened along a route before their first chunk: at every hop, or at none."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from meshnet.errors import MeshError, NextHopError
from meshnet.operations import Reservation
from meshnet.plane.caller import Caller
from meshnet.plane.hop_client import HopClient
from meshnet.topology import Hop
from meshnet_node.backend import ShardBackend
from meshnet_node.granted import GrantGate
from meshnet_node.plan import check_layers, check_route
from meshnet_node.session import Session
from meshnet_node.session_table import SessionTable

__all__ = ["RouteReservations"]

_WITHDRAW_S: Final = 1.0
"""What a hop that did not answer a reservation gets to hear that it is withdrawn."""


class RouteReservations:
    """Reserves what sessions will need, here and at the hops after.

    Args:
        backend: says which layers are held.
        sessions: the caches.
        client: for the hop after.
        grants: over which routes sessions may run.
        hop_timeout_s: seconds that the hop after may take.
    """

    def __init__(
        self,
        backend: ShardBackend,
        sessions: SessionTable,
        client: HopClient,
        grants: GrantGate,
        *,
        hop_timeout_s: float,
    ) -> None:
        self._backend = backend
        self._sessions = sessions
        self._client = client
        self._grants = grants
        self._hop_timeout_s = hop_timeout_s

    def reserve(self, asked: Reservation, caller: Caller) -> None:
        """Open a session here and at the hops after, with its cache; all of them or none.

        Raises:
            WireError: the layers or the route cannot be served here.
            MeshError: of the session table, or of the hop that refused.
            CallerGoneError: `caller` left meanwhile.
        """
        layers = check_layers(self._backend.spec, asked.layers)
        check_route(layers, asked.route)
        held = self._sessions.find(asked.session)
        granted = self._grants.check(
            held.granted if held else None,
            asked.session,
            layers,
            asked.route,
            asked.grant,
            caller.identity,
        )
        session, before = self._sessions.reserve(
            asked.session, asked.max_tokens, asked.owner, granted
        )
        if not asked.route:
            return
        hop = asked.route[0]
        session.route, session.next_hop = None, hop
        try:
            self._client.reserve(
                hop.address,
                hop.node,
                asked.onward(),
                timeout_s=self._hop_timeout_s,
                caller=caller,
            )
        except BaseException as error:
            if before:
                self._sessions.lower(session, before)
            else:
                self._sessions.release(asked.session, withdrawn=True)
                self._withdraw(session, hop, error)
            raise

    def _withdraw(self, session: Session, hop: Hop, error: BaseException) -> None:
        """Free what the next hop may have opened; one that refused holds nothing."""
        reached = isinstance(error, MeshError) and not isinstance(error, NextHopError)
        if reached:
            return
        with suppress(MeshError):
            self._client.release(hop.address, session.id, timeout_s=_WITHDRAW_S, node=hop.node)
