"""Clients of the gateway: each reads one completion as a stream and notes when what came."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp

__all__ = ["Stream"]

_SILENCE_S = 120.0
"""Longer than any fault lasts: a stream that is silent for so long hangs."""
_TRY_AGAIN_S = 90.0


@dataclass
class Stream:
    """One completion.

    Attributes:
        body: of the request.
        times: when it was sent, and when each piece of text came; of the monotonic clock.
        text: what came.
        finish_reason: at its end.
        error: what the stream or the answer said instead.
        refused: answers of 429 and 503 before any text, after which it was sent again.
    """

    url: str
    body: dict[str, Any]
    times: list[float] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    error: str | None = None
    refused: int = 0
    _pieces: int = 0
    _moved: asyncio.Condition = field(default_factory=asyncio.Condition)
    _over: bool = False

    async def run(self, http: aiohttp.ClientSession) -> None:
        """Send the request and read its answer to the end; what goes wrong is in `error`."""
        self.times.append(time.monotonic())
        try:
            while not await self._once(http):
                self.refused += 1
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self._over = True
            async with self._moved:
                self._moved.notify_all()

    async def reached(self, pieces: int) -> None:
        """Wait until so many pieces came, or the stream is over."""
        async with self._moved:
            await self._moved.wait_for(
                lambda: self._over or (self.times and self._pieces >= pieces)
            )

    def pause_s(self, begin: float, end: float) -> float | None:
        """Give the longest time between pieces that lies at least partly in this time.

        None where the stream did not run then.
        """
        if not self.times or self.times[-1] < begin or self.times[0] > end:
            return None
        gaps = [
            later - earlier
            for earlier, later in zip(self.times, self.times[1:], strict=False)
            if later > begin and earlier < end
        ]
        return max(gaps, default=None)

    async def _once(self, http: aiohttp.ClientSession) -> bool:
        """Send the request once; False where it is to be sent again."""
        timeout = aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S)
        url = self.url + "/v1/completions"
        async with http.post(url, json={**self.body, "stream": True}, timeout=timeout) as answer:
            if answer.status != 200:
                text = await answer.text()
                wait_s = float(answer.headers.get("Retry-After", "0.5"))
                is_late = time.monotonic() - self.times[0] > _TRY_AGAIN_S
                if answer.status not in (429, 503) or is_late:
                    self.error = f"status {answer.status}: {text}"
                    return True
                await asyncio.sleep(wait_s)
                return False
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    await self._take(json.loads(line[6:]))
        if self.finish_reason is None and self.error is None:
            self.error = "the stream ended without a finish reason"
        return True

    async def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = json.dumps(event["error"])
            return
        for choice in event["choices"]:
            self.finish_reason = choice["finish_reason"] or self.finish_reason
            if choice["text"]:
                self.text += choice["text"]
                self._pieces += 1
                self.times.append(time.monotonic())
                async with self._moved:
                    self._moved.notify_all()
