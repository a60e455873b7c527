"""A gateway's figures as Prometheus text."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from meshnet.choosers import LinkChoosers
from meshnet.plane.metrics import encoding_metrics
from meshnet_gateway.moving import MoveCounts
from meshnet_gateway.recoveries import RecoveryCounts, Way

__all__ = ["render_metrics"]


class _GatewayCollector(Collector):
    """Reads the counts when asked."""

    def __init__(self, counts: RecoveryCounts, moves: MoveCounts, choosers: LinkChoosers) -> None:
        self._counts = counts
        self._moves = moves
        self._choosers = choosers

    def collect(self) -> Iterator[Metric]:
        """Give every figure."""
        counts = self._counts
        yield CounterMetricFamily("meshnet_sessions_opened", "Sessions begun.", counts.opened)
        yield CounterMetricFamily(
            "meshnet_sessions_recovered",
            "Times that a session went on after a failure.",
            counts.recovered,
        )
        yield CounterMetricFamily(
            "meshnet_sessions_abandoned",
            "Sessions that ended with an error since no route was left.",
            counts.abandoned,
        )
        ways = CounterMetricFamily(
            "meshnet_recoveries", "Times that a session went on after a failure.", labels=("way",)
        )
        tokens = CounterMetricFamily(
            "meshnet_recomputed_tokens",
            "Tokens computed again: by the lost layers (journal), or by all (replay).",
            labels=("way",),
        )
        for way in Way:
            ways.add_metric((way,), counts.ways[way])
            tokens.add_metric((way,), counts.recomputed_tokens[way])
        yield from (ways, tokens)
        yield CounterMetricFamily(
            "meshnet_recovery_pause_seconds",
            "Time from noticing a failure to the next token.",
            counts.pause_s,
        )
        moves = self._moves
        yield CounterMetricFamily(
            "meshnet_sessions_moved",
            "Times that a session left a node that drains, with its KV cache.",
            moves.moved,
        )
        yield CounterMetricFamily(
            "meshnet_sessions_unmoved", "Times that this failed.", moves.failed
        )
        yield CounterMetricFamily(
            "meshnet_move_seconds", "Time that moving took, between two steps.", moves.pause_s
        )
        yield from encoding_metrics(self._choosers)


def render_metrics(counts: RecoveryCounts, moves: MoveCounts, choosers: LinkChoosers) -> bytes:
    """Write figures of recovery and of what is sent in the text format, version 0.0.4."""
    registry = CollectorRegistry()
    registry.register(_GatewayCollector(counts, moves, choosers))
    return generate_latest(registry)
