"""Shows nodes that this gateway lives, so that its sessions there end with it.

One request to each node is held open, on a connection of its own: when the gateway ends,
however it does, the system closes that connection, and the node frees the gateway's sessions.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from typing import Final

from meshnet.errors import Code, MeshError
from meshnet.operations import OwnerId
from meshnet.plane.client import PlaneClient
from meshnet.topology import Hop, Route

__all__ = ["Presence"]

_FIRST_PAUSE_S: Final = 0.1
_LONGEST_PAUSE_S: Final = 2.0
_PATIENCE_S: Final = 60.0
"""A node that is gone for so long is shown nothing until it has a session again."""
_NOT_KNOWN: Final = (Code.NOT_FOUND, Code.METHOD_NOT_ALLOWED, Code.UNIMPLEMENTED)

_log = logging.getLogger(__name__)


class Presence:
    """One gateway's connections that show it lives.

    Args:
        client: whose requests these are; their number at a time is that of the nodes.

    Attributes:
        owner: names this gateway to nodes, for as long as the process runs.
    """

    def __init__(self, client: PlaneClient) -> None:
        self.owner = OwnerId(str(uuid.uuid4()))
        self._client = client
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def show(self, route: Route) -> None:
        """Begin to show it to nodes that are to hold sessions; those shown already are fine."""
        for hop in route:
            if hop.address not in self._tasks:
                self._tasks[hop.address] = asyncio.create_task(self._run(hop))

    async def close(self) -> None:
        """Close the connections."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, hop: Hop) -> None:
        try:
            await self._attend(hop)
        finally:
            del self._tasks[hop.address]

    async def _attend(self, hop: Hop) -> None:
        clock = asyncio.get_running_loop().time
        pause_s, last_here = _FIRST_PAUSE_S, clock()
        while clock() - last_here < _PATIENCE_S:
            began = clock()
            try:
                await self._client.attend(hop.address, self.owner, node=hop.node)
            except MeshError as error:
                if error.code in _NOT_KNOWN:
                    return  # its sessions end by their idle time
                _log.debug("%s was not shown that the gateway lives: %s", hop.address, error)
            if clock() - began > _FIRST_PAUSE_S:
                pause_s, last_here = _FIRST_PAUSE_S, clock()
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
