"""Fakes for unit tests: a clock that is set by hand, a backend that remembers."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from meshnet.grammar import Want
from meshnet.topology import LayerRange
from meshnet_node.stub import StubBackend


class FakeClock:
    """Seconds that pass when a test says so."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class RecordingBackend(StubBackend):
    """A stub with a head that records its calls, and fails or blocks when told."""

    def __init__(self, layers: LayerRange, *, hidden_size: int = 8, num_layers: int | None = None):
        super().__init__(layers, hidden_size=hidden_size, num_layers=num_layers, head=True)
        self.calls: list[tuple[int, int, str, str]] = []
        self.fail_next: Exception | None = None
        self.block: threading.Event | None = None
        self.on_call: Callable[[int], None] = lambda index: None

    def forward(self, cache, tensor: npt.NDArray[np.generic], *, layers: LayerRange, want: Want):
        self.calls.append((cache.length, tensor.shape[1], str(layers), str(want)))
        self.on_call(len(self.calls) - 1)
        if self.block is not None:
            self.block.wait(30.0)
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        return super().forward(cache, tensor, layers=layers, want=want)
