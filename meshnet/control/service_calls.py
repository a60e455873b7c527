"""What calls of every service of the control plane have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import grpc

from meshnet.control.calls import Calls

__all__ = ["PAGE_SIZE", "ServiceCalls"]

PAGE_SIZE: Final = 1000
"""Most that one answer lists."""

_Stub = Callable[[grpc.aio.Channel], Any]


class ServiceCalls:
    """Calls of a client, by the stub and the name of a method.

    Args:
        calls: to whichever replica answers.
    """

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    async def _call(
        self, stub: _Stub, method: str, request: object, timeout_s: float | None = None
    ) -> Any:
        return await self._calls.call(lambda c: getattr(stub(c), method), request, timeout_s)

    async def _all(self, stub: _Stub, method: str, request: Any, field: str) -> list[Any]:
        """List page by page; gives what the answers have in `field`."""
        request.page_size = PAGE_SIZE
        found: list[Any] = []
        while True:
            response = await self._call(stub, method, request)
            found += getattr(response, field)
            if not response.next_page_token:
                return found
            request.page_token = response.next_page_token
