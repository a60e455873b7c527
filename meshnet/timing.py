"""Where a chunk's time went, hop by hop, as Server-Timing metrics (pure).

Each node puts its own metric before those of the hops after it, so that the gateway
reads one entry per hop in the order of the route. Source: proto/WIRE.md, Answers.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from meshnet.topology import NodeId

__all__ = ["HopTiming", "format_timing", "parse_timings"]


class HopTiming(NamedTuple):
    """One hop's share of a chunk's time, in milliseconds, and of its bytes.

    Attributes:
        node: whose times these are.
        queue_ms: waiting for the session's turn and for the backend.
        compute_ms: in the backend.
        codec_ms: decoding the request, before `total_ms`, and the answer of the hop after,
            within it.
        next_ms: from sending to the hop after until its answer; 0 at the last hop.
        total_ms: from the request's tensor, received and decoded, to the answer's.
        in_bytes: body received, as it was on the wire.
        out_bytes: body sent to the hop after; of the last hop, the tensor that it answers.
    """

    node: NodeId
    queue_ms: float
    compute_ms: float
    codec_ms: float
    next_ms: float
    total_ms: float
    in_bytes: int
    out_bytes: int


_HOP = re.compile(
    r"hop;desc=(?P<node>[a-z][a-z0-9-]{0,62});dur=(?P<total>[0-9.]{1,16})"
    r";queue=(?P<queue>[0-9.]{1,16});compute=(?P<compute>[0-9.]{1,16})"
    r";codec=(?P<codec>[0-9.]{1,16});next=(?P<next>[0-9.]{1,16})"
    r";in=(?P<in>[0-9]{1,16});out=(?P<out>[0-9]{1,16})"
)
_HOP_FORMAT = "hop;desc=%s;dur=%.3f;queue=%.3f;compute=%.3f;codec=%.3f;next=%.3f;in=%d;out=%d"


def format_timing(timing: HopTiming, after: str = "") -> str:
    """Write one hop's metric, followed by the Server-Timing value of the hop after it."""
    node, queue, compute, codec, after_ms, total, in_bytes, out_bytes = timing
    if min(queue, compute, codec, after_ms, total) < 0:
        # A difference of clock readings may come out just below 0.
        queue, compute, codec = max(0.0, queue), max(0.0, compute), max(0.0, codec)
        after_ms, total = max(0.0, after_ms), max(0.0, total)
    own = _HOP_FORMAT % (node, total, queue, compute, codec, after_ms, in_bytes, out_bytes)
    return f"{own}, {after}" if after else own


def parse_timings(value: str) -> list[HopTiming]:
    """Read the hops of a Server-Timing value in route order; other metrics are passed over."""
    timings = []
    for item in value.split(","):
        match = _HOP.fullmatch(item.strip(" \t"))
        if match is None:
            continue
        try:
            timing = HopTiming(
                node=NodeId(match["node"]),
                queue_ms=float(match["queue"]),
                compute_ms=float(match["compute"]),
                codec_ms=float(match["codec"]),
                next_ms=float(match["next"]),
                total_ms=float(match["total"]),
                in_bytes=int(match["in"]),
                out_bytes=int(match["out"]),
            )
        except ValueError:
            continue
        timings.append(timing)
    return timings
