"""The choosers of a process: one for each link, few enough to keep (pure)."""

from __future__ import annotations

from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Final

from meshnet.adaptive import EncodingChooser
from meshnet.compression import CompressionPolicies, CompressionResult
from meshnet.estimates import CodecSpeeds
from meshnet.plans import Decisions
from meshnet.timing import parse_timings
from meshnet.wire import AnswerHeader

__all__ = ["DecisionCounts", "LinkChoosers", "LinkReport", "record_answer"]

_MAX_LINKS: Final = 256
_LONG_BYTES: Final = 48 * 1024
_SHORT_EVERY: Final = 16
_LONG_ANSWER_BYTES: Final = 16 * 1024

DecisionCounts = dict[tuple[str, str | None, str], Decisions]
"""By phase, encoding (None is raw) and outcome; see `EncodingChooser.decisions`."""


@dataclass(frozen=True, slots=True)
class LinkReport:
    """What one link's chooser did and knows, for people and metrics.

    Attributes:
        link: the name that the chooser was asked for by.
        bits_per_s: estimate of the bandwidth.
        num_samples: bodies that it rests on; 0 where it is taken for granted.
        reads: encodings that the receiver is known to read.
        decisions: at that time.
    """

    link: str
    bits_per_s: float
    num_samples: int
    reads: tuple[str, ...]
    decisions: DecisionCounts


class LinkChoosers:
    """Choosers by link, sharing what is known of this machine's codecs.

    Links are named by whoever sends the chunks, so only the 256 last used are kept.

    Args:
        policies: the floor and the manual mode.
        route_condition: the policies' name for the links.
        lock: for use by several threads; the choosers share it.
    """

    def __init__(
        self,
        policies: CompressionPolicies,
        route_condition: str = "lan",
        *,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._policies = policies
        self._route_condition = route_condition
        self._speeds = CodecSpeeds()
        self._choosers: OrderedDict[str, EncodingChooser] = OrderedDict()
        self._dropped: DecisionCounts = {}
        self._lock = nullcontext() if lock is None else lock

    def of(self, link: str) -> EncodingChooser:
        """Give the chooser of a link, as ``host:port`` of the node at its other end."""
        with self._lock:
            chooser = self._choosers.get(link)
            if chooser is not None:
                self._choosers.move_to_end(link)
                return chooser
            chooser = self._choosers[link] = EncodingChooser(
                self._policies, self._route_condition, speeds=self._speeds, lock=self._lock
            )
            if len(self._choosers) > _MAX_LINKS:
                _, dropped = self._choosers.popitem(last=False)
                _add(self._dropped, dropped.decisions)
            return chooser

    def report(self) -> list[LinkReport]:
        """Say what was decided and measured, link by link in order of their last use."""
        with self._lock:
            return [
                LinkReport(
                    link,
                    8 / chooser.link.s_per_byte,
                    chooser.link.num_samples,
                    chooser.reads,
                    {key: replace(counts) for key, counts in chooser.decisions.items()},
                )
                for link, chooser in self._choosers.items()
            ]

    def totals(self) -> DecisionCounts:
        """Sum up the decisions over all links, those not kept any more among them."""
        totals: DecisionCounts = {}
        with self._lock:
            _add(totals, self._dropped)
            for chooser in self._choosers.values():
                _add(totals, chooser.decisions)
        return totals


def _add(sums: DecisionCounts, counts: DecisionCounts) -> None:
    for key, item in counts.items():
        sums.setdefault(key, Decisions()).add(item.input_bytes, item.output_bytes, item.count)


def record_answer(
    chooser: EncodingChooser,
    result: CompressionResult,
    elapsed_s: float,
    header: AnswerHeader,
    answer_bytes: int = 0,
) -> None:
    """Learn from an answered request over the activation plane.

    Of short bodies only 1 in 16 is looked at: they tell the latency alone.

    Args:
        chooser: that planned the request.
        result: the request's body.
        elapsed_s: from the first byte sent until the answer was read.
        header: the answer's. The first hop's Server-Timing says what of `elapsed_s` passed
            after it held the tensor (``dur``), and what decoding took before (``codec``). That
            counts an answer from the hop after too, so it is believed only where none came.
        answer_bytes: length of the answer's body. The way back of a long one is taken to be as
            fast as the way out; beside it, a short request tells nothing.
    """
    count = chooser.count_answer(header.accept_encoding)
    if result.output_bytes < _LONG_BYTES and count % _SHORT_EVERY != 1:
        return
    hops = parse_timings(header.server_timing)
    if hops:
        seconds = elapsed_s - hops[0].total_ms / 1e3
        if answer_bytes > _LONG_ANSWER_BYTES:
            if result.output_bytes < _LONG_BYTES:
                return
            seconds *= result.output_bytes / (result.output_bytes + answer_bytes)
        decoded_once = len(hops) == 1 or header.shape is None
        decode_s = hops[0].codec_ms / 1e3 if decoded_once and result.encoding is not None else None
        chooser.record_sent(result, seconds, decode_s)
