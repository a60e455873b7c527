"""``meshnet chat``: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import sys
from typing import Annotated

import aiohttp
import typer

from meshnet import config
from meshnet.cli.completions import StreamEnd, bearer, list_models, stream_chat
from meshnet.cli.output import console, errors
from meshnet.errors import Code, MeshError

__all__ = ["chat"]


def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="Ask this one thing and end; else a conversation.")
    ] = None,
    gateway: Annotated[
        str | None,
        typer.Option(
            help="The gateway's address; else MESHNET_GATEWAY.",
            show_default="http://127.0.0.1:8080",
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model; else the gateway's first.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0)] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1)] = None,
    seed: Annotated[int | None, typer.Option()] = None,
) -> None:
    """Talk to a model through a gateway. End with Ctrl-D; Ctrl-C stops an answer.

    A gateway that wants an API key gets the one in MESHNET_API_KEY.

    Example: meshnet chat "What is the capital of France?"
    """
    settings = config.load()
    url = (gateway or settings.gateway_url).rstrip("/").removesuffix("/v1")
    options = {"temperature": temperature, "max_tokens": max_tokens, "seed": seed}
    messages = [{"role": "system", "content": system}] if system else []
    headers = bearer(settings.api_key)
    if prompt is not None:
        messages.append({"role": "user", "content": prompt})
        asyncio.run(_answer(url, headers, model, messages, options))
        return
    errors.print("[dim]Ctrl-D ends, Ctrl-C stops an answer.[/dim]")
    while True:
        try:
            text = console.input("[bold]> [/bold]") if sys.stdin.isatty() else input()
        except EOFError:
            return
        if not text.strip():
            continue
        messages.append({"role": "user", "content": text})
        try:
            answer = asyncio.run(_answer(url, headers, model, messages, options))
        except KeyboardInterrupt:
            errors.print("\n[dim]stopped[/dim]")
            messages.pop()
            continue
        messages.append({"role": "assistant", "content": answer})


async def _answer(
    url: str,
    headers: dict[str, str],
    model: str | None,
    messages: list[dict[str, str]],
    options: dict[str, float | int | None],
) -> str:
    """Stream one answer to standard output; gives its whole text."""
    pieces = []
    async with aiohttp.ClientSession(headers=headers) as http:
        if model is None:
            models = await list_models(http, url)
            if not models:
                raise MeshError(Code.NOT_FOUND, f"the gateway at {url} serves no model")
            model = models[0]
        async for piece in stream_chat(http, url, model, messages, **options):
            if isinstance(piece, StreamEnd):
                break
            pieces.append(piece)
            console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    console.print()
    return "".join(pieces)
