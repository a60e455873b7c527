"""What a client of the plane encoded, as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from meshnet.choosers import LinkChoosers

__all__ = ["encoding_metrics"]

_LABELS = ("phase", "encoding", "decision")


def encoding_metrics(choosers: LinkChoosers) -> Iterator[Metric]:
    """Give the bodies sent by phase, encoding (``raw`` for none) and decision; from any thread."""
    count = CounterMetricFamily("meshnet_bodies", "Bodies sent to nodes.", labels=_LABELS)
    tensors = CounterMetricFamily(
        "meshnet_bodies_tensor_bytes", "Bytes of their tensors.", labels=_LABELS
    )
    saved = CounterMetricFamily(
        "meshnet_bodies_saved_bytes", "Bytes that encoding them saved.", labels=_LABELS
    )
    ratio = GaugeMetricFamily(
        "meshnet_bodies_ratio", "Bytes of their tensors by those sent.", labels=_LABELS
    )
    for (phase, encoding, decision), item in sorted(
        choosers.totals().items(), key=lambda entry: tuple(map(str, entry[0]))
    ):
        labels = (phase, encoding or "raw", decision)
        count.add_metric(labels, item.count)
        tensors.add_metric(labels, item.input_bytes)
        saved.add_metric(labels, item.saved_bytes)
        ratio.add_metric(labels, item.ratio)
    speed = GaugeMetricFamily(
        "meshnet_link_bits_per_second", "Bandwidth of a link, by bodies sent.", labels=("link",)
    )
    for report in choosers.report():
        if report.num_samples:
            speed.add_metric((report.link,), report.bits_per_s)
    yield from (count, tensors, saved, ratio, speed)
