"""meshnet's own clients as benchmarks use them: one round trip of a tensor each, uncompressed."""

from __future__ import annotations

import uuid
from typing import Any, Final

import numpy.typing as npt

from meshnet.compression import CompressionPolicies, CompressionPolicy
from meshnet.credentials import Credentials
from meshnet.dtypes import BFLOAT16, Body, view_bytes
from meshnet.grammar import Phase, Want
from meshnet.plane.client import PlaneClient
from meshnet.plane.hop_client import HopClient
from meshnet.plane.links import LinkSettings
from meshnet.topology import NodeId, SessionId
from meshnet.wire import ChunkHeader

__all__ = ["RAW_BODIES", "RAW_POLICIES", "Meshnet", "MeshnetAio"]

_TIMEOUT_S: Final = 120.0

RAW_BODIES: Final = {
    f"MESHNET_COMPRESSION_LAN_{phase}_ENABLED": "false" for phase in ("PREFILL", "DECODE")
}
"""Environment of nodes that compress nothing, as the other stacks do not either."""

RAW_POLICIES: Final = CompressionPolicies(
    {("lan", phase): CompressionPolicy(0, enabled=False) for phase in ("prefill", "decode")}
)
"""The same for a client."""


class _Session:
    """A session of growing position at a stub node."""

    def __init__(self, address: str, tensor: npt.NDArray[Any]) -> None:
        self._address = address
        self._tensor = tensor
        self._session = SessionId(str(uuid.uuid4()))
        self._position = 0

    def _next_header(self) -> ChunkHeader:
        num_tokens = self._tensor.shape[1]
        header = ChunkHeader(
            shape=self._tensor.shape,
            dtype=BFLOAT16,
            session=self._session,
            position=self._position,
            phase=Phase.DECODE if num_tokens == 1 else Phase.PREFILL,
            want=Want("hidden"),
        )
        self._position += num_tokens
        return header


class Meshnet(_Session):
    """POST /forward to a stub node by the client that nodes use for the hop after, blocking."""

    def __init__(
        self, address: str, tensor: npt.NDArray[Any], tls: Credentials | None = None
    ) -> None:
        super().__init__(address, tensor)
        self._client = HopClient(LinkSettings(RAW_POLICIES, tls=tls))

    async def round_trip(self) -> Body:
        """Send one chunk, and view the hidden states answered, blocking the event loop."""
        answer = self._client.forward(
            self._address,
            NodeId("echo"),
            self._next_header(),
            self._tensor,
            timeout_s=_TIMEOUT_S,
        )
        return b"" if answer.tensor is None else view_bytes(answer.tensor)

    async def close(self) -> None:
        """Free the session and close."""
        self._client.release(self._address, self._session)
        self._client.close()


class MeshnetAio(_Session):
    """The same by the asyncio client, which gateways use."""

    def __init__(
        self, address: str, tensor: npt.NDArray[Any], tls: Credentials | None = None
    ) -> None:
        super().__init__(address, tensor)
        self._client = PlaneClient(LinkSettings(RAW_POLICIES, tls=tls))

    async def round_trip(self) -> Body:
        """Send one chunk, and view the hidden states answered."""
        answer = await self._client.forward(
            self._address,
            NodeId("echo"),
            self._next_header(),
            self._tensor,
            timeout_s=_TIMEOUT_S,
        )
        return b"" if answer.tensor is None else view_bytes(answer.tensor)

    async def close(self) -> None:
        """Free the session and close."""
        await self._client.release(self._address, self._session)
        await self._client.close()
