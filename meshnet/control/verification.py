"""Judges what nodes report of their probes: the control plane decides, not the node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from meshnet.control.probe_messages import report_of
from meshnet.control.references import Known, References
from meshnet.probes import judge
from meshnet.topology import LayerRange
from meshnet.v1 import node_service_pb2 as pb
from meshnet.v1 import types_pb2

__all__ = ["MAX_AGE_S", "Verifier"]

MAX_AGE_S: Final = 600.0
"""How long a match holds without another probe."""

_ANSWER_S: Final = 30.0
"""How long a node that served may take to report a probe that it is asked for."""

_State = pb.Verification.State
_UNVERIFIED = pb.Verification.STATE_UNVERIFIED
_PENDING = pb.Verification.STATE_PENDING
_VERIFIED = pb.Verification.STATE_VERIFIED
_FAILED = pb.Verification.STATE_FAILED
_WORST_FIRST: Final = (_FAILED, _PENDING, _UNVERIFIED, _VERIFIED)


@dataclass(frozen=True, slots=True)
class _Judged:
    """When a shard was judged last, and by what."""

    incarnation: int
    revision: int
    at_s: float


class Verifier:
    """Judges the nodes of a mesh.

    A model with a reference is served by nodes alone whose probes match it, in its digest. A
    model without one is served unverified, or not at all.

    Args:
        references: of models.
        clock: monotonic seconds.
        require: whether models without a reference are not to be served.
    """

    def __init__(
        self, references: References, clock: Callable[[], float], *, require: bool = False
    ) -> None:
        self._references = references
        self._clock = clock
        self._require = require
        self._judged: dict[tuple[str, str], _Judged] = {}
        self._asked: dict[str, float] = {}
        self._missed: dict[tuple[str, str], float] = {}

    async def prepare(self) -> None:
        """Learn of new references, and forget nodes that are not heard of."""
        await self._references.refresh()
        oldest = self._clock() - 2 * MAX_AGE_S
        self._judged = {key: each for key, each in self._judged.items() if each.at_s > oldest}
        self._asked = {name: at for name, at in self._asked.items() if at > oldest}
        self._missed = {key: at for key, at in self._missed.items() if at > oldest}

    def is_asked(self, name: str) -> bool:
        """Tell whether the node of this resource name is to report its probes."""
        return name in self._asked

    def judge(self, node: pb.Node, request: pb.HeartbeatRequest) -> pb.Verification:
        """Say what is known of a node's numbers with this heartbeat of it.

        Args:
            node: as it was before, with what was found then.
            request: checked.
        """
        before = node.verification
        reports = {report.model: report for report in request.probes}
        if not (request.ready or reports):
            return before  # it loads
        found = [self._judge_shard(node, shard, reports.get(shard.model)) for shard in node.shards]
        if _PENDING not in (each.state for each in found) and not self._waits_for(node):
            self._asked.pop(node.name, None)
        worst = min(found, key=lambda each: _WORST_FIRST.index(each.state), default=None)
        return worst or pb.Verification(state=_UNVERIFIED)

    def _judge_shard(
        self, node: pb.Node, shard: types_pb2.Shard, report: pb.ProbeReport | None
    ) -> pb.Verification:
        known = self._references.of_model(shard.model)
        if not known:
            return self._without_reference(node, shard, report)
        self._missed.pop((node.name, shard.model), None)
        own = known.get(shard.model_digest)
        if own is None or own.reference.num_layers != shard.layer_count:
            digests = ", ".join(digest[:12] for digest in known)
            return _failed(
                "MODEL_DIGEST",
                f"holds {shard.model} in digest {shard.model_digest[:12]}; its references are of "
                f"{digests}: other configuration, tokenizer or weights",
            )
        if report is None:
            return self._unreported(node, shard, own)
        layers = LayerRange(shard.layers.start, shard.layers.end)
        verdict = judge(report_of(report), own.reference, layers, head=shard.lm_head)
        self._judged[node.name, shard.model] = _Judged(
            node.incarnation, own.revision, self._clock()
        )
        if verdict.reason:
            return _failed(verdict.reason, verdict.message)
        return pb.Verification(state=_VERIFIED)

    def _without_reference(
        self, node: pb.Node, shard: types_pb2.Shard, report: pb.ProbeReport | None
    ) -> pb.Verification:
        """Take the node's own word, which is all there is: against itself it is believed.

        What another replica found by a reference stays until this one has looked for that.
        """
        before, now = node.verification, self._clock()
        missed_at = self._missed.setdefault((node.name, shard.model), now)
        if before.reason == "PROBE_FAILED":
            if report is None:
                return before
        elif before.state in (_VERIFIED, _FAILED) and self._references.read_at <= missed_at:
            return before
        if report is not None and report.problem:
            return _failed("PROBE_FAILED", f"the node's own probe failed: {report.problem}")
        if not self._require:
            return pb.Verification(state=_UNVERIFIED)
        model = shard.model.removeprefix("models/")
        message = (
            f"{model} has no reference, and only models with one are served here: "
            "meshnet references register DIR, or start the control plane with --no-require-probe"
        )
        return pb.Verification(state=_PENDING, reason="NO_REFERENCE", message=message)

    def _unreported(self, node: pb.Node, shard: types_pb2.Shard, known: Known) -> pb.Verification:
        """Say what holds where nothing is reported: what was found before, for a while."""
        before, now = node.verification, self._clock()
        if self._is_judged(node, shard.model, known, now):
            return before
        asked_s = self._asked.setdefault(node.name, now)
        if before.state == _FAILED:
            return before
        if before.state in (_VERIFIED, _UNVERIFIED) and now - asked_s < _ANSWER_S:
            return before
        message = f"no probe of {shard.model} was reported"
        return pb.Verification(state=_PENDING, reason="NOT_REPORTED", message=message)

    def _waits_for(self, node: pb.Node) -> bool:
        now = self._clock()
        for shard in node.shards:
            known = self._references.of_model(shard.model).get(shard.model_digest)
            if known is not None and not self._is_judged(node, shard.model, known, now):
                return True
        return False

    def _is_judged(self, node: pb.Node, model: str, known: Known, now: float) -> bool:
        """Tell whether this start of a node was judged by this reference lately."""
        last = self._judged.get((node.name, model))
        return (
            last is not None
            and (last.incarnation, last.revision) == (node.incarnation, known.revision)
            and now - last.at_s < MAX_AGE_S
        )


def _failed(reason: str, message: str) -> pb.Verification:
    return pb.Verification(state=_FAILED, reason=reason, message=message)
