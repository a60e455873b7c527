"""Ending what runs beside everything else."""

from __future__ import annotations

import asyncio
from contextlib import suppress

__all__ = ["end_task"]


async def end_task(task: asyncio.Task[None] | None) -> None:
    """Cancel a task and wait until it has ended; None is one that never began.

    Raises:
        Exception: what the task failed with before.
    """
    if task is not None:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
