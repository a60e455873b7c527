"""Whether a node's shard computes: a forward ran lately, or one is run now."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Executor, Future, wait
from typing import Final

import ml_dtypes
import numpy as np

from meshnet.errors import Code, MeshError
from meshnet.grammar import Want
from meshnet.plane.caller import Caller
from meshnet_node.backend import ShardBackend
from meshnet_node.scheduler import Scheduler
from meshnet_node.stage import Stage

__all__ = ["Health"]

_log = logging.getLogger(__name__)

_AGE_S: Final = 10.0
_WAIT_S: Final = 0.5


class Health:
    """The health of one shard; may be asked from any thread.

    Args:
        stage: notes when forwards ran.
        scheduler: gives turns to compute.
        aside: where a forward runs that nobody sent.
        busy_s: how long one that is busy may go without a forward.
    """

    def __init__(
        self, stage: Stage, scheduler: Scheduler, aside: Executor, *, busy_s: float
    ) -> None:
        self._stage = stage
        self._scheduler = scheduler
        self._aside = aside
        self._busy_s = busy_s
        self._running: Future[None] | None = None
        self._lock = threading.Lock()

    def check(self) -> bool:
        """Tell whether a forward ran through the shard lately; runs one if none did.

        It never waits for a shard that is busy: the answer would queue behind the chunk,
        and the node's lease would end meanwhile. A busy shard counts as healthy unless its
        step takes far longer than those before it. Blocks for half a second at most.
        """
        stage = self._stage
        now = time.perf_counter()
        if stage.running.hangs(now):
            return False
        age_s = now - stage.last_forward
        if age_s < _AGE_S:
            return True
        if stage.queue_depth == 0:
            with self._lock:
                running = self._running
                if running is None or running.done():
                    running = self._running = self._aside.submit(self.run)
            wait([running], _WAIT_S)
            if running.done():
                error = running.exception()
                if error is not None:
                    _log.error("the shard's probe failed: %s", error)
                return error is None
        return age_s < self._busy_s

    def run(self) -> None:
        """Run one token through the shard on a cache of its own.

        Raises:
            MeshError: that failed, or gave numbers that are not finite.
        """
        self._scheduler.run(lambda: _run_token(self._stage.backend), Caller(), urgent=False)
        self._stage.last_forward = time.perf_counter()


def _run_token(backend: ShardBackend) -> None:
    """Run one token; any failure of the backend, whatever its kind, is a failed probe."""
    spec = backend.spec
    tensor = (
        np.zeros((1, 1), dtype=np.int32)
        if spec.holds_embedding
        else np.ones((1, 1, spec.hidden_size), dtype=ml_dtypes.bfloat16)
    )
    want = Want("logits") if spec.holds_head else Want("hidden")
    try:
        output = backend.forward(backend.open_cache(), tensor, layers=spec.layers, want=want)
    except MeshError:
        raise
    except Exception as error:
        raise MeshError(Code.INTERNAL, f"the shard's first forward failed: {error}") from error
    if output is None or not np.isfinite(output.astype(np.float32)).all():
        raise MeshError(
            Code.DATA_LOSS, "the shard's first forward gave numbers that are not finite"
        )
