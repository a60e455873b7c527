"""Runs a schedule on a mesh, and says what of it was not as it must be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.chaos.faults import inflict
from tests.chaos.mesh import Mesh
from tests.chaos.model import Request
from tests.chaos.schedule import Fault, Schedule
from tests.chaos.streams import Stream

__all__ = ["Outcome", "run_schedule"]

_SLACK_S = 30.0
"""Beyond the idle time, for nodes' housekeeping and a loaded machine."""
_AFTER_S = 0.5
"""A pause that begins so long after a fault is over is not counted as its own."""


@dataclass
class Outcome:
    """What one run showed.

    Attributes:
        wrong: each thing that was not as it must be; empty is good.
        pauses: kind of each fault, and the longest time without text that a stream had by it.
        hit: the node of each fault.
        recovered: times that a session went on over another route.
        refused: requests that were told to come again.
        over_more_nodes: texts that equal the reference of a route over two nodes of a stage.
        log: what the processes logged.
    """

    schedule: Schedule
    wrong: list[str] = field(default_factory=list)
    pauses: list[tuple[str, float]] = field(default_factory=list)
    hit: list[str] = field(default_factory=list)
    recovered: int = 0
    refused: int = 0
    over_more_nodes: int = 0
    took_s: float = 0.0
    log: list[str] = field(default_factory=list)


async def run_schedule(mesh: Mesh, schedule: Schedule, requests: Sequence[Request]) -> Outcome:
    """Run a schedule; the mesh is whole and empty before and after."""
    outcome = Outcome(schedule)
    began = time.monotonic()
    before = await mesh.figures(mesh.url)
    chosen = [requests[index] for index in schedule.requests]
    streams = [
        Stream(mesh.url, {"model": mesh.model, "prompt": r.prompt, **r.options}) for r in chosen
    ]
    spans: list[tuple[Fault, float, float]] = []

    async def begin(stream: Stream, start_s: float) -> None:
        await asyncio.sleep(start_s)
        await stream.run(mesh.http)

    async def strike(fault: Fault) -> None:
        await streams[fault.session].reached(fault.after)
        at = time.monotonic()
        try:
            outcome.hit.append(await inflict(mesh, fault))
        except AssertionError as error:
            outcome.wrong.append(f"{fault}: {error}")
        spans.append((fault, at, time.monotonic() + _AFTER_S))

    async with asyncio.TaskGroup() as group:
        for stream, start_s in zip(streams, schedule.starts_s, strict=True):
            group.create_task(begin(stream, start_s))
        for fault in schedule.faults:
            group.create_task(strike(fault))
    for node in mesh.nodes.values():
        node.proxy.heal()
    for index, (stream, request) in enumerate(zip(streams, chosen, strict=True)):
        if await asyncio.to_thread(_is_over_more_nodes, stream, request):
            outcome.over_more_nodes += 1
        else:
            outcome.wrong += _compare(index, stream, request)
        outcome.refused += stream.refused
    for fault, at, end in spans:
        pauses = [stream.pause_s(at, end) for stream in streams]
        longest = max((pause for pause in pauses if pause is not None), default=None)
        if longest is not None:
            outcome.pauses.append((str(fault.kind), longest))
    await _settle(mesh, outcome)
    after = await mesh.figures(mesh.url)
    name = "meshnet_sessions_recovered_total"
    outcome.recovered = int(after.get(name, 0) - before.get(name, 0))
    outcome.took_s = time.monotonic() - began
    return outcome


def _is_over_more_nodes(stream: Stream, request: Request) -> bool:
    """Tell whether a text is another one that is right, as its route led over more nodes."""
    tokens = stream.text.split()
    if stream.error is not None or tokens == request.text.split():
        return False
    reason = "length" if len(tokens) == request.options["max_tokens"] else "stop"
    return stream.finish_reason == reason and " ".join(tokens) in request.texts_over_more_nodes


def _compare(index: int, stream: Stream, request: Request) -> list[str]:
    if stream.error is not None:
        return [f"session {index}: {stream.error}"]
    if stream.text.split() != request.text.split():
        pairs = zip(stream.text.split(), request.text.split(), strict=False)
        place = next((i for i, (got, due) in enumerate(pairs) if got != due), "the end")
        return [f"session {index}: another text from token {place}: {stream.text!r}"]
    if stream.finish_reason != "length":
        return [f"session {index}: finish reason {stream.finish_reason!r}"]
    return []


async def _settle(mesh: Mesh, outcome: Outcome) -> None:
    """Wait until the mesh is whole and holds nothing; takes in the logs."""
    try:
        await mesh.whole()
        await mesh.empty(mesh.options.idle_ttl_s + _SLACK_S)
    except AssertionError as error:
        outcome.wrong.append(str(error))
    for node in list(mesh.nodes.values()):
        if node.process.exit_code is not None:
            outcome.wrong.append(f"{node.id} ended by itself with {node.process.exit_code}")
            await mesh.kill_node(node)
            await mesh.start_node(node.stage)
    if mesh.gateway.exit_code is not None:
        outcome.wrong.append(f"the gateway ended with {mesh.gateway.exit_code}")
    outcome.log = mesh.new_lines()
    outcome.wrong += [line for line in outcome.log if "Traceback" in line]
