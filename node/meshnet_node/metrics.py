"""A node's figures as Prometheus text."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from meshnet.choosers import LinkChoosers
from meshnet.plane.metrics import encoding_metrics
from meshnet_node.stage import Stage

__all__ = ["render_metrics"]


class _StageCollector(Collector):
    """Reads a stage's counters when asked, so that the hot path only adds integers."""

    def __init__(self, stage: Stage, choosers: LinkChoosers) -> None:
        self._stage = stage
        self._choosers = choosers

    def collect(self) -> Iterator[Metric]:
        """Give every figure."""
        stage = self._stage
        sessions = stage.sessions
        yield CounterMetricFamily("meshnet_chunks", "Chunks computed.", stage.num_chunks)
        yield CounterMetricFamily("meshnet_tokens", "Token positions computed.", stage.num_tokens)
        yield CounterMetricFamily(
            "meshnet_compute_seconds", "Time spent in the backend.", stage.compute_s
        )
        yield GaugeMetricFamily(
            "meshnet_queue_depth", "Chunks waiting or computing.", stage.queue_depth
        )
        yield GaugeMetricFamily("meshnet_sessions", "Sessions that hold a cache.", len(sessions))
        yield GaugeMetricFamily(
            "meshnet_cache_tokens_reserved", "Cache tokens taken.", sessions.reserved_tokens
        )
        yield GaugeMetricFamily(
            "meshnet_cache_tokens_capacity", "Cache tokens in all.", sessions.capacity_tokens
        )
        moved = stage.moves.counts
        yield CounterMetricFamily(
            "meshnet_caches_sent", "Sessions whose KV cache went to other nodes.", moved.sent
        )
        yield CounterMetricFamily(
            "meshnet_caches_sent_bytes", "Bytes of these caches.", moved.sent_bytes
        )
        yield CounterMetricFamily(
            "meshnet_caches_taken", "Sessions whose KV cache came from another node.", moved.taken
        )
        yield CounterMetricFamily(
            "meshnet_caches_taken_bytes", "Bytes of these caches.", moved.taken_bytes
        )
        yield CounterMetricFamily(
            "meshnet_rebuilt_tokens",
            "Token positions fed to a node that replaces the next one.",
            stage.num_rebuilt_tokens,
        )
        journals = sessions.journals
        yield GaugeMetricFamily(
            "meshnet_journal_bytes", "Memory of what was sent on.", journals.memory_bytes
        )
        yield GaugeMetricFamily(
            "meshnet_journal_spilled_bytes", "The same on disk.", journals.spilled_bytes
        )
        yield CounterMetricFamily(
            "meshnet_journals_dropped", "Journals that found no room.", journals.num_dropped
        )
        yield from encoding_metrics(self._choosers)


def render_metrics(stage: Stage, choosers: LinkChoosers) -> bytes:
    """Write figures of the stage and of what it sends on in the text format, version 0.0.4."""
    registry = CollectorRegistry()
    registry.register(_StageCollector(stage, choosers))
    return generate_latest(registry)
