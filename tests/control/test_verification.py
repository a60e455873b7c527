"""What the control plane finds of nodes' numbers, and for how long it holds; on a set clock."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from meshnet.control.app import ControlServer, ControlSettings
from meshnet.control.client import ControlClient
from meshnet.control.documents import MemoryDocuments
from meshnet.control.references import References
from meshnet.control.verification import MAX_AGE_S, Verifier
from meshnet.errors import MeshError
from meshnet.identity import Role
from meshnet.v1 import node_service_pb2 as pb
from tests.control.conftest import MODEL, FakeClock, make_node
from tests.control.numbers import (
    DIGEST,
    LAYERS,
    OTHER_DIGEST,
    flip,
    reference,
    report,
    shift,
)
from tests.control.secured import secured

ANSWER_S = 30.0
"""What a node that served has to report a probe that it is asked for."""


class Judge:
    """A verifier, and one node that it judges."""

    def __init__(self, documents=None, *, require=False):
        self.clock = FakeClock()
        self.references = References(documents or MemoryDocuments(), self.clock)
        self.verifier = Verifier(self.references, self.clock, require=require)
        self.node = make_node(digest=DIGEST)
        self.node.name = "nodes/a"

    async def beat(self, *reports, ready=True):
        """Give what is found with a heartbeat, as ``STATE`` or ``STATE: REASON``."""
        await self.verifier.prepare()
        request = pb.HeartbeatRequest(name="nodes/a", ready=ready, probes=reports)
        found = self.verifier.judge(self.node, request)
        self.node.verification.CopyFrom(found)
        state = pb.Verification.State.Name(found.state).removeprefix("STATE_")
        return f"{state}: {found.reason}" if found.reason else state

    async def know(self, *messages, replace=False):
        for message in messages:
            await self.references.put(message, replace=replace)

    @property
    def asks(self):
        return self.verifier.is_asked("nodes/a")


@pytest.fixture
async def judge():
    """With the reference of the node's model."""
    made = Judge()
    await made.know(reference())
    return made


@pytest.mark.parametrize(
    ("require", "expected"), [(False, "UNVERIFIED"), (True, "PENDING: NO_REFERENCE")]
)
async def test_a_model_without_a_reference_is_served_unless_one_is_required(require, expected):
    judge = Judge(require=require)
    assert await judge.beat() == expected
    assert await judge.beat(report()) == expected
    assert not judge.asks
    if require:
        said = judge.node.verification.message
        assert "meshnet references register DIR" in said
        assert "--no-require-probe" in said


async def test_a_node_that_waits_for_a_reference_gets_traffic_when_it_is_registered():
    judge = Judge(require=True)
    await judge.beat(report())
    await judge.know(reference())
    assert await judge.beat() == "PENDING: NOT_REPORTED"
    assert judge.asks
    assert await judge.beat(report()) == "VERIFIED"


async def test_a_node_that_loads_is_not_judged(judge):
    assert await judge.beat(ready=False) == "UNSPECIFIED"
    assert await judge.beat() == "PENDING: NOT_REPORTED"
    assert judge.asks
    assert await judge.beat(report()) == "VERIFIED"
    assert not judge.asks


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (report(change=flip), "FAILED: WEIGHTS"),
        (report(change=shift), "FAILED: NUMBERS"),
        (report(0, 4), "FAILED: INCOMPLETE"),
        (report(change=lambda parts: parts.clear(), problem="no memory"), "FAILED: PROBE_FAILED"),
        (report(problem="the node has a doubt of its own"), "VERIFIED"),
    ],
)
async def test_what_does_not_match_is_found_with_the_heartbeat_that_reports_it(
    judge, sent, expected
):
    assert await judge.beat(report()) == "VERIFIED"
    assert await judge.beat(sent) == expected
    assert await judge.beat() == expected
    judge.clock.advance(2 * MAX_AGE_S)
    assert (await judge.beat()).startswith(expected[:6])
    assert await judge.beat(report()) == "VERIFIED"


@pytest.mark.parametrize("other", [{"digest": OTHER_DIGEST}, {"digest": DIGEST, "count": 9}])
async def test_files_of_another_digest_or_length_are_named(judge, other):
    judge.node = make_node(**other)
    assert await judge.beat(report()) == "FAILED: MODEL_DIGEST"
    assert "its references are of" in judge.node.verification.message


async def test_a_match_holds_for_a_while_and_then_the_node_is_asked(judge):
    await judge.beat(report())
    judge.clock.advance(MAX_AGE_S - 1)
    assert (await judge.beat(), judge.asks) == ("VERIFIED", False)
    judge.clock.advance(2)
    assert (await judge.beat(), judge.asks) == ("VERIFIED", True)
    judge.clock.advance(ANSWER_S - 1)
    assert await judge.beat() == "VERIFIED"
    judge.clock.advance(2)
    assert await judge.beat() == "PENDING: NOT_REPORTED"
    assert (await judge.beat(report()), judge.asks) == ("VERIFIED", False)
    judge.clock.advance(MAX_AGE_S - 1)
    assert (await judge.beat(), judge.asks) == ("VERIFIED", False)


async def test_a_match_is_of_one_start_of_a_node(judge):
    await judge.beat(report())
    judge.node.incarnation += 1
    judge.node.ClearField("verification")
    assert await judge.beat() == "PENDING: NOT_REPORTED"


async def test_another_reference_has_nodes_report_again(judge):
    await judge.beat(report())
    await judge.know(reference(noise=0.02), replace=True)
    assert (await judge.beat(), judge.asks) == ("VERIFIED", True)
    judge.clock.advance(ANSWER_S + 1)
    assert await judge.beat() == "PENDING: NOT_REPORTED"


async def test_nodes_that_serve_unverified_have_time_to_show_that_they_match():
    judge = Judge()
    assert await judge.beat() == "UNVERIFIED"
    await judge.know(reference())
    assert (await judge.beat(), judge.asks) == ("UNVERIFIED", True)
    judge.clock.advance(ANSWER_S + 1)
    assert await judge.beat() == "PENDING: NOT_REPORTED"


async def test_another_replica_asks_and_believes_meanwhile_what_was_found(judge):
    await judge.beat(report())
    other = Judge(judge.references._documents)
    other.node = judge.node
    assert (await other.beat(), other.asks) == ("VERIFIED", True)
    assert (await other.beat(report()), other.asks) == ("VERIFIED", False)
    assert await other.beat(report(change=flip)) == "FAILED: WEIGHTS"
    assert await judge.beat() == "FAILED: WEIGHTS"


async def test_without_a_reference_a_node_is_believed_against_itself():
    judge = Judge()
    assert await judge.beat(report(problem="changed")) == "FAILED: PROBE_FAILED"
    assert "changed" in judge.node.verification.message
    judge.clock.advance(2 * MAX_AGE_S)
    assert await judge.beat() == "FAILED: PROBE_FAILED"
    assert await judge.beat(report()) == "UNVERIFIED"


async def test_a_reference_that_is_deleted_judges_no_more(judge):
    assert await judge.beat(report(change=flip)) == "FAILED: WEIGHTS"
    await judge.references.delete(DIGEST)
    assert await judge.beat() == "FAILED: WEIGHTS"  # until that was looked for again
    judge.clock.advance(2)
    assert await judge.beat() == "UNVERIFIED"


async def test_a_replica_that_does_not_know_the_reference_yet_lets_nothing_pass(judge):
    other = Judge(judge.references._documents)
    await other.beat()
    await judge.references.delete(DIGEST)
    other.clock.advance(2)
    other.node.ClearField("verification")
    assert await other.beat() == "UNVERIFIED"
    await judge.know(reference())
    await judge.beat(report(change=flip))
    other.node = judge.node
    assert await other.beat() == "FAILED: WEIGHTS"
    other.clock.advance(2)
    assert await other.beat() == "FAILED: WEIGHTS"


async def test_of_several_shards_the_worst_counts(judge):
    shard = judge.node.shards.add()
    shard.CopyFrom(judge.node.shards[0])
    shard.model, shard.model_digest = "models/acme/other", OTHER_DIGEST
    assert await judge.beat(report()) == "UNVERIFIED"
    await judge.know(reference(OTHER_DIGEST, name="acme/other"))
    assert (await judge.beat(report()), judge.asks) == ("UNVERIFIED", True)
    assert await judge.beat(report(), report(change=flip, name="acme/other")) == "FAILED: WEIGHTS"
    assert await judge.beat(report(), report(name="acme/other")) == "VERIFIED"


async def test_nodes_that_are_gone_are_forgotten(judge):
    await judge.beat(report())
    await judge.beat()
    judge.clock.advance(2 * MAX_AGE_S + 1)
    await judge.verifier.prepare()
    assert judge.verifier._judged == {}


async def test_where_callers_are_known_a_model_needs_a_reference(tmp_path):
    """Nodes that wait for it get traffic as soon as an operator registers it."""
    async with secured(tmp_path) as mesh, AsyncExitStack() as stack:

        async def client(role, name):
            return await stack.enter_async_context(mesh.client(mesh.credentials(role, name)))

        node, gateway = await client(Role.NODE, "a"), await client(Role.GATEWAY, "front")
        admin = await client(Role.ADMIN, "ann")
        joined = await node.register("a", make_node((0, LAYERS), digest=DIGEST), ttl_s=300)
        terms = {"lease_id": joined.lease.lease_id, "incarnation": 1, "ready": True}
        await node.heartbeat("a", **terms, probes=[report()])
        assert await _states(admin) == {"a": ("JOINING", "NO_REFERENCE")}
        with pytest.raises(MeshError, match="no eligible node"):
            await gateway.select_route(MODEL)
        with pytest.raises(MeshError, match="may not call"):
            await node.put_reference(reference())
        await admin.put_reference(reference())
        async with asyncio.timeout(60):
            while not (await node.heartbeat("a", **terms)).probes_wanted:
                await asyncio.sleep(0.05)
        await node.heartbeat("a", **terms, probes=[report()])
        assert [hop.node for hop in (await gateway.select_route(MODEL)).hops] == ["nodes/a"]


async def _states(client):
    return {
        node.name.removeprefix("nodes/"): (
            pb.NodeState.Name(node.state).removeprefix("NODE_STATE_"),
            node.verification.reason,
        )
        for node in await client.list_nodes()
    }


@pytest.mark.etcd
async def test_a_quarantine_is_seen_and_kept_at_every_replica(lone_etcd):
    """A node that fails at one replica gets no traffic from another, and can be freed there."""
    await lone_etcd.emptied()
    store = lone_etcd.url
    servers, clients = [], []
    try:
        for _ in range(2):
            settings = ControlSettings(
                http_port=0, grpc_port=0, close_grace_s=0.2, store=store, require_probe=True
            )
            servers.append(ControlServer(settings))
            addresses = await servers[-1].start()
            clients.append(ControlClient(f"grpc://{addresses.grpc}"))
        one, other = clients
        await one.put_reference(reference(), replace=True)
        joined = await one.register("a", make_node((0, LAYERS), digest=DIGEST), ttl_s=300)

        async def beat(client, *reports):
            return await client.heartbeat(
                "a",
                lease_id=joined.lease.lease_id,
                incarnation=1,
                ready=True,
                probes=reports,
            )

        for by, seen, sent, expected in (
            (one, other, report(), ("READY", "")),
            (one, other, report(change=shift), ("QUARANTINED", "NUMBERS")),
            (other, one, report(change=flip), ("QUARANTINED", "WEIGHTS")),
            (other, one, report(), ("READY", "")),
        ):
            async with asyncio.timeout(60):
                while (await _states(seen)).get("a") != expected:
                    await beat(by, sent)  # which may hear of the reference a second later
                    await asyncio.sleep(0.05)
            if expected[0] == "READY":
                route = await seen.select_route(MODEL)
                assert [hop.node for hop in route.hops] == ["nodes/a"]
                continue
            with pytest.raises(MeshError, match="no eligible node"):
                await seen.select_route(MODEL)
            await beat(seen)  # which was told of no probe
            assert (await _states(seen))["a"] == expected
        await one.delete_reference(DIGEST)
        await one.deregister("a")
    finally:
        for closing in [*clients, *servers]:
            await closing.close()
