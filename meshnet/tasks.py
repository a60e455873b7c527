"""What runs beside everything else: begun, and ended."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from contextlib import suppress

__all__ = ["Background", "end_task"]


class Background(ABC):
    """Something that runs on the event loop from `start` until `close`."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop; what is under way is not finished."""
        await end_task(self._task)

    @abstractmethod
    async def _run(self) -> None:
        """Run without end; cancelled by `close`."""


async def end_task(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait until it has ended; None is one that never began.

    Raises:
        Exception: what the task failed with before.
    """
    if task is not None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
