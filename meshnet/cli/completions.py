"""A chat answer from a gateway, as it streams."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from meshnet.errors import Code, MeshError

__all__ = ["StreamEnd", "bearer", "list_models", "stream_chat"]

_CONNECT_S = 5.0
_LINE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """What is known once an answer is whole.

    Attributes:
        finish_reason: ``stop`` or ``length``.
        usage: the OpenAI usage object.
        mesh: the gateway's account of the hops (see gateway/README.md), empty without one.
    """

    finish_reason: str | None
    usage: dict[str, Any] = field(default_factory=dict)
    mesh: dict[str, Any] = field(default_factory=dict)


def bearer(api_key: str | None) -> dict[str, str]:
    """Give the header fields that show a gateway a key."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}


async def list_models(http: aiohttp.ClientSession, gateway_url: str) -> list[str]:
    """Ask a gateway for its models.

    Raises:
        MeshError: it cannot be reached, or answers an error.
    """
    try:
        async with http.get(f"{gateway_url}/v1/models") as response:
            if response.status != 200:
                raise await _refusal(response)
            return [str(model["id"]) for model in (await response.json())["data"]]
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise _unreachable(gateway_url, error) from None


async def stream_chat(
    http: aiohttp.ClientSession,
    gateway_url: str,
    model: str,
    messages: Sequence[dict[str, str]],
    **options: Any,
) -> AsyncIterator[str | StreamEnd]:
    """Stream one chat answer: pieces of text, then one `StreamEnd`.

    Args:
        http: any session.
        gateway_url: without ``/v1``.
        model: as `list_models` names it.
        messages: OpenAI chat messages.
        options: further fields of the request; None leaves one out.

    Raises:
        MeshError: the gateway refused, broke off, or cannot be reached.
    """
    request = {
        "model": model,
        "messages": list(messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        **{name: value for name, value in options.items() if value is not None},
    }
    finish: str | None = None
    usage: dict[str, Any] = {}
    mesh: dict[str, Any] = {}
    try:
        async with http.post(
            f"{gateway_url}/v1/chat/completions",
            json=request,
            headers={"X-Meshnet-Timings": "1"},
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
        ) as response:
            if response.status != 200:
                raise await _refusal(response)
            async for event in _events(response):
                if "error" in event:
                    message = str(event["error"].get("message", event["error"]))
                    raise MeshError(Code.UNAVAILABLE, f"the answer broke off: {message}")
                usage = event.get("usage") or usage
                mesh = event.get("meshnet") or mesh
                for choice in event.get("choices", []):
                    finish = choice.get("finish_reason") or finish
                    if text := choice.get("delta", {}).get("content"):
                        yield str(text)
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        raise _unreachable(gateway_url, error) from None
    yield StreamEnd(finish, usage, mesh)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """Read server-sent events until ``[DONE]``; a stream that ends without it broke off."""
    buffer = b""
    async for piece in response.content.iter_any():
        buffer += piece
        *lines, buffer = buffer.split(b"\n")
        if len(buffer) > _LINE_BYTES:
            raise MeshError(Code.DATA_LOSS, f"the gateway sent a line of over {_LINE_BYTES} bytes")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if not line.startswith(b"data:"):
                continue
            if data == b"[DONE]":
                return
            yield json.loads(data)
    raise MeshError(Code.UNAVAILABLE, "the answer broke off: the gateway closed the connection")


async def _refusal(response: aiohttp.ClientResponse) -> MeshError:
    """Read an OpenAI error object, or whatever a proxy put in its place."""
    text = (await response.content.read(65536)).decode(errors="replace")
    try:
        message = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = text.strip()[:200] or "no body"
    return MeshError(Code.UNAVAILABLE, f"the gateway answered {response.status}: {message}")


def _unreachable(gateway_url: str, error: Exception) -> MeshError:
    reason = str(error) or type(error).__name__
    return MeshError(Code.UNAVAILABLE, f"no gateway answers at {gateway_url}: {reason}")
