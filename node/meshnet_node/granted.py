"""Which sessions a node takes, and over which routes: those that the control plane granted.

What is open has been checked, so that a session's next chunk costs nothing more. A grant may
open its session once at a node: when that ends there, its grants are spent.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Final

from meshnet.errors import MeshError
from meshnet.grants import LEEWAY_S, Grant, GrantKey, key_id_of, refused, verify
from meshnet.identity import Identity, Role
from meshnet.topology import LayerRange, NodeId, Route, SessionId
from meshnet_node.held import Held, of_others

__all__ = ["GrantGate"]

_MAX_VERIFIED: Final = 1024
_MAX_SPENT: Final = 16_384

Ask = Callable[[str], None]
"""Has `GrantGate.learn` called with the keys as they are now; gets the id of one that was met.
Waits, and raises MeshError where the control plane does not answer."""


class GrantGate:
    """Checks what is asked of one node, by many threads.

    Args:
        node: its id.
        clock: seconds, monotonic; the control plane says what time that is.
        max_spent: grants that are remembered as spent. Where more are spent before they
            expire, all that expire no later than one that was forgotten count as spent too.

    Attributes:
        required: without a grant no session is taken.
        incarnation: of this process, as it registered.
        layers: of the shard, which a request that names none means.
        ask: see there; without it, keys that are not known stay so.
    """

    def __init__(
        self,
        node: NodeId,
        *,
        clock: Callable[[], float] = time.monotonic,
        max_spent: int = _MAX_SPENT,
    ) -> None:
        self.required = False
        self.incarnation = 0
        self.layers: LayerRange | None = None
        self.ask: Ask | None = None
        self._node = node
        self._clock = clock
        self._max_spent = max_spent
        self._keys: Mapping[str, GrantKey] = {}
        self._ahead_s = 0.0
        self._verified: dict[str, Grant] = {}
        self._spent: dict[str, int] = {}
        self._spent_until_s = 0
        self._lock = threading.Lock()

    def learn(self, *, required: bool, keys: Mapping[str, GrantKey], now: float) -> None:
        """Take in what the control plane says.

        Args:
            required: see the attribute.
            keys: of all its replicas, by id.
            now: its time, Unix seconds.
        """
        self._keys, self._ahead_s = keys, now - self._clock()
        self.required = required

    def admit(
        self,
        session: SessionId,
        layers: LayerRange | None,
        route: Route,
        token: str | None,
        who: Identity | None,
    ) -> Held | None:
        """Check what is asked for a session that is not open here; None where nothing is needed.

        Args:
            session: asked.
            layers: to run here; None means all.
            route: the hops after this one.
            token: the grant that came.
            who: asks; None where that is not known.

        Raises:
            MeshError: PERMISSION_DENIED; UNAVAILABLE, its key is not known and the control
                plane cannot be asked for it.
        """
        held = self._open(session, layers, route, token, who)
        if held is not None:
            self.check_actor(held, session, who)
        return held

    def _open(
        self,
        session: SessionId,
        layers: LayerRange | None,
        route: Route,
        token: str | None,
        who: Identity | None,
    ) -> Held | None:
        if not self.required:
            return None
        if token is None:
            raise refused(
                f"is missing; expected the grant that the control plane gives for session"
                f" {session} with a route over node {self._node}",
                "GRANT_MISSING",
            )
        grant = self._take(token)
        self._check(grant, session, layers, route)
        return Held(token, grant, who)

    def check_actor(self, held: Held | None, session: SessionId, who: Identity | None) -> None:
        """Check that somebody may act for a session, see `Held`; never waits.

        Raises:
            MeshError: PERMISSION_DENIED, reason ``SESSION_OF_OTHERS``.
        """
        if not self.required or held is None or who is None or who.uri in held.actors:
            return
        if held.gateway is not None or who.role is not Role.GATEWAY:
            raise of_others(session)
        held.bind(who)

    def may_follow(
        self, held: Held | None, session: SessionId, who: Identity | None, token: str | None
    ) -> bool:
        """Check who may act for a session, now or by the grant that came; tells whether by that.

        Such a grant is one that the control plane issued later, to the same gateway.

        Raises:
            MeshError: as `check_actor`, or as `admit`.
        """
        if not self.required or held is None or who is None or who.uri in held.actors:
            return False
        if token is None or token == held.token:
            self.check_actor(held, session, who)
            return False
        grant = self._take(token)
        with self._lock:
            if who.uri in held.actors:  # by now, through another request with this grant
                return False
            self._check_follower(held, grant, session)
            if who.uri not in held.actors_of(grant):
                raise of_others(session)
        return True

    def check_release(self, held: Held, session: SessionId, who: Identity | None) -> None:
        """Check that somebody may free a session, or bring its cache again.

        Raises:
            MeshError: as `check_actor`.
        """
        if who is None or who.uri != held.shipper:
            self.check_actor(held, session, who)

    def check(
        self,
        held: Held | None,
        session: SessionId,
        layers: LayerRange | None,
        route: Route,
        token: str | None,
        who: Identity | None,
    ) -> Held | None:
        """Check what is asked for a session that may be open; gives what it holds then.

        What is open goes on after its grant has expired. A new grant takes the place of the
        one before.

        Args:
            held: by the session so far.
            session: as of `admit`, and so on.
            layers: asked.
            route: asked.
            token: the grant that came; None for none.
            who: asks.

        Raises:
            MeshError: as `admit`.
        """
        if not self.required:
            return held
        if held is None:
            return self.admit(session, layers, route, token, who)
        self.may_follow(held, session, who, token)
        held.shipper = ""
        if token is None or token == held.token:
            self._check(held.grant, session, layers, route)
            return held
        try:
            grant = self._take(token)
        except MeshError as error:
            if error.reason != "GRANT_EXPIRED":
                raise
            try:
                self._check(held.grant, session, layers, route)
            except MeshError:
                raise error from None
            return held
        self._check(grant, session, layers, route)
        held.check_gateway(grant)
        with self._lock:
            held.replace(token, grant, self._now())
        return held

    def check_cache(
        self,
        held: Held | None,
        session: SessionId,
        layers: LayerRange,
        token: str | None,
        who: Identity | None,
    ) -> Held | None:
        """Check a cache that is to be held here; gives what its session holds then.

        It may come from a node that the session leaves, which the grant does not name: that
        node has been told a grant that is new here, or has brought this cache before.

        Raises:
            MeshError: as `admit`.
        """
        if not self.required:
            return held
        if held is None:
            held = self._open(session, layers, (), token, who)
        elif token is not None and token != held.token:
            grant = self._take(token)
            if who is not None and who.uri not in held.actors:
                self._check_follower(held, grant, session)
            held = self.check(held, session, layers, (), token, None)
        else:
            self.check_release(held, session, who)
            self._check(held.grant, session, layers, ())
        if held is not None and who is not None:
            held.shipper = who.uri
        return held

    def check_move(
        self, held: Held | None, session: SessionId, hops: Route, token: str | None
    ) -> None:
        """Check that a session may be handed to other hops.

        Raises:
            MeshError: as `admit`.
        """
        if not self.required:
            return
        if token is None:
            raise refused(
                f"is missing; expected the grant of session {session} for the hops that are to"
                " take it over",
                "GRANT_MISSING",
            )
        grant = self._take(token)
        grant.check_takers(session, hops)
        if held is not None:
            held.check_gateway(grant)

    def confirm(self, held: Held) -> None:
        """Check once more that a session may be opened, as it is.

        Raises:
            MeshError: PERMISSION_DENIED, reason ``GRANT_SPENT``: it has ended here meanwhile.
        """
        with self._lock:
            self._check_unspent(held.grant)

    def spend(self, held: Held) -> None:
        """Let the grants of a session that ends here open it no more."""
        now = self._now()
        with self._lock:
            for grant in held.used:
                if grant.expires_s + LEEWAY_S >= now:
                    self._spent[grant.id] = grant.expires_s
            if len(self._spent) > self._max_spent:
                self._forget_spent(now)

    def _check(
        self, grant: Grant, session: SessionId, layers: LayerRange | None, route: Route
    ) -> None:
        asked = layers or self.layers
        if asked is None:
            raise RuntimeError("no shard is loaded")
        grant.check(session, self._node, self.incarnation, asked, route)

    def _check_follower(self, held: Held, grant: Grant, session: SessionId) -> None:
        """Check that a grant may let others act for a session than the one before did."""
        if grant.session != session or not held.follows(grant):
            raise of_others(session)
        held.check_gateway(grant)

    def _take(self, token: str) -> Grant:
        """Verify a grant, once; gives what it says."""
        now = self._now()
        grant = self._verified.get(token)
        if grant is None:
            grant = self._verify(token, now)
        grant.check_time(now)
        with self._lock:
            self._check_unspent(grant)
            if len(self._verified) >= _MAX_VERIFIED:
                self._verified.clear()
            self._verified[token] = grant
        return grant

    def _verify(self, token: str, now: float) -> Grant:
        key_id = key_id_of(token)
        if key_id not in self._keys and self.ask is not None:
            self.ask(key_id)
        return verify(token, self._keys, now)

    def _check_unspent(self, grant: Grant) -> None:
        if grant.id in self._spent or grant.expires_s <= self._spent_until_s:
            raise refused(
                "has opened its session here already, and that has ended; expected a new one",
                "GRANT_SPENT",
            )

    def _forget_spent(self, now: float) -> None:
        living = sorted(
            (until, name) for name, until in self._spent.items() if until + LEEWAY_S >= now
        )
        num_forgotten = max(0, len(living) - self._max_spent * 3 // 4)
        if num_forgotten:
            self._spent_until_s = max(self._spent_until_s, living[num_forgotten - 1][0])
        self._spent = {name: until for until, name in living[num_forgotten:]}

    def _now(self) -> float:
        return self._clock() + self._ahead_s
