"""Probes a node's own shard: when it is loaded, with each heartbeat, after errors.

A round goes through all weights and all that the shard computes. While serving it is done in
slices, one a heartbeat, that take a small part of the node's time: see `PROBE_SHARE`. What
changes all layers (rotations, element types, an order) shows in the first layer of a slice.

Forwards of a probe have a cache of their own, which no session's budget pays for, and are run
one layer at a time, when no session's chunk waits. A node that is never idle is probed like a
prefill chunk after a while: one that computes wrong numbers all the time must be found too.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Generator
from typing import Final, NamedTuple

from meshnet.errors import MeshError
from meshnet.plane.caller import Caller
from meshnet.probes import WHOLE, PartReport, Report
from meshnet_node.backend import LoadedWeights, ShardBackend
from meshnet_node.drift import Drift
from meshnet_node.probe import Output, probed_parts, probing
from meshnet_node.scheduler import Scheduler

__all__ = ["IDLE_SHARE", "PROBE_INTERVAL_S", "PROBE_SHARE", "Probed", "Prober"]

_log = logging.getLogger(__name__)

PROBE_INTERVAL_S: Final = 10 / 3
"""Between slices where no control plane says how often it is to hear of this node."""

PROBE_SHARE: Final = 0.01
"""Part of the time of a node that serves that probes may take, of computing and of hashing."""

IDLE_SHARE: Final = 0.05
"""The same of a node that got no chunk since the slice before."""

_IDLE_WAIT_S: Final = 1.0
"""How long a probe lets all other work pass ahead."""

_ROUND_OVER: Final = object()


class Probed(NamedTuple):
    """A report; `number` grows by one with each, `at_s` is monotonic."""

    number: int
    report: Report
    at_s: float


class Prober:
    """Probes one shard.

    Args:
        backend: of the shard.
        weights: of the backend.
        scheduler: whose turn it is to compute.
        interval_s: between slices while serving; 0 for no probes but those asked for.
        on_forward: told of each forward that passed.
        on_news: told, by the thread that probes, that `failure` is another than before.
        num_chunks: counts the chunks that sessions had computed here.
        clock: seconds, monotonic.

    Attributes:
        latest: what was found last; None before the first probe.
        failure: why what is computed here is not to be used; empty if nothing speaks against it.
        interval_s: as given; may be changed.
    """

    def __init__(
        self,
        backend: ShardBackend,
        weights: LoadedWeights,
        scheduler: Scheduler,
        *,
        interval_s: float,
        on_forward: Callable[[], None] = lambda: None,
        on_news: Callable[[], None] = lambda: None,
        num_chunks: Callable[[], int] = lambda: 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.interval_s = interval_s
        self.latest: Probed | None = None
        self.failure = ""
        self._backend = backend
        self._weights = weights
        self._scheduler = scheduler
        self._on_forward = on_forward
        self._on_news = on_news
        self._num_chunks = num_chunks
        self._clock = clock
        self._seen_chunks = 0
        self._drift = Drift(backend.spec.hidden_size)
        self._digests: dict[str, bytes] = {}
        self._computed: dict[str, PartReport] = {}
        self._next_part = itertools.cycle(weights.parts)
        self._round: Generator[None] | None = None
        self._spent_s = 0.0
        self._numbers = itertools.count(1)
        self._wake = threading.Condition()
        self._is_wanted = False
        self._wanted_from = -math.inf
        self._is_closed = False
        self._caller = Caller()
        self._thread: threading.Thread | None = None

    def run(self) -> None:
        """Probe all of the shard now, and keep the report as `latest`."""
        self._report(self._probe_all)

    def trust(self, probed: Probed) -> None:
        """Hear that a report is what the model gives: others are compared with it from now on."""
        self._drift.trust(probed.report)
        latest = self.latest
        if latest is not None and latest.report.parts:
            self.failure = self._drift.find(latest.report.parts)

    def start(self) -> None:
        """Begin to probe by time and by wish."""
        self._thread = threading.Thread(target=self._serve, name="prober", daemon=True)
        self._thread.start()

    def wish(self) -> None:
        """Probe all of the shard again: at once, or soon if that was done a moment ago."""
        with self._wake:
            self._is_wanted = True
            self._wake.notify()

    def close(self) -> None:
        """Probe no more; a round that runs ends with its layer."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join()

    def step(self) -> float:
        """Go on with the round, or do all of it if that is wished; gives when that is due again.

        Returns:
            Seconds on the clock.
        """
        began, share = self._clock(), self._share()
        with self._wake:
            is_wanted = self._is_wanted and began >= self._wanted_from
            self._is_wanted = self._is_wanted and not is_wanted
        if is_wanted or self._has_problem():
            self._report(self._probe_all)
            self._wanted_from = began + self._spent_s / IDLE_SHARE
        else:
            self._report(lambda: self._probe_some(share))
        return began + self._pause_s(self._spent_s, share)

    def _serve(self) -> None:
        due = self._clock() + self._pause_s(0.0, PROBE_SHARE)
        while self._await(due):
            due = self.step()

    def _await(self, due: float) -> bool:
        """Wait until something is to be done; False once that is nothing more."""
        with self._wake:
            while not self._is_closed:
                until = min(due, self._wanted_from) if self._is_wanted else due
                remaining = until - self._clock()
                if remaining <= 0:
                    return True
                self._wake.wait(None if math.isinf(remaining) else remaining)
        return False

    def _pause_s(self, spent_s: float, share: float) -> float:
        return max(self.interval_s, spent_s / share) if self.interval_s else math.inf

    def _share(self) -> float:
        """Give the part of the time that may be taken now."""
        before, self._seen_chunks = self._seen_chunks, self._num_chunks()
        return IDLE_SHARE if before == self._seen_chunks else PROBE_SHARE

    def _has_problem(self) -> bool:
        """Tell whether the last probe could not be run to its end."""
        return self.latest is not None and not self.latest.report.parts

    def _report(self, probe: Callable[[], None]) -> None:
        """Probe, and say what is known of all parts now."""
        self._spent_s = 0.0
        dtype = self._weights.dtype
        try:
            probe()
            found = {name: PartReport(digest) for name, digest in self._digests.items()}
            for name, part in self._computed.items():
                digest = b"" if name == WHOLE else self._digests.get(name, b"")
                found[name] = PartReport(digest, part.sketch, part.against)
            report = Report(dtype, found, problem=self._drift.find(found))
        except MeshError as error:
            if error.reason == "QUEUE_FULL":  # says nothing of numbers
                _log.warning("the shard was not probed: %s", error)
                return
            _log.error("the shard's probe failed: %s", error)
            report = Report(dtype, problem=str(error))
        except Exception as error:  # noqa: BLE001 - a library's: whatever it is, the probe failed
            _log.exception("the shard's probe failed")
            report = Report(dtype, problem=f"{type(error).__name__}: {error}")
        self.latest = Probed(next(self._numbers), report, self._clock())
        _log.debug("probed the shard for %.3f s", self._spent_s)
        before, self.failure = self.failure, report.problem
        if report.problem != before:
            self._on_news()

    def _probe_all(self) -> None:
        for name in self._weights.parts:
            if not self._is_closed:
                self._hash(name)
        self._round = None
        for _ in self._compute():
            if self._is_closed:
                break

    def _probe_some(self, share: float) -> None:
        """Go on with the round, for a part of the interval: half for the weights at most."""
        budget_s = share * self.interval_s
        for name in itertools.islice(self._next_part, len(self._weights.parts)):
            self._hash(name)
            if self._is_closed or self._spent_s >= budget_s / 2:
                break
        steps = self._round = self._round or self._compute()
        self._round = None  # unless there is more of it to do
        while next(steps, _ROUND_OVER) is not _ROUND_OVER:
            if self._num_chunks() != self._seen_chunks:
                budget_s = min(budget_s, PROBE_SHARE * self.interval_s)
            if self._is_closed or self._spent_s >= budget_s:
                self._round = steps
                break

    def _hash(self, name: str) -> None:
        began = self._clock()
        self._digests[name] = self._weights.digest(name)
        self._spent_s += self._clock() - began

    def _compute(self) -> Generator[None]:
        """Compute each part, a turn for each forward; gives way after each."""
        for name in probed_parts(self._backend):
            steps = probing(self._backend, name)
            work = next(steps)
            try:
                while True:
                    output = self._turn(work)
                    yield
                    work = steps.send(output)
            except StopIteration as end:
                self._computed[name] = end.value

    def _turn(self, work: Callable[[], Output]) -> Output:
        def measured() -> Output:
            began = self._clock()
            output = work()
            self._spent_s += self._clock() - began
            return output

        try:
            output = self._scheduler.run_idle(measured, self._caller, max_wait_s=_IDLE_WAIT_S)
        except MeshError as error:
            if error.reason != "QUEUE_FULL":
                raise
            output = self._scheduler.run(measured, self._caller, urgent=False)
        self._on_forward()
        return output
