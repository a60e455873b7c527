"""A client of the control plane over gRPC: deadlines, retries, keepalive, MeshError."""

from __future__ import annotations

from typing import Self

from meshnet.control.admin_calls import AdminCalls
from meshnet.control.calls import Calls, ClientSettings
from meshnet.control.node_calls import NodeCalls
from meshnet.control.route_calls import RouteCalls
from meshnet.credentials import Credentials

__all__ = ["ClientSettings", "ControlClient"]


class ControlClient(NodeCalls, RouteCalls, AdminCalls):
    """Calls of every service of a control plane.

    Every method raises MeshError alone, with reason and field as the server gave them.
    An attempt that got no answer (UNAVAILABLE without a reason) is tried again until the
    call's time is up; every call is safe to repeat. Of several replicas one is asked for as
    long as it answers; if it does not, or if its store is away, the next one is asked at once.

    Args:
        url: ``grpc://HOST:PORT``, ``HOST:PORT``, or ``http://HOST:PORT`` of the JSON face,
            which is then asked for the port of the gRPC face; of several replicas, all of
            them with commas between. ``grpcs`` and ``https`` need credentials.
        settings: see there.
        credentials: this process's, with which every connection has TLS; calls begin with
            those that were renewed, as soon as they are.

    Raises:
        ConfigError: `url` is none of these, naming the part at fault.
    """

    def __init__(
        self,
        url: str,
        settings: ClientSettings | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        super().__init__(Calls(url, settings or ClientSettings(), credentials))

    async def __aenter__(self) -> Self:
        """Give the client; it connects with its first call."""
        return self

    async def __aexit__(self, *_exc_info: object) -> None:
        """Close the client."""
        await self.close()

    async def close(self) -> None:
        """Close all connections; running calls are cancelled."""
        await self._calls.close()
