"""Nodes that failed of late get no sessions while others can serve them."""

from __future__ import annotations

from meshnet.topology import NodeId
from meshnet_gateway.recoveries import Way
from meshnet_gateway.suspects import SuspectNodes
from tests.gateway.mesh import stub_mesh


def test_a_suspicion_ends_by_itself_or_when_the_node_serves():
    now = 100.0
    suspects = SuspectNodes(lambda: now)
    suspects.add(NodeId("a"))
    now += 6
    suspects.add(NodeId("b"))
    assert suspects.now() == {"a", "b"}
    now += 6
    assert suspects.now() == {"b"}
    suspects.clear({NodeId("b"), NodeId("c")})
    assert suspects.now() == frozenset()


async def test_one_session_alone_meets_a_node_whose_lease_outlives_it(text):
    """Its heartbeats go on: the control plane routes to it, and only this gateway knows better."""
    async with stub_mesh(text) as mesh:
        for name in ("one", "two"):
            await mesh.join(name, 0, 4)
        await mesh.members["one"].node.close()
        for _ in range(6):
            assert await mesh.ask(max_tokens=3) == "hhh"
        ways = mesh.gateway._pipelines.shared.counts.ways
        assert dict(ways) == {Way.ANEW: 1}


async def test_a_suspect_is_used_where_there_is_no_other(text):
    async with stub_mesh(text) as mesh:
        await mesh.join("only", 0, 4)
        mesh.gateway._pipelines.shared.selector.suspects.add(NodeId("only"))
        assert await mesh.ask(max_tokens=3) == "hhh"
