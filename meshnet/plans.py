"""How one body is to go, and what became of such bodies (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from meshnet.compression import Clock, CompressionPolicy, CompressionResult, compress_activation
from meshnet.dtypes import Body

__all__ = ["Decisions", "Plan"]


@dataclass(frozen=True, slots=True)
class Plan:
    """How one body goes.

    Attributes:
        encoding: that is to be tried; None is raw.
        reason: ``disabled``, ``below_min_input``, ``not_accepted``, ``link_faster`` (raw
            arrives sooner), ``sample`` (a sample shows too little to save), ``fastest``,
            ``probe`` (tried to keep the estimates true) or ``manual``.
        phase: of the chunk.
        policy: whose thresholds hold.
        width: see `meshnet.codec.compress`.
        sampled: ratio that a sample predicted; None where none was taken.
        learn: whether the ratio is typical of the link.
    """

    encoding: str | None
    reason: str
    phase: str
    policy: CompressionPolicy
    width: int | None
    sampled: float | None = None
    learn: bool = True

    @property
    def stays_raw(self) -> bool:
        """Whether bodies of that size and phase go raw whatever the link does."""
        return self.reason in ("disabled", "below_min_input")

    def apply(self, body: Body, clock: Clock) -> CompressionResult:
        """Encode `body` as planned; may run in any thread.

        Where the encoder is missing or saves too little, the result is the raw body, with
        `CompressionResult.decision` saying why; for a raw plan that is the reason.

        Args:
            body: the one that the plan was made for.
            clock: seconds, monotonic.
        """
        if self.encoding is None:
            size = memoryview(body).nbytes
            return CompressionResult(body, None, size, size, 0.0, self.reason)
        return compress_activation(
            body, self.policy, clock=clock, encoding=self.encoding, width=self.width
        )


@dataclass(slots=True)
class Decisions:
    """What became of the bodies of one phase with one outcome.

    Attributes:
        count: of bodies.
        input_bytes: of the tensors.
        output_bytes: of the bodies as they went.
    """

    count: int = 0
    input_bytes: int = 0
    output_bytes: int = 0

    def add(self, input_bytes: int, output_bytes: int, count: int = 1) -> None:
        """Count bodies."""
        self.count += count
        self.input_bytes += input_bytes
        self.output_bytes += output_bytes

    @property
    def saved_bytes(self) -> int:
        """Bytes that did not have to be sent."""
        return self.input_bytes - self.output_bytes

    @property
    def ratio(self) -> float:
        """Tensors' bytes by bodies' bytes; 1 for none."""
        return self.input_bytes / self.output_bytes if self.output_bytes else 1.0
