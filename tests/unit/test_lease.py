from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from meshnet.errors import Code, LeaseExpiredError, MeshError
from meshnet.lease import LeaseId, LeaseTable
from meshnet.topology import NodeId

NODE = NodeId("a")


def grant(table, now, *, lease_id="l1", node=NODE, address="h:1", incarnation=1, ttl_s=10.0):
    return table.grant(
        LeaseId(lease_id), node, address=address, incarnation=incarnation, ttl_s=ttl_s, now=now
    )


def test_a_lease_lives_exactly_its_time():
    table = LeaseTable()
    grant(table, 100.0)
    assert table.expire(109.999) == []
    assert table.get(NODE, 109.999) is not None
    assert table.get(NODE, 110.0) is None
    assert [lease.node for lease in table.expire(110.0)] == [NODE]
    assert len(table) == 0


def test_a_keep_alive_buys_a_whole_time_to_live():
    table = LeaseTable()
    grant(table, 100.0)
    assert table.keep_alive(LeaseId("l1"), NODE, 1, 109.0).deadline_s == 119.0
    assert table.expire(118.9) == []


def test_a_late_keep_alive_is_refused_even_before_anyone_collected_the_lease():
    table = LeaseTable()
    grant(table, 100.0)
    with pytest.raises(LeaseExpiredError, match="register") as caught:
        table.keep_alive(LeaseId("l1"), NODE, 1, 110.0)
    assert (caught.value.code, caught.value.reason) == (Code.NOT_FOUND, "LEASE_EXPIRED")


def test_the_same_process_again_keeps_its_lease():
    table = LeaseTable()
    grant(table, 100.0)
    again = grant(table, 105.0, lease_id="l2")
    assert (again.lease_id, again.deadline_s, len(table)) == ("l1", 115.0, 1)


def test_a_restart_at_the_same_address_takes_over_and_fences_the_older_process():
    table = LeaseTable()
    grant(table, 100.0)
    assert grant(table, 101.0, lease_id="l2", incarnation=2).lease_id == "l2"
    with pytest.raises(LeaseExpiredError):
        table.keep_alive(LeaseId("l1"), NODE, 1, 102.0)
    with pytest.raises(MeshError) as caught:
        grant(table, 102.0, lease_id="l3", incarnation=1)
    assert (caught.value.code, caught.value.reason) == (Code.ABORTED, "STALE_INCARNATION")
    with pytest.raises(MeshError) as caught:
        table.keep_alive(LeaseId("l2"), NODE, 1, 102.0)
    assert caught.value.reason == "STALE_INCARNATION"


@pytest.mark.parametrize("incarnation", [1, 2])
def test_a_clone_at_another_address_waits_for_the_lease_to_end(incarnation):
    table = LeaseTable()
    grant(table, 100.0)
    with pytest.raises(MeshError) as caught:
        grant(table, 109.0, lease_id="l2", address="h:2", incarnation=incarnation)
    assert (caught.value.code, caught.value.reason) == (Code.ALREADY_EXISTS, "NODE_ID_IN_USE")
    assert "h:1" in caught.value.message
    assert caught.value.retry_after_s == 1.0
    assert table.keep_alive(LeaseId("l1"), NODE, 1, 109.5).address == "h:1"
    assert grant(table, 119.5, lease_id="l2", address="h:2").address == "h:2"


def test_a_revoked_lease_is_over():
    table = LeaseTable()
    grant(table, 100.0)
    assert table.revoke(NODE) is not None
    assert table.revoke(NODE) is None
    with pytest.raises(LeaseExpiredError):
        table.keep_alive(LeaseId("l1"), NODE, 1, 101.0)


@dataclass
class Held:
    """What the model remembers of a lease: plain data, every rule spelt out in the machine."""

    lease_id: str
    address: str
    incarnation: int
    ttl_s: int
    end_s: int


class Histories(RuleBasedStateMachine):
    """Random histories against a model that keeps every lease and looks at the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.table = LeaseTable()
        self.now = 0
        self.held: dict[str, Held] = {}
        self.uncollected: set[str] = set()
        self.count = 0
        self.ids = ["never"]

    def live(self, node: str) -> Held | None:
        held = self.held.get(node)
        return held if held is not None and self.now < held.end_s else None

    @rule(seconds=st.integers(0, 7))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(
        node=st.sampled_from("ab"),
        address=st.sampled_from(["h:1", "h:2"]),
        incarnation=st.integers(1, 3),
        ttl_s=st.integers(1, 10),
    )
    def grant(self, node: str, address: str, incarnation: int, ttl_s: int) -> None:
        self.count += 1
        lease_id = f"l{self.count}"
        live = self.live(node)
        refused = live is not None and (live.address != address or live.incarnation > incarnation)
        try:
            lease = grant(
                self.table,
                self.now,
                lease_id=lease_id,
                node=NodeId(node),
                address=address,
                incarnation=incarnation,
                ttl_s=ttl_s,
            )
        except MeshError as error:
            code = error.code
        else:
            code = None
        if refused:
            is_clone = live is not None and live.address != address
            assert code is (Code.ALREADY_EXISTS if is_clone else Code.ABORTED)
            return
        assert code is None
        if live is not None and live.incarnation == incarnation:
            lease_id = live.lease_id
        assert lease.lease_id == lease_id
        self.ids.append(lease_id)
        self.held[node] = Held(lease_id, address, incarnation, ttl_s, self.now + ttl_s)
        self.uncollected.add(node)

    @rule(data=st.data(), node=st.sampled_from("ab"), incarnation=st.integers(1, 3))
    def keep_alive(self, data: st.DataObject, node: str, incarnation: int) -> None:
        lease_id = data.draw(st.sampled_from(self.ids[-4:]))
        live = self.live(node)
        known = live is not None and live.lease_id == lease_id
        try:
            self.table.keep_alive(LeaseId(lease_id), NodeId(node), incarnation, self.now)
        except MeshError as error:
            code = error.code
        else:
            code = None
        if live is None or not known:
            assert code is Code.NOT_FOUND
        elif live.incarnation != incarnation:
            assert code is Code.ABORTED
        else:
            assert code is None
            live.end_s = self.now + live.ttl_s

    @rule(node=st.sampled_from("ab"))
    def revoke(self, node: str) -> None:
        revoked = self.table.revoke(NodeId(node))
        assert (revoked is not None) == (node in self.uncollected)
        self.held.pop(node, None)
        self.uncollected.discard(node)

    @rule()
    @precondition(lambda self: self.uncollected)
    def expire(self) -> None:
        ended = {str(lease.node) for lease in self.table.expire(self.now)}
        assert ended == {node for node in self.uncollected if self.live(node) is None}
        self.uncollected -= ended

    @invariant()
    def the_table_agrees_on_who_lives(self) -> None:
        for node in "ab":
            lease = self.table.get(NodeId(node), self.now)
            live = self.live(node)
            assert (lease is None) == (live is None)
            if lease is not None and live is not None:
                assert (lease.lease_id, lease.deadline_s) == (live.lease_id, live.end_s)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


@given(beats=st.lists(st.floats(0.0, 9.99), max_size=30))
def test_a_node_that_beats_in_time_is_never_lost(beats):
    table, now = LeaseTable(), 0.0
    grant(table, now)
    for pause in beats:
        now += pause
        assert table.expire(now) == []
        table.keep_alive(LeaseId("l1"), NODE, 1, now)
