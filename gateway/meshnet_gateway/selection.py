"""Opens sessions on the routes that the control plane selects."""

from __future__ import annotations

from meshnet.control.client import ControlClient, to_hops
from meshnet.plane.client import PlaneClient
from meshnet.wire import WIRE_VERSION
from meshnet_gateway.pipeline import PipelineSettings, RoutePipeline

__all__ = ["SelectedPipelines"]


class SelectedPipelines:
    """A `PipelineFactory`: one route selection a session, none on the way of a token."""

    def __init__(
        self, control: ControlClient, client: PlaneClient, settings: PipelineSettings
    ) -> None:
        self._control = control
        self._client = client
        self._settings = settings

    async def open(self, model: str, *, max_tokens: int) -> RoutePipeline:
        """Select a route for `model` and begin a session on it.

        Raises:
            RouteError: the model is unknown, or layers are uncovered.
        """
        route = await self._control.select_route(
            f"models/{model}", wire_versions=(WIRE_VERSION,), expected_tokens=max_tokens
        )
        return RoutePipeline(self._client, to_hops(route), self._settings, max_tokens=max_tokens)
