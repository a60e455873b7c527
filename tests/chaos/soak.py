"""Thousands of sessions, half of them abandoned: everything must be given back."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

import aiohttp
import numpy as np
import psutil
from tokenizers import Tokenizer, models, pre_tokenizers

from meshnet.dtypes import INT32
from meshnet.errors import Code, MeshError, NextHopError
from meshnet.grammar import Phase, Want
from meshnet.plane.client import PlaneClient
from meshnet.plane.http1 import build_request
from meshnet.topology import Hop, LayerRange, NodeId, SessionId
from meshnet.wire import ChunkHeader, pack_chunk
from tests.chaos.mesh import Mesh, MeshOptions, running_mesh

__all__ = ["SoakPlan", "SoakReport", "soak"]

_STAGES: Final = (LayerRange(0, 1), LayerRange(1, 2), LayerRange(2, 3))
_VOCAB: Final = 32
_CHUNK_TOKENS: Final = 16
_IDLE_TTL_S: Final = 4.0
_SLACK_S: Final = 30.0
_ATOM: Final = aiohttp.ClientTimeout(total=120.0)


@dataclass(frozen=True)
class SoakPlan:
    """How much is run.

    Attributes:
        sessions: in all.
        at_once: at a time.
        samples: of the processes' memory, evenly over the run.
        seed: of what each session does.
    """

    sessions: int = 10_000
    at_once: int = 24
    samples: int = 50
    seed: int = 0


@dataclass
class SoakReport:
    """What was seen.

    Attributes:
        ends: how sessions ended, by how often.
        wrong: each thing that was not as it must be; empty is good.
        before: what every node held before: sessions, reserved tokens, journal bytes.
        peak: most that was held at a sample, over all nodes.
        after: as `before`, at the end.
        rss_mib: of each process, at the first sample of the second half and at the end.
        slope: bytes a session of each process over the second half.
    """

    plan: SoakPlan
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    before: dict[str, float] = field(default_factory=dict)
    peak: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    rss_mib: dict[str, list[float]] = field(default_factory=dict)
    slope: dict[str, float] = field(default_factory=dict)
    took_s: float = 0.0

    def describe(self) -> dict[str, Any]:
        """Give everything, for JSON."""
        return {
            "sessions": self.plan.sessions,
            "ends": dict(sorted(self.ends.items())),
            "held": {"before": self.before, "peak": self.peak, "after": self.after},
            "rss_mib": self.rss_mib,
            "rss_bytes_per_session": self.slope,
            "took_s": round(self.took_s, 1),
            "wrong": self.wrong,
        }


async def soak(
    plan: SoakPlan, folder: Path, progress: Callable[[int], None] = lambda done: None
) -> SoakReport:
    """Run sessions against a mesh of stub nodes; gives what was seen.

    Half of the sessions run to their end through the gateway. The others are left: the
    client's socket closes in the prefill or in the decode, a caller of the nodes never
    releases its session, or its connection breaks in the middle of a body.
    """
    options = MeshOptions(
        _save_text_side(folder / "stub"),
        _STAGES,
        per_stage=1,
        chunk_tokens=_CHUNK_TOKENS,
        idle_ttl_s=_IDLE_TTL_S,
        cache_tokens=50_000,
        with_proxies=False,
        stub=True,
    )
    report = SoakReport(plan)
    async with running_mesh(options, folder / "logs") as mesh:
        soaker = _Soaker(mesh, report)
        try:
            await soaker.run(progress)
        finally:
            await soaker.plane.close()
        report.wrong += [line for line in mesh.new_lines() if "Traceback" in line]
    return report


class _Soaker:
    def __init__(self, mesh: Mesh, report: SoakReport) -> None:
        self.mesh = mesh
        self.report = report
        self.plane = PlaneClient()
        nodes = sorted(mesh.nodes.values(), key=lambda node: node.stage)
        self._hops = tuple(
            Hop(NodeId(node.id), node.address, layers)
            for node, layers in zip(nodes, _STAGES, strict=True)
        )
        self._processes = {
            "gateway": psutil.Process(mesh.gateway.pid),
            "control": psutil.Process(mesh.control.pid),
            **{f"node {node.stage}": psutil.Process(node.process.pid) for node in nodes},
        }
        self._rss: list[tuple[int, dict[str, int]]] = []
        self._done = 0

    async def run(self, progress: Callable[[int], None]) -> None:
        plan, report = self.report.plan, self.report
        clock = asyncio.get_running_loop().time
        began = clock()
        report.before = await self._held()
        report.peak = dict(report.before)
        numbers = iter(range(plan.sessions))
        every = max(1, plan.sessions // plan.samples)

        async def work() -> None:
            for number in numbers:
                report.ends[await self._session(number)] += 1
                self._done += 1
                progress(self._done)
                if self._done % every == 0:
                    await self._sample()

        async with asyncio.TaskGroup() as group:
            for _ in range(plan.at_once):
                group.create_task(work())
        try:
            await self.mesh.empty(_IDLE_TTL_S + _SLACK_S)
        except AssertionError as error:
            report.wrong.append(str(error))
        await self._sample()
        report.after = await self._held()
        if report.after != report.before:
            report.wrong.append(f"held after: {report.after}; before: {report.before}")
        self._fit()
        report.took_s = clock() - began

    async def _session(self, number: int) -> str:
        """Run one session; gives how it ended."""
        random = Random(self.report.plan.seed * 1_000_003 + number)
        ways: list[Callable[[Random], Awaitable[str]]] = [
            self._leave_in_prefill,
            self._leave_in_decode,
            self._never_release,
            self._break_a_body,
        ]
        way = self._finish if number % 2 == 0 else random.choice(ways)
        try:
            return await way(random)
        except NextHopError as error:
            # A node that its machine holds up for seconds is called dead. A gateway takes
            # another route; who speaks to nodes is told, and may send the chunk again.
            if error.code is not Code.DEADLINE_EXCEEDED or way == self._finish:
                self.report.wrong.append(f"session {number}: {error}")
                return "failed"
            return "told of a late node"
        except (aiohttp.ClientError, TimeoutError, MeshError) as error:
            self.report.wrong.append(f"session {number}: {type(error).__name__}: {error}")
            return "failed"

    def _request(self, random: Random, num_tokens: int) -> dict[str, Any]:
        prompt = [random.randrange(_VOCAB) for _ in range(random.randint(1, 120))]
        body = {"model": self.mesh.model, "prompt": prompt, "max_tokens": num_tokens}
        url = self.mesh.url + "/v1/completions"
        return {"url": url, "json": body | {"stream": True, "temperature": 0}, "timeout": _ATOM}

    async def _finish(self, random: Random) -> str:
        num_tokens = random.randint(1, 8)
        async with self.mesh.http.post(**self._request(random, num_tokens)) as answer:
            lines = [line async for line in answer.content if line.startswith(b"data: {")]
        events = [json.loads(line[6:]) for line in lines]
        if answer.status != 200 or not events or events[-1]["choices"][0]["finish_reason"] is None:
            self.report.wrong.append(f"status {answer.status}, {events[-1:]}")
            return "failed"
        return "finished"

    async def _leave_in_prefill(self, random: Random) -> str:
        """Close the socket a moment after the request was sent."""
        with suppress(TimeoutError):
            async with asyncio.timeout(random.uniform(0.0, 0.02)):
                async with self.mesh.http.post(**self._request(random, 50)):
                    pass
        return "left in prefill"

    async def _leave_in_decode(self, random: Random) -> str:
        """Close the socket after some pieces of text."""
        async with self.mesh.http.post(**self._request(random, 200)) as answer:
            for _ in range(random.randint(2, 20)):
                await answer.content.readline()
            answer.close()
        return "left in decode"

    async def _never_release(self, random: Random) -> str:
        """Send some chunks along the route, and no more."""
        session = SessionId(str(uuid.uuid4()))
        position = 0
        for _ in range(random.randint(1, 4)):
            tensor = np.zeros((1, random.randint(1, _CHUNK_TOKENS)), np.int32)
            header = self._header(session, tensor, position)
            first = self._hops[0]
            await self.plane.forward(first.address, first.node, header, tensor, timeout_s=60)
            position += tensor.shape[1]
        return "never released"

    async def _break_a_body(self, random: Random) -> str:
        """Open a session, then close the connection inside the next chunk's body."""
        session = SessionId(str(uuid.uuid4()))
        first = self._hops[0]
        tensor = np.zeros((1, 8), np.int32)
        header = self._header(session, tensor, 0)
        await self.plane.forward(first.address, first.node, header, tensor, timeout_s=60)
        fields = pack_chunk(self._header(session, tensor, 8))
        head = build_request("POST", "/forward", first.address, fields, tensor.nbytes)
        whole = head + tensor.tobytes()
        host, _, port = first.address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(whole[: random.randrange(len(whole))])
        with suppress(OSError):
            await writer.drain()
            writer.close()
            await writer.wait_closed()
        return "broken in a body"

    def _header(self, session: SessionId, tensor: Any, position: int) -> ChunkHeader:
        return ChunkHeader(
            shape=tensor.shape,
            dtype=INT32,
            session=session,
            position=position,
            layers=_STAGES[0],
            phase=Phase.PREFILL,
            want=Want("none"),
            route=self._hops[1:],
            max_tokens=100 if position == 0 else None,
        )

    async def _held(self) -> dict[str, float]:
        """Give what all nodes together hold."""
        figures = await asyncio.gather(
            *(self.mesh.figures(f"http://{node.address}") for node in self.mesh.nodes.values())
        )
        names = {
            "sessions": "meshnet_sessions",
            "reserved_tokens": "meshnet_cache_tokens_reserved",
            "journal_bytes": "meshnet_journal_bytes",
        }
        return {
            name: sum(node[metric] for node in figures)
            for name, metric in names.items()
            if all(metric in node for node in figures)
        }

    async def _sample(self) -> None:
        rss = {name: process.memory_info().rss for name, process in self._processes.items()}
        self._rss.append((self._done, rss))
        held = await self._held()
        peak = self.report.peak
        self.report.peak = {name: max(value, peak.get(name, 0)) for name, value in held.items()}

    def _fit(self) -> None:
        """Fit a line through each process's memory over the second half of the sessions."""
        half = [(done, rss) for done, rss in self._rss if done >= self.report.plan.sessions / 2]
        for name in self._processes:
            sizes = [rss[name] for _, rss in half]
            slope = np.polyfit([done for done, _ in half], sizes, 1)[0]
            self.report.slope[name] = round(float(slope), 1)
            self.report.rss_mib[name] = [round(size / 2**20, 1) for size in (sizes[0], sizes[-1])]


def _save_text_side(directory: Path) -> Path:
    """Write what a gateway needs of a model of this name: a tokenizer of one word a token."""
    directory.mkdir(parents=True)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(_VOCAB)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(directory / "tokenizer.json"))
    config = {
        "model_type": "llama",
        "num_hidden_layers": _STAGES[-1].end,
        "hidden_size": 8,
        "vocab_size": _VOCAB,
        "max_position_embeddings": 4096,
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory
