"""What the control plane has a node hold to: how grants are checked, and who was removed."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from meshnet.control.client import ControlClient
from meshnet.control.fresh import Fresh
from meshnet.control.removed_keys import removed_in
from meshnet.errors import Code, MeshError
from meshnet.grants import GrantKey
from meshnet.v1 import types_pb2
from meshnet_node.app import Node

__all__ = ["MeshPolicy"]

_ASK_EVERY_S: Final = 1.0
_ASK_S: Final = 5.0
_MAX_ASKED: Final = 8


class MeshPolicy:
    """The policy of a node's mesh; from `start` to `close` keys are asked for that it lacks.

    Args:
        client: of the control plane.
        node: holds to it.
    """

    def __init__(self, client: ControlClient, node: Node) -> None:
        self._client = client
        self._node = node
        self._loop: asyncio.AbstractEventLoop | None = None
        self._met: set[str] = set()
        self._asking = Fresh(self._ask_for_keys, _ASK_EVERY_S)

    def start(self) -> None:
        """Have keys asked for that grants name and that are not known."""
        self._loop = asyncio.get_running_loop()
        self._node.grants.ask = self._ask_for_key

    def close(self) -> None:
        """Ask no more."""
        self._node.grants.ask = None

    def learn(self, policy: types_pb2.GrantPolicy) -> None:
        """Take in how route grants are to be checked, and who was removed from the mesh.

        A key that cannot be read checks none.
        """
        keys = {}
        for key in policy.keys:
            with suppress(ValueError):
                found = GrantKey.of(key.public_key, key.expire_time.ToSeconds())
                keys[found.key_id] = found
        now = policy.time.ToNanoseconds() / 1e9
        self._node.grants.learn(required=policy.required, keys=keys, now=now)
        self._node.distrust(removed_in(policy), now)

    def _ask_for_key(self, key_id: str) -> None:
        """Have the control plane asked at once for a key that a grant names; on any thread.

        Raises:
            MeshError: UNAVAILABLE, it does not answer.
        """
        if self._loop is None:
            return
        if len(self._met) < _MAX_ASKED:
            self._met.add(key_id)
        asking = asyncio.run_coroutine_threadsafe(self._asking.read(), self._loop)
        try:
            asking.result(_ASK_S)
        except (MeshError, TimeoutError) as error:
            asking.cancel()
            raise MeshError(
                Code.UNAVAILABLE,
                f"node {self._node.settings.node} does not know the key of a grant, and the"
                f" control plane does not answer: {str(error) or 'too late'}",
                field="X-Meshnet-Grant",
                reason="GRANT_KEY_UNKNOWN",
                retry_after_s=1.0,
            ) from None

    async def _ask_for_keys(self) -> None:
        met, self._met = self._met, set()
        for key_id in met:
            self.learn(await self._client.get_grant_policy(key_id))
