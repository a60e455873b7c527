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
from meshnet.topology import LayerRange, NodeId, Route, SessionId

__all__ = ["GrantGate", "Held"]

_MAX_VERIFIED: Final = 1024
_MAX_SPENT: Final = 16_384

Ask = Callable[[str], None]
"""Has `GrantGate.learn` called with the keys as they are now; gets the id of one that was met.
Waits, and raises MeshError where the control plane does not answer."""


class Held:
    """What an open session may do, and the grants that this follows from.

    Attributes:
        token: the last grant, as it came.
        grant: what that says.
        used: all grants of the session that were shown here.
    """

    __slots__ = ("grant", "token", "used")

    def __init__(self, token: str, grant: Grant) -> None:
        self.token = token
        self.grant = grant
        self.used = [grant]

    def replace(self, token: str, grant: Grant, now: float) -> None:
        """Go on with another grant; those that have expired need not be remembered."""
        self.token, self.grant = token, grant
        self.used = [each for each in self.used if each.expires_s + LEEWAY_S >= now]
        if grant not in self.used:
            self.used.append(grant)


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
        self, session: SessionId, layers: LayerRange | None, route: Route, token: str | None
    ) -> Held | None:
        """Check what is asked for a session that is not open here; None where nothing is needed.

        Args:
            session: asked.
            layers: to run here; None means all.
            route: the hops after this one.
            token: the grant that came.

        Raises:
            MeshError: PERMISSION_DENIED; UNAVAILABLE, its key is not known and the control
                plane cannot be asked for it.
        """
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
        return Held(token, grant)

    def check(
        self,
        held: Held | None,
        session: SessionId,
        layers: LayerRange | None,
        route: Route,
        token: str | None,
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

        Raises:
            MeshError: as `admit`.
        """
        if not self.required:
            return held
        if held is None:
            return self.admit(session, layers, route, token)
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
        with self._lock:
            held.replace(token, grant, self._now())
        return held

    def check_move(self, session: SessionId, hops: Route, token: str | None) -> None:
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
        self._take(token).check_takers(session, hops)

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
