"""Whether a gateway's models are served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Final

from aiohttp import web

from meshnet.control.client import ControlClient
from meshnet.errors import MeshError

__all__ = ["Health"]

_ASK_S: Final = 5.0


class Health:
    """Answers ``/healthz``, which is open to all: those who ask at a time share one look.

    Args:
        control: the control plane.
        models: names of the models.
    """

    def __init__(self, control: ControlClient, models: Iterable[str]) -> None:
        self._control = control
        self._models = sorted(models)
        self._looking: asyncio.Task[dict[str, str]] | None = None

    async def answer(self, _: web.Request) -> web.Response:
        """Answer 200 when every model's layers are covered by nodes whose forward ran."""
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._uncovered())
        uncovered = await asyncio.shield(self._looking)
        status = "waiting for nodes" if uncovered else "ready"
        body = {"status": status, "models": self._models, "uncovered": uncovered}
        return web.Response(
            status=503 if uncovered else 200,
            body=json.dumps(body).encode(),
            content_type="application/json",
        )

    async def close(self) -> None:
        """End a look that is under way."""
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _uncovered(self) -> dict[str, str]:
        problems = {name: await self._problem(name) for name in self._models}
        return {name: problem for name, problem in problems.items() if problem is not None}

    async def _problem(self, model: str) -> str | None:
        """Say what keeps a model from being served; selects no route, which would count as one."""
        try:
            async with asyncio.timeout(_ASK_S):
                found = await self._control.get_model(f"models/{model}")
        except MeshError as error:
            return error.message
        except TimeoutError:
            return "the control plane does not answer"
        if found.uncovered:
            layers = ", ".join(f"{layers.start}-{layers.end}" for layers in found.uncovered)
            return f"no ready node has layers {layers}"
        return None
