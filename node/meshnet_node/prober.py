"""Probes a node's own shard: when it is loaded, again and again while it serves, after errors.

Forwards of a probe have a cache of their own, which no session's budget pays for, and are run
one layer at a time, when no session's chunk waits. A node that is never idle is probed like a
prefill chunk after a while: one that computes wrong numbers all the time must be found too.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from meshnet.errors import MeshError
from meshnet.plane.caller import Caller
from meshnet.probes import WHOLE, PartReport, Report
from meshnet_node.backend import LoadedWeights, ShardBackend
from meshnet_node.probe import Output, probe_part, probed_parts
from meshnet_node.scheduler import Scheduler

__all__ = ["PROBE_INTERVAL_S", "Probed", "Prober"]

_log = logging.getLogger(__name__)

PROBE_INTERVAL_S: Final = 60.0

_IDLE_WAIT_S: Final = 15.0
"""How long a probe lets all other work pass ahead."""

_DIGEST_BYTES: Final = 256 << 20
"""Weights whose digest is computed again in one round; at least one part."""


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
        interval_s: between rounds while serving; 0 for none but those asked for.
        on_forward: told of each forward that passed.
    """

    def __init__(
        self,
        backend: ShardBackend,
        weights: LoadedWeights,
        scheduler: Scheduler,
        *,
        interval_s: float,
        on_forward: Callable[[], None] = lambda: None,
    ) -> None:
        self._backend = backend
        self._weights = weights
        self._scheduler = scheduler
        self._interval_s = interval_s
        self._on_forward = on_forward
        self._digests: dict[str, bytes] = {}
        self._next_part = itertools.cycle(weights.parts)
        self._numbers = itertools.count(1)
        self._wake = threading.Condition()
        self._is_wanted = False
        self._is_closed = False
        self._caller = Caller()
        self._thread: threading.Thread | None = None
        self.latest: Probed | None = None

    def run(self, *, whole: bool = True) -> None:
        """Probe the shard now, and keep the report as `latest`.

        Args:
            whole: compute the digests of all weights, not of the next few only.
        """
        began = time.monotonic()
        dtype = self._weights.dtype
        try:
            report = Report(dtype, self._probe(whole=whole))
        except MeshError as error:
            _log.error("the shard's probe failed: %s", error)
            report = Report(dtype, problem=str(error))
        except Exception as error:  # noqa: BLE001 - a library's: whatever it is, the probe failed
            _log.exception("the shard's probe failed")
            report = Report(dtype, problem=f"{type(error).__name__}: {error}")
        self.latest = Probed(next(self._numbers), report, time.monotonic())
        _log.debug("probed the shard in %.3f s", time.monotonic() - began)

    def start(self) -> None:
        """Begin to probe by time and by wish."""
        self._thread = threading.Thread(target=self._serve, name="prober", daemon=True)
        self._thread.start()

    def wish(self) -> None:
        """Probe again soon, with the digests of all weights."""
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

    def _serve(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(
                    lambda: self._is_wanted or self._is_closed, self._interval_s or None
                )
                if self._is_closed:
                    return
                is_wanted, self._is_wanted = self._is_wanted, False
            self.run(whole=is_wanted)

    def _probe(self, *, whole: bool) -> dict[str, PartReport]:
        names = [*self._weights.parts] if whole else self._due()
        for name in names:
            if not self._is_closed:
                self._digests[name] = self._weights.digest(name)
        found = {name: PartReport(digest) for name, digest in self._digests.items()}
        for name in probed_parts(self._backend):
            if self._is_closed:
                break
            part = probe_part(self._backend, name, self._turn)
            digest = b"" if name == WHOLE else self._digests.get(name, b"")
            found[name] = PartReport(digest, part.sketch, part.against)
        return found

    def _due(self) -> list[str]:
        """Give the parts whose digest is to be computed again."""
        due: list[str] = []
        num_bytes = 0
        parts = self._weights.parts
        while not due or (num_bytes < _DIGEST_BYTES and len(due) < len(parts)):
            due.append(next(self._next_part))
            num_bytes += parts[due[-1]]
        return due

    def _turn(self, work: Callable[[], Output]) -> Output:
        try:
            output = self._scheduler.run_idle(work, self._caller, max_wait_s=_IDLE_WAIT_S)
        except MeshError as error:
            if error.reason != "QUEUE_FULL":
                raise
            output = self._scheduler.run(work, self._caller, urgent=False)
        self._on_forward()
        return output
