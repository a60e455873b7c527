"""Prometheus metrics of a control plane, in a registry of its own."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from meshnet.control.registry import Snapshot
from meshnet.v1 import node_service_pb2 as pb

__all__ = ["CONTENT_TYPE", "ControlMetrics"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ControlMetrics:
    """What a control plane counts."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._calls = Counter(
            "meshnet_control_calls",
            "Calls answered, through either face.",
            ("method", "code"),
            registry=self._registry,
        )
        self._seconds = Histogram(
            "meshnet_control_call_seconds",
            "Time to answer a call; for streams, how long they lived.",
            ("method",),
            registry=self._registry,
        )
        self._nodes = Gauge(
            "meshnet_control_nodes", "Nodes registered.", ("state",), registry=self._registry
        )
        self._sessions = Gauge(
            "meshnet_control_node_sessions",
            "Sessions that nodes report to hold KV cache.",
            registry=self._registry,
        )

        self._store_age = Gauge(
            "meshnet_control_store_age_seconds",
            "Seconds since the store was last known to answer, 0 while it does.",
            registry=self._registry,
        )

    def observe(self, method: str, code: str, seconds: float) -> None:
        """Count a call that ended."""
        self._calls.labels(method, code).inc()
        self._seconds.labels(method).observe(seconds)

    def render(self, snapshot: Snapshot) -> bytes:
        """Write all metrics, with the gauges of `snapshot`."""
        for name, number in pb.NodeState.items():
            label = name.removeprefix("NODE_STATE_").lower()
            if label != "unspecified":
                count = sum(node.state == number for node in snapshot.nodes)
                self._nodes.labels(label).set(count)
        self._sessions.set(sum(node.load.active_sessions for node in snapshot.nodes))
        self._store_age.set(snapshot.health.age_s)
        return generate_latest(self._registry)
