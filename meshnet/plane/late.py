"""Asks nodes whose answers are late whether they live, and gives up those that do not.

A node that was stopped or cut off closes no connection; one that is busy is late as well.
What tells them apart is a small question over a connection of its own, which a busy node
answers at once. So a slow answer costs a question, and a dead node is noticed in seconds.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Final

from meshnet.errors import Code, MeshError, NextHopError
from meshnet.grammar import Phase
from meshnet.patience import Flight, Flights, PatienceLimits
from meshnet.topology import NodeId

if TYPE_CHECKING:
    from meshnet.plane.client import PlaneClient

__all__ = ["Ask", "LateAnswers", "ask_health"]

_TICK_S: Final = 0.25
_ANSWER_S: Final = 4.0
"""What a node gets to answer the question: a machine that swaps, or a lost packet, needs some."""

_log = logging.getLogger(__name__)

Ask = Callable[[str, float], Awaitable[object]]
"""Asks ``host:port`` for any answer within some seconds; raises MeshError where none comes."""


async def ask_health(client: PlaneClient, address: str, timeout_s: float) -> None:
    """Ask a node whether it is well; one that answers anything but 503 is.

    A node whose shard hangs answers 503 of itself.

    Raises:
        MeshError: it does not answer, or is not well.
    """
    status, _ = await client.get(address, "/healthz", timeout_s=timeout_s)
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        raise MeshError(Code.UNAVAILABLE, f"{address}: answered {status}: its shard hangs or fails")


class LateAnswers:
    """Watches over the requests of one client: `start`, until `close`.

    Requests may begin and end on any thread; what watches runs on an event loop.

    Args:
        ask: over a connection that no request under way holds up.
        limits: when an answer is late.
        answer_s: seconds that a node gets to answer the question.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        ask: Ask,
        limits: PatienceLimits | None = None,
        *,
        answer_s: float = _ANSWER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask
        self._answer_s = answer_s
        self._clock = clock
        self._flights = Flights(limits or PatienceLimits())
        self._lock = threading.Lock()
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to watch."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Watch no more."""
        tasks = [*self._asking.values(), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def begin(
        self,
        address: str,
        node: NodeId,
        phase: Phase,
        num_tokens: int,
        give_up: Callable[[NextHopError], object],
    ) -> Flight:
        """Note that a request is sent; `end` it in any case.

        Args:
            address: ``host:port`` of the node.
            node: its id.
            phase: of the chunk.
            num_tokens: in it; 0 for what is no chunk.
            give_up: called, on the event loop's thread and before `end` returns, where the
                node does not live; must not wait.
        """
        with self._lock:
            return self._flights.begin(address, node, phase, num_tokens, give_up, self._clock())

    def end(self, flight: Flight, *, answered: bool) -> None:
        """Note that a request was answered, or failed: it is not given up from now on."""
        with self._lock:
            self._flights.end(flight, self._clock(), answered=answered)

    @contextmanager
    def waiting(self, address: str, node: NodeId, phase: Phase, num_tokens: int) -> Iterator[None]:
        """Note a request that the current task sends and waits for within the block.

        Raises:
            NextHopError: the node does not live.
        """
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("waiting needs a running task")
        failure: NextHopError | None = None

        def give_up(error: NextHopError) -> None:
            nonlocal failure
            if failure is None:
                failure = error
                task.cancel()

        flight = self.begin(address, node, phase, num_tokens, give_up)
        answered = False
        try:
            yield
            answered = True
        except asyncio.CancelledError:
            if failure is None or task.uncancel() > 0:
                raise
            raise failure from None
        finally:
            self.end(flight, answered=answered)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            if not len(self._flights):
                continue
            with self._lock:
                late = {flight.address: flight for flight in self._flights.late(self._clock())}
            for address, flight in late.items():
                if address not in self._asking:
                    self._asking[address] = asyncio.create_task(
                        self._look_after(address, flight.node)
                    )

    async def _look_after(self, address: str, node: NodeId) -> None:
        asked = self._clock()
        try:
            await self._ask(address, self._answer_s)
        except MeshError as error:
            _log.warning("node %s at %s: no answer, and it is not well: %s", node, address, error)
            self._give_up(address, asked, error)
        else:
            _log.debug("node %s at %s is late, and lives", node, address)
        finally:
            del self._asking[address]

    def _give_up(self, address: str, asked: float, why: MeshError) -> None:
        """Give up what an address owes since before it was asked."""
        with self._lock:
            for flight in self._flights.owed_by(address, asked):
                waited_s = self._clock() - flight.sent
                flight.give_up(
                    NextHopError(
                        f"node {flight.node} at {address}: no answer in {waited_s:.1f} s,"
                        f" nor a good one to GET /healthz: {why.message}",
                        failed_node=flight.node,
                        timed_out=True,
                    )
                )
