"""A gateway's figures as text."""

from __future__ import annotations

from meshnet.choosers import LinkChoosers
from meshnet.compression import CompressionPolicies
from meshnet_gateway.metrics import render_metrics
from meshnet_gateway.moving import MoveCounts
from meshnet_gateway.recoveries import RecoveryCounts, Way


def test_recoveries_and_encodings_are_counted() -> None:
    choosers = LinkChoosers(CompressionPolicies())
    chooser = choosers.of("a:1")
    plan = chooser.choose(b"1234", "decode")
    chooser.record(plan, plan.apply(b"1234", lambda: 0.0))
    counts = RecoveryCounts(opened=2)
    counts.ways[Way.JOURNAL] += 1
    counts.recomputed_tokens[Way.JOURNAL] += 40
    lines = render_metrics(counts, MoveCounts(moved=3), choosers).decode()
    lines = lines.splitlines()
    assert "meshnet_sessions_opened_total 2.0" in lines
    assert "meshnet_sessions_moved_total 3.0" in lines
    assert "meshnet_sessions_recovered_total 1.0" in lines
    assert 'meshnet_recoveries_total{way="journal"} 1.0' in lines
    assert 'meshnet_recoveries_total{way="replay"} 0.0' in lines
    assert 'meshnet_recomputed_tokens_total{way="journal"} 40.0' in lines
    labels = '{decision="below_min_input",encoding="raw",phase="decode"}'
    assert f"meshnet_bodies_total{labels} 1.0" in lines
    assert f"meshnet_bodies_tensor_bytes_total{labels} 4.0" in lines
    assert f"meshnet_bodies_ratio{labels} 1.0" in lines
    assert not any(line.startswith("meshnet_link_bits_per_second{") for line in lines)
