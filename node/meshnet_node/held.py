"""What an open session may do at a node, and who may act for it."""

from __future__ import annotations

from typing import Final

from meshnet.errors import Code, MeshError
from meshnet.grants import LEEWAY_S, Grant, refused
from meshnet.identity import Identity, Role
from meshnet.topology import SessionId

__all__ = ["Held", "of_others"]

_NOBODY: Final = ""


class Held:
    """What an open session may do, and the grants that this follows from.

    A session belongs to one gateway, whatever grants follow. For it act that gateway and the
    nodes of its grant; where callers do not say who they are, whoever knows its id.

    Attributes:
        token: the last grant, as it came.
        grant: what that says.
        used: all grants of the session that were shown here.
        gateway: whose it is; None while no grant and no gateway has said so.
        actors: SPIFFE IDs of those who may act for it.
        shipper: that of the node which brought its cache, until it goes on here: that one may
            bring it again, or free it.

    Args:
        token: of the first grant.
        grant: what that says.
        opener: who showed it, if that is known.
    """

    __slots__ = ("_is_open", "actors", "gateway", "grant", "shipper", "token", "used")

    def __init__(self, token: str, grant: Grant, opener: Identity | None) -> None:
        self._is_open = opener is None
        self.token = token
        self.grant = grant
        self.used = [grant]
        self.shipper = _NOBODY
        is_gateway = opener is not None and opener.role is Role.GATEWAY
        self.gateway = _gateway_of(grant) or (opener if is_gateway else None)
        self.actors = self.actors_of(grant)

    def replace(self, token: str, grant: Grant, now: float) -> None:
        """Go on with another grant; those that have expired need not be remembered."""
        self.grant = grant
        self.used = [each for each in self.used if each.expires_s + LEEWAY_S >= now]
        if grant not in self.used:
            self.used.append(grant)
        self.bind(self.gateway or _gateway_of(grant))
        self.token = token  # last: who comes by this token is among the actors then

    def bind(self, gateway: Identity | None) -> None:
        """Let the session be a gateway's."""
        self.gateway = gateway
        self.actors = self.actors_of(self.grant)

    def actors_of(self, grant: Grant) -> frozenset[str]:
        """Give who may act for the session under a grant."""
        actors = {Identity(Role.NODE, hop.node).uri for hop in grant.route}
        if self.gateway is not None:
            actors.add(self.gateway.uri)
        if self._is_open:
            actors.add(_NOBODY)
        return frozenset(actors)

    def follows(self, grant: Grant) -> bool:
        """Tell whether a grant may let others act: one that was not shown here before.

        Those that were replaced, or were issued earlier, name nodes that the session has left.
        """
        return grant not in self.used and grant.expires_s + LEEWAY_S >= self.grant.expires_s

    def check_gateway(self, grant: Grant) -> None:
        """Check that a grant was issued to the gateway whose session this is.

        Raises:
            MeshError: PERMISSION_DENIED, reason ``GRANT_MISMATCH``.
        """
        named = _gateway_of(grant)
        if named is not None and self.gateway is not None and named != self.gateway:
            raise refused(
                f"is for gateway {named.name}; expected one for {self.gateway.name}, whose"
                f" session {grant.session} is",
                "GRANT_MISMATCH",
            )


def of_others(session: SessionId) -> MeshError:
    """Give the error for who asks for something of a session that is not theirs."""
    return MeshError(
        Code.PERMISSION_DENIED,
        f"session {session} is held for others; expected its gateway or a node of its route",
        reason="SESSION_OF_OTHERS",
    )


def _gateway_of(grant: Grant) -> Identity | None:
    return Identity(Role.GATEWAY, grant.gateway) if grant.gateway else None
