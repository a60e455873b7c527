"""How often a text stays the same when a node is killed, and how long its reader waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from meshnet.cli.up import even_shards
from meshnet.model_dir import read_model_dir
from tests.chaos.mesh import Mesh, MeshOptions, running_mesh
from tests.chaos.report import quantiles
from tests.chaos.streams import Stream
from tests.e2e.prompts import PROMPTS

__all__ = ["CASES", "RatesPlan", "measure_rates"]

_STAGES: Final = 3
_PER_STAGE: Final = 3
"""One computes, one takes over, and one is being started after the last kill."""
_NUM_PROMPTS: Final = 10


@dataclass(frozen=True)
class Case:
    """What the nodes compute in, and how a session goes on.

    Attributes:
        recovery: of the gateway.
        node_options: of the nodes.
    """

    dtype: str
    recovery: str
    node_options: tuple[str, ...] = ()


CASES: Final = {
    "float32-fast": Case("float32", "fast"),
    "bfloat16-fast": Case("bfloat16", "fast"),
    "bfloat16-exact": Case("bfloat16", "exact"),
    "float32-replay": Case("float32", "fast", ("--journal-bytes", "0")),
}


@dataclass(frozen=True)
class RatesPlan:
    """How much is run.

    Attributes:
        model: directory.
        runs: of each case.
        num_tokens: of each answer.
        at_once: sessions at a time; pauses are those of a reader where it is 1.
        seed: of the prompts, the nodes and the tokens at which they are killed.
        first: number of the first run, which with the seed decides what happens in it.
    """

    model: Path
    runs: int = 100
    num_tokens: int = 32
    at_once: int = 2
    seed: int = 0
    first: int = 0


@dataclass
class _Tally:
    equal: int = 0
    pauses: list[float] = field(default_factory=list)
    prefills: list[float] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


async def measure_rates(
    plan: RatesPlan, name: str, folder: Path, progress: Callable[[int], None] = lambda done: None
) -> dict[str, Any]:
    """Run one of `CASES`: the same runs, whatever the case; gives what was seen."""
    case = CASES[name]
    shards = even_shards(read_model_dir(plan.model).num_layers, _STAGES)
    options = MeshOptions(
        plan.model,
        shards,
        per_stage=_PER_STAGE,
        dtype=case.dtype,
        recovery=case.recovery,
        lease_ttl_s=5.0,
        idle_ttl_s=60.0,
        cache_tokens=1 << 16,
        with_proxies=False,
        node_options=case.node_options,
    )
    tally = _Tally()
    async with running_mesh(options, folder) as mesh:
        prompts = _prompts(plan.seed)
        undisturbed = [await _complete(mesh, plan, prompt) for prompt in prompts]
        before = await mesh.figures(mesh.url)
        numbers = iter(range(plan.first, plan.first + plan.runs))
        done = 0
        async with asyncio.TaskGroup() as starting:

            async def work() -> None:
                nonlocal done
                for number in numbers:
                    random = Random(plan.seed * 1_000_003 + number)
                    index = random.randrange(len(prompts))
                    stream = _stream(mesh, plan, prompts[index])
                    async with _killing(mesh, stream, random, plan, starting) as killed_at:
                        await stream.run(mesh.http)
                    _count(tally, number, stream, undisturbed[index], killed_at[0])
                    done += 1
                    progress(done)

            async with asyncio.TaskGroup() as lanes:
                for _ in range(plan.at_once):
                    lanes.create_task(work())
        after = await mesh.figures(mesh.url)
        lines = mesh.new_lines()
    tally.errors += [line for line in lines if "Traceback" in line]
    return {
        "dtype": case.dtype,
        "recovery": case.recovery,
        "runs": plan.runs,
        "equal": tally.equal,
        "pause": quantiles(tally.pauses),
        "prefill": quantiles(tally.prefills),
        "gateway": {
            key: round(after[key] - before.get(key, 0), 3)
            for key in sorted(after)
            if any(word in key for word in ("recover", "recomputed", "abandoned"))
            and "_created" not in key
        },
        "different": tally.different,
        "errors": tally.errors,
    }


@asynccontextmanager
async def _killing(
    mesh: Mesh, stream: Stream, random: Random, plan: RatesPlan, starting: asyncio.TaskGroup
) -> AsyncIterator[list[float]]:
    """Kill a node of a random stage of the stream's route at a random token of it."""
    stage = random.randrange(_STAGES)
    token = random.randint(1, plan.num_tokens - 2)
    killed_at: list[float] = []
    replaced = False

    async def kill() -> None:
        nonlocal replaced
        await stream.reached(token)
        node = await mesh.pick(stage, busy=True)
        killed_at.append(asyncio.get_running_loop().time())
        await mesh.kill_node(node)
        if not mesh.of_stage(stage):  # other sessions have killed the others meanwhile
            replaced = True
            starting.create_task(mesh.start_node(stage))

    task = asyncio.create_task(kill())
    yield killed_at
    await task
    if not replaced:  # now, so that its start takes no time from the pause
        starting.create_task(mesh.start_node(stage))


def _count(
    tally: _Tally, number: int, stream: Stream, undisturbed: Stream, killed_at: float
) -> None:
    if stream.error is not None:
        tally.errors.append(f"run {number}: {stream.error}")
        return
    tally.prefills.append(undisturbed.times[1] - undisturbed.times[0])
    pause = stream.pause_s(killed_at, killed_at + 1.0)
    if pause is not None:
        tally.pauses.append(pause)
    text = undisturbed.text
    if stream.text == text:
        tally.equal += 1
    else:
        pairs = zip(stream.text, text, strict=False)
        place = next((i for i, (got, due) in enumerate(pairs) if got != due), len(text))
        tally.different.append(f"run {number}: from character {place} of {len(text)}")


async def _complete(mesh: Mesh, plan: RatesPlan, prompt: str) -> Stream:
    stream = _stream(mesh, plan, prompt)
    await stream.run(mesh.http)
    if stream.error is not None:
        raise AssertionError(f"an undisturbed run failed: {stream.error}")
    return stream


def _stream(mesh: Mesh, plan: RatesPlan, prompt: str) -> Stream:
    body = {"model": mesh.model, "prompt": prompt, "max_tokens": plan.num_tokens, "temperature": 0}
    return Stream(mesh.url, body)


def _prompts(seed: int) -> list[str]:
    """Give stretches of a text, of 100 to 250 words."""
    random = Random(seed)
    words = PROMPTS[-1].split()
    prompts = []
    for _ in range(_NUM_PROMPTS):
        length = random.randint(100, 250)
        start = random.randrange(len(words) - length)
        prompts.append(" ".join(words[start : start + length]))
    return prompts
