"""The choosers of a process: one for each link, few enough to keep (pure)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from meshnet.adaptive import Decisions, EncodingChooser
from meshnet.compression import CompressionPolicies, CompressionResult
from meshnet.estimates import CodecSpeeds
from meshnet.timing import parse_timings
from meshnet.wire import AnswerHeader

__all__ = ["LinkChoosers", "LinkReport", "record_answer"]

_MAX_LINKS: Final = 256
_LONG_BYTES: Final = 48 * 1024
_SHORT_EVERY: Final = 16


@dataclass(frozen=True, slots=True)
class LinkReport:
    """What one link's chooser did and knows, for people and metrics.

    Attributes:
        link: the name that the chooser was asked for by.
        bits_per_s: estimate of the bandwidth.
        reads: encodings that the receiver is known to read.
        decisions: by phase, encoding (None is raw) and outcome; see
            `EncodingChooser.decisions`.
    """

    link: str
    bits_per_s: float
    reads: tuple[str, ...]
    decisions: dict[tuple[str, str | None, str], Decisions]


class LinkChoosers:
    """Choosers by link, sharing what is known of this machine's codecs.

    Links are named by whoever sends the chunks, so only the 256 last used are kept.

    Args:
        policies: the floor and the manual mode.
        route_condition: the policies' name for the links.
    """

    def __init__(self, policies: CompressionPolicies, route_condition: str = "lan") -> None:
        self._policies = policies
        self._route_condition = route_condition
        self._speeds = CodecSpeeds()
        self._choosers: OrderedDict[str, EncodingChooser] = OrderedDict()

    def of(self, link: str) -> EncodingChooser:
        """Give the chooser of a link, as ``host:port`` of the node at its other end."""
        chooser = self._choosers.get(link)
        if chooser is not None:
            self._choosers.move_to_end(link)
            return chooser
        chooser = EncodingChooser(self._policies, self._route_condition, speeds=self._speeds)
        self._choosers[link] = chooser
        if len(self._choosers) > _MAX_LINKS:
            self._choosers.popitem(last=False)
        return chooser

    def report(self) -> list[LinkReport]:
        """Say what was decided and measured, link by link in order of their last use."""
        return [
            LinkReport(link, 8 / chooser.link.s_per_byte, chooser.reads, dict(chooser.decisions))
            for link, chooser in self._choosers.items()
        ]


def record_answer(
    chooser: EncodingChooser, result: CompressionResult, elapsed_s: float, header: AnswerHeader
) -> None:
    """Learn from an answered request over the activation plane.

    Of short bodies only 1 in 16 is looked at: they tell the latency alone.

    Args:
        chooser: that planned the request.
        result: the request's body.
        elapsed_s: from the first byte sent until the answer was read.
        header: the answer's. The first hop's Server-Timing says what of `elapsed_s` passed
            after it held the tensor (``dur``), and what decoding took before (``codec``).
    """
    if header.accept_encoding:
        chooser.reads = header.accept_encoding
    chooser.num_answers += 1
    if result.output_bytes < _LONG_BYTES and chooser.num_answers % _SHORT_EVERY != 1:
        return
    hops = parse_timings(header.server_timing)
    if hops:
        decode_s = hops[0].codec_ms / 1e3 if result.encoding is not None else None
        chooser.record_sent(result, elapsed_s - hops[0].total_ms / 1e3, decode_s)
