"""Callers that own sessions: while one shows that it lives, its sessions stay; they end with it."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Final

from meshnet.operations import OwnerId
from meshnet.plane.caller import Caller, CallerGoneError
from meshnet_node.session_table import SessionTable

__all__ = ["Owners"]

_RETURN_S: Final = 2.0
"""What an owner whose connection broke gets to come back over another."""

_log = logging.getLogger(__name__)


Owner = tuple[OwnerId, str]
"""An owner, and the SPIFFE ID of who says to be it: nobody stands in for another."""


class Owners:
    """The owners that are here, each on a connection and a thread of its own.

    Args:
        sessions: those that have owners among them.
        return_s: seconds that an owner gets to come back.
    """

    def __init__(self, sessions: SessionTable, *, return_s: float = _RETURN_S) -> None:
        self._sessions = sessions
        self._return_s = return_s
        self._here: Counter[Owner] = Counter()
        self._leaving: Counter[Owner] = Counter()
        self._changed = threading.Condition()
        self._closing = False

    def attend(self, owner_id: OwnerId, caller: Caller) -> None:
        """Stay while the owner's connection lasts; end its sessions unless it comes back.

        Returns when this node ends.

        Raises:
            CallerGoneError: the owner has left.
        """
        owner = owner_id, caller.uri
        with self._changed:
            self._here[owner] += 1
            self._changed.notify_all()
        try:
            self._stay(caller)
        finally:
            with self._changed:
                _take_one(self._here, owner)
                self._leaving[owner] += 1
        try:
            if not self._closing and not self._comes_back(owner):
                self._end_sessions(owner)
        finally:
            with self._changed:
                _take_one(self._leaving, owner)
        if not self._closing:
            raise CallerGoneError

    def close(self) -> None:
        """Let those who attend go, and end no session for it."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def _stay(self, caller: Caller) -> None:
        try:
            with caller.waking(self._wake), self._changed:
                self._changed.wait_for(lambda: self._closing or caller.gone)
        except CallerGoneError:
            return

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _comes_back(self, owner: Owner) -> bool:
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closing or owner in self._here, self._return_s
            )

    def _end_sessions(self, owner: Owner) -> None:
        owned = self._sessions.owned_by(*owner)
        for session in owned:
            self._sessions.release(session)
        if owned:
            _log.info("the owner of %d sessions has left; they are released", len(owned))


def _take_one(count: Counter[Owner], owner: Owner) -> None:
    count[owner] -= 1
    if not count[owner]:
        del count[owner]
