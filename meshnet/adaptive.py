"""Which encoding of a body arrives soonest: chosen anew for each, from what was measured (pure).

A body raw takes ``n * s`` seconds, where `s` is the link's seconds a byte, and encoded
``n / ratio * s + encoding + decoding``: the plane does these one after the other. Which is less
depends on the link above all; a size threshold alone is wrong on most (zstd loses to raw from
0.85 Gbit/s up, and pays for 3 KiB at 100 Mbit/s). One chooser is kept for each hop and
direction; phases have their own ratios and counters.

`meshnet.compression` stays the floor: what its policy refuses is sent raw, and a policy that
names an encoding is followed without any of this.

Source: proto/WIRE.md, Bodies.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Final

from meshnet.codec import ENCODINGS
from meshnet.compression import (
    AUTO,
    CompressionPolicies,
    CompressionPolicy,
    CompressionResult,
)
from meshnet.dtypes import Body
from meshnet.estimates import CodecSpeeds, LinkSpeed, Ratio
from meshnet.plans import Decisions, Plan
from meshnet.sample import ends_in_repeats, predict_ratio
from meshnet.trials import COAST_SLOWER, Coast, Trials

__all__ = ["EncodingChooser"]

_SAMPLE_S: Final = 40e-6
"""What the sample takes that stands before every encoding."""
_REPEATS_RATIO: Final = 4.0
"""What zstd is taken to give on a tensor that ends in equal rows; nothing is learnt from it."""
_LINK_BITS_PER_S: Final = {"lan": 1e9, "relay": 5e7, "benchmark": 1e10}
"""Taken for a link of that name until a body was measured on it."""
_FIRST_RATIOS: Final = {"zstd": 1.27, "bf16p": 1.47}


@dataclass(slots=True)
class _Phase:
    """What is known of one phase's bodies."""

    ratios: dict[str, Ratio] = field(default_factory=dict)
    trials: Trials = field(default_factory=Trials)


class EncodingChooser:
    """Chooses the encodings of the bodies that go over one link in one direction.

    Its methods may be called from several threads where a lock is given.

    Args:
        policies: the floor and the manual mode.
        route_condition: the policies' name for the link.
        speeds: of this machine's encoders; one is shared by all choosers of a process.
        lock: held while what is known is read or changed; choosers that share `speeds` share
            it too. A body below the floor is planned without it.

    Attributes:
        reads: encodings that the receiver is known to read; ``zstd`` until it says.
        decisions: by phase, encoding (None is raw) and outcome, which is a plan's reason for
            a raw body and, where an encoding was tried, `CompressionResult.decision`.
        link: what is known of the link.
        num_answers: requests over the link that were answered.

    Whoever reads `decisions` or `link` beside other threads holds the lock.
    """

    def __init__(
        self,
        policies: CompressionPolicies,
        route_condition: str = "lan",
        *,
        speeds: CodecSpeeds | None = None,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self.reads: tuple[str, ...] = ("zstd",)
        self.decisions: dict[tuple[str, str | None, str], Decisions] = {}
        self.link = LinkSpeed(8 / _LINK_BITS_PER_S.get(route_condition.lower(), 1e9))
        self.num_answers = 0
        self._policies = policies
        self._route_condition = route_condition
        self._encoders = CodecSpeeds() if speeds is None else speeds
        self._decoders = CodecSpeeds("decode", like=self._encoders)
        self._phases: dict[str, _Phase] = {}
        self._floors: dict[str, CompressionPolicy] = {}
        self._raw_plans: dict[tuple[str, str], Plan] = {}
        self._coasting: dict[str, Coast] = {}
        self._lock = nullcontext() if lock is None else lock

    def choose(
        self,
        body: Body,
        phase: str,
        *,
        width: int | None = None,
        accepted: Collection[str] | None = None,
    ) -> Plan:
        """Plan how `body` goes.

        Takes 1 microsecond below the floor, else about 10, and 25 more for a sample; 2 while the
        link is so fast that no encoding can pay.

        Args:
            body: the tensor's bytes, C-contiguous.
            phase: ``prefill`` or ``decode``.
            width: last dimension of a bfloat16 tensor, None for other dtypes.
            accepted: encodings that the receiver reads; None takes `reads`.

        Raises:
            ValueError: the policies know no such phase.
        """
        policy = self._floors.get(phase)
        if policy is None:
            policy = self._floors[phase] = self._policies.for_condition(
                self._route_condition, phase
            )
        size = len(body)
        if not policy.enabled:
            return self._raw("disabled", phase, policy)
        if size < policy.min_input_bytes or size == 0:
            return self._raw("below_min_input", phase, policy)
        if policy.encoding == AUTO and self._coasts(phase, size):
            return self._raw("link_faster", phase, policy)
        usable = [
            name
            for name in (self.reads if accepted is None else accepted)
            if name in ENCODINGS and (name != "bf16p" or width is not None)
        ]
        if policy.encoding != AUTO:
            if policy.encoding not in usable:
                return self._raw("not_accepted", phase, policy)
            return Plan(policy.encoding, "manual", phase, policy, width)
        if not usable:
            return self._raw("not_accepted", phase, policy)
        with self._lock:
            return self._choose_fastest(body, size, phase, policy, width, usable)

    def _raw(self, reason: str, phase: str, policy: CompressionPolicy) -> Plan:
        """Give the plan of bodies that go raw for `reason`; made once, since most are such."""
        plan = self._raw_plans.get((reason, phase))
        if plan is None:
            plan = self._raw_plans[reason, phase] = Plan(None, reason, phase, policy, None)
        return plan

    def pass_raw(self, plan: Plan, body: Body) -> CompressionResult:
        """Do at once what applying and recording a raw plan come to: count the body."""
        size = len(body)
        key = (plan.phase, None, plan.reason)
        with self._lock:
            decisions = self.decisions.get(key)
            if decisions is None:
                decisions = self.decisions[key] = Decisions()
            decisions.count += 1
            decisions.input_bytes += size
            decisions.output_bytes += size
        return CompressionResult(body, None, size, size, 0.0, plan.reason)

    def record(self, plan: Plan, result: CompressionResult) -> None:
        """Learn from what a plan gave, and count it; once for each body, before it is sent."""
        key = (plan.phase, result.encoding, result.decision)
        with self._lock:
            decisions = self.decisions.get(key)
            if decisions is None:
                decisions = self.decisions[key] = Decisions()
            decisions.add(result.input_bytes, result.output_bytes)
            self._learn(plan, result)

    def _learn(self, plan: Plan, result: CompressionResult) -> None:
        """Learn what an encoding took and gave."""
        if plan.encoding is None or result.decision not in ("compressed", "below_savings"):
            return
        if result.elapsed_seconds > 0:
            self._encoders.record(plan.encoding, result.input_bytes, result.elapsed_seconds)
        if plan.sampled is not None and plan.learn:
            ratio = result.input_bytes / max(1, result.output_bytes)
            self._ratio(plan.phase, plan.encoding).record(ratio, plan.sampled)

    def record_sent(
        self, result: CompressionResult, seconds: float, decode_s: float | None = None
    ) -> None:
        """Learn the link's speed from a body that has arrived.

        Args:
            result: that was sent.
            seconds: from the first byte sent until the receiver held the tensor: with HTTP,
                the exchange less the time that the first hop's Server-Timing states.
            decode_s: of that, what the receiver took for decoding; None takes the estimate.
        """
        with self._lock:
            if result.encoding is not None:
                if decode_s is None:
                    decode_s = self._decoders.seconds(result.encoding, result.input_bytes)
                else:
                    self._decoders.record(result.encoding, result.input_bytes, decode_s)
            # An estimate of the decoding that is too long must not hide the link.
            self.link.record(result.output_bytes, max(seconds - (decode_s or 0.0), seconds / 4))

    def count_answer(self, reads: tuple[str, ...]) -> int:
        """Count an answered request, which may say what the receiver reads; gives the count."""
        with self._lock:
            if reads:
                self.reads = reads
            self.num_answers += 1
            return self.num_answers

    def forget_reads(self) -> None:
        """Send raw until an answer says what the receiver reads: it refused what was sent."""
        with self._lock:
            self.reads = ()

    def _choose_fastest(
        self,
        body: Body,
        size: int,
        phase: str,
        policy: CompressionPolicy,
        width: int | None,
        usable: list[str],
    ) -> Plan:
        state = self._phase(phase)
        ratios = {name: self._ratio(phase, name).actual for name in usable}
        learn = not ("zstd" in usable and ends_in_repeats(body, width))
        if not learn:
            ratios["zstd"] = _REPEATS_RATIO
        sampled: dict[str, float] = {}
        refused = False
        while True:
            costs = self._costs(size, ratios)
            encoding, is_probe = state.trials.pick(costs)
            if encoding is None or encoding in sampled or not (learn or encoding != "zstd"):
                break
            # The sample is taken only of what would be done, and can only take it back.
            sampled[encoding] = predict_ratio(encoding, body, width)
            ratio = self._ratio(phase, encoding).given(sampled[encoding])
            saved = size * (1 - 1 / ratio)
            if saved < max(policy.min_savings_bytes, policy.min_savings_ratio * size):
                self._ratio(phase, encoding).relax(sampled[encoding])
                del ratios[encoding]
                refused = True
            elif ratio == ratios[encoding]:
                break
            else:
                ratios[encoding] = ratio
        state.trials.spend(costs, encoding, is_probe=is_probe)
        if encoding is None and not is_probe:
            self._coast(phase, size, costs[None])
        if is_probe:
            reason = "probe"
        elif encoding is not None:
            reason = "fastest"
        else:
            reason = "sample" if refused else "link_faster"
        return Plan(encoding, reason, phase, policy, width, sampled.get(encoding or ""), learn)

    def _coast(self, phase: str, size: int, raw_s: float) -> None:
        """Let bodies of that size go raw for a while, if no ratio could make coding pay."""
        coding_s = min(
            self._encoders.seconds(name, size) + self._decoders.seconds(name, size)
            for name in ENCODINGS
        )
        if coding_s > COAST_SLOWER * raw_s:
            self._coasting[phase] = Coast(size, COAST_SLOWER * self.link.s_per_byte)

    def _coasts(self, phase: str, size: int) -> bool:
        with self._lock:
            coast = self._coasting.get(phase)
            return coast is not None and coast.takes(size, self.link.s_per_byte)

    def _costs(self, size: int, ratios: dict[str, float]) -> dict[str | None, float]:
        """Give the seconds that each choice takes until the receiver holds the tensor."""
        s_per_byte = self.link.s_per_byte
        costs: dict[str | None, float] = {None: size * s_per_byte}
        for name, ratio in ratios.items():
            costs[name] = (
                size / ratio * s_per_byte
                + _SAMPLE_S
                + self._encoders.seconds(name, size)
                + self._decoders.seconds(name, size)
            )
        return costs

    def _ratio(self, phase: str, encoding: str) -> Ratio:
        ratios = self._phase(phase).ratios
        ratio = ratios.get(encoding)
        if ratio is None:
            ratio = ratios[encoding] = Ratio(_FIRST_RATIOS.get(encoding, 1.2))
        return ratio

    def _phase(self, phase: str) -> _Phase:
        state = self._phases.get(phase)
        if state is None:
            state = self._phases[phase] = _Phase()
        return state
