"""How both ends of a gRPC connection keep a quiet one alive, side by side so that they agree."""

from __future__ import annotations

from typing import Final

__all__ = ["CLIENT_OPTIONS", "SERVER_OPTIONS"]

Options = tuple[tuple[str, int], ...]

CLIENT_OPTIONS: Final[Options] = (
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
"""Ping every 20 s, calls or not."""

SERVER_OPTIONS: Final[Options] = (
    # gRPC's default forgives one ping in 300 s, then ends the connection (too_many_pings)
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)
"""Take pings every 5 s, so that foreign clients at gRPC's least interval of 10 s are welcome."""
