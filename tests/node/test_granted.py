"""A node that wants grants: what it takes, what it refuses, and where it never connects to."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from meshnet.cache_wire import CacheHeader, MoveHeader, pack_cache, pack_move
from meshnet.errors import Code, MeshError
from meshnet.grammar import Want
from meshnet.grants import LEEWAY_S, Grant, GrantKey, sign
from meshnet.operations import (
    OwnerId,
    Rebuild,
    RebuildMode,
    Release,
    Reservation,
    pack_rebuild,
    pack_release,
    pack_reservation,
)
from meshnet.topology import Hop, LayerRange, NodeId, Route, SessionId
from meshnet.wire import ChunkHeader, pack_chunk
from meshnet_gateway.pipeline import PipelineSettings, RoutePipeline
from meshnet_node.granted import GrantGate
from tests.node.test_pipeline_of_stubs import stub_activation
from tests.plane.doubles import calling, new_session

START = 7
HIDDEN = Want("hidden")
PRIVATE = Ed25519PrivateKey.generate()
KEY = GrantKey(PRIVATE.public_key(), 2**40)
TTL_S = 60
OWNER = OwnerId(new_session())


@dataclass
class Authority:
    """What the control plane signs, by a clock that stands still."""

    now: float = 1_800_000_000.0
    gates: list[GrantGate] = field(default_factory=list)
    num_issued: int = 0

    def rule(self, *nodes) -> None:
        """Have nodes want grants."""
        for node in nodes:
            gate = node.grants if hasattr(node, "grants") else node
            gate.incarnation = START
            gate._clock = lambda: self.now
            gate.learn(required=True, keys={KEY.key_id: KEY}, now=self.now)
            self.gates.append(gate)

    def grant(
        self, session: SessionId, *route: Hop, key: Ed25519PrivateKey = PRIVATE, **changes
    ) -> str:
        self.num_issued += 1
        made = Grant(
            f"grant-{self.num_issued:04}",
            session,
            route,
            (START,) * len(route),
            int(self.now) + TTL_S,
        )
        return sign(replace(made, **changes), key, KEY.key_id)


@pytest.fixture
def authority() -> Authority:
    return Authority()


@contextmanager
def never_reached() -> Iterator[str]:
    """Give the address of a listener to which nobody may connect."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.fixture
async def pair(start_node, authority):
    first, first_node, _ = await start_node("first", 0, 1, num_layers=2)
    second, second_node, _ = await start_node("second", 1, 2)
    authority.rule(first_node, second_node)
    return (first, second), (first_node, second_node)


def pipeline(client, route: Route, session: SessionId, grant: str | None, **options):
    return RoutePipeline(
        client, route, PipelineSettings(chunk_tokens=4), session=session, grant=grant, **options
    )


def place(hop: Hop) -> tuple[str, int]:
    host, _, port = hop.address.rpartition(":")
    return host, int(port)


def held(*nodes) -> list[tuple[int, int]]:
    return [(len(n.stage.sessions), n.stage.sessions.reserved_tokens) for n in nodes]


def chunk(session: SessionId, hop: Hop, *route: Hop, **fields) -> tuple[str, list, bytes]:
    tensor = stub_activation(fields.pop("tokens", 1))
    header = ChunkHeader(
        tensor.shape, "bfloat16", session, layers=hop.layers, route=route, want=HIDDEN, **fields
    )
    return "POST /forward", pack_chunk(header), tensor.tobytes()


def requests(session: SessionId, hop: Hop, target: Hop, token: str | None) -> dict[str, tuple]:
    """Give everything that has a node connect to where it is told."""
    path = f"/sessions/{session}"
    return {
        "forward": chunk(session, hop, target, position=0, grant=token),
        "append": chunk(session, hop, target, grant=token),
        "reserve": (
            f"PUT {path}",
            pack_reservation(Reservation(session, 9, hop.layers, (target,), grant=token)),
            b"",
        ),
        "rebuild": (
            f"POST {path}/rebuild",
            pack_rebuild(Rebuild(session, 1, (target,), grant=token)),
            b"",
        ),
        "move": (
            f"POST {path}/move",
            pack_move(MoveHeader(session, (replace_layers(target, hop),), grant=token)),
            b"",
        ),
    }


def replace_layers(target: Hop, hop: Hop) -> Hop:
    return Hop(target.node, target.address, hop.layers)


def written(request: tuple[str, list, bytes]) -> bytes:
    line, fields, body = request
    lines = [f"{line} HTTP/1.1", "Host: n", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in fields]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


FORGERIES = ["missing", "forged", "expired", "session", "node", "start", "layers", "address"]


def forged(authority: Authority, kind: str, session: SessionId, hop: Hop, target: Hop):
    """Give a grant with one fault; the rest of it is as it should be."""
    elsewhere = Hop(target.node, "127.0.0.1:1", target.layers)
    other = Hop(NodeId("other"), hop.address, hop.layers)
    wide = Hop(hop.node, hop.address, LayerRange(hop.layers.start, hop.layers.end + 1))
    match kind:
        case "missing":
            return None
        case "forged":
            return authority.grant(session, hop, target, key=Ed25519PrivateKey.generate())
        case "expired":
            return authority.grant(
                session, hop, target, expires_s=int(authority.now - LEEWAY_S) - 1
            )
        case "session":
            return authority.grant(new_session(), hop, target)
        case "node":
            return authority.grant(session, other, target)
        case "start":
            return authority.grant(session, hop, target, incarnations=(START + 1, START))
        case "layers":
            return authority.grant(session, wide, target)
        case _:
            return authority.grant(session, hop, elsewhere)


@pytest.mark.parametrize("kind", FORGERIES)
async def test_a_node_connects_nowhere_that_a_caller_merely_names(
    start_node, authority, kind
) -> None:
    hop, node, backend = await start_node("first", 0, 1, num_layers=2)
    authority.rule(node)
    honest = new_session()
    async with calling(place(hop)) as caller:
        await caller.send(
            written(chunk(honest, hop, position=0, grant=authority.grant(honest, hop)))
        )
        assert (await caller.read()).status == 200
        before = held(node)
        with never_reached() as address:
            target = Hop(NodeId("target"), address, LayerRange(1, 2))
            for line in requests(honest, hop, target, None):
                for session in (honest, new_session()):
                    token = forged(authority, kind, session, hop, target)
                    await caller.send(written(requests(session, hop, target, token)[line]))
                    answer = await caller.read()
                    problem = json.loads(answer.body)
                    if line == "rebuild" and session != honest:
                        assert answer.status == 404  # there is no journal to send
                        continue
                    if line == "move" and kind in ("node", "start", "layers"):
                        # The node that is left need not be in the grant: the new ones must.
                        assert answer.status in (403, 404)
                        continue
                    assert answer.status == 403, (line, problem)
                    assert problem["code"] == "PERMISSION_DENIED"
                    assert problem["field"] == "X-Meshnet-Grant"
                    assert "expected" in problem["detail"]
                    assert token is None or token not in problem["detail"]
                    assert held(node) == before
            await caller.send(written(("DELETE /sessions/" + new_session(), [], b"")))
            assert (await caller.read()).status == 204
        await caller.send(written(chunk(honest, hop, position=1)))
        assert (await caller.read()).status == 200
    assert [call[:2] for call in backend.calls] == [(0, 1), (1, 1)]


async def test_a_session_runs_along_its_route_and_is_checked_once(pair, client, authority):
    route, nodes = pair
    session = new_session()
    checked = []
    for node in nodes:
        check = node.stage._grants.check

        def counted(*arguments, check=check):
            checked.append(arguments)
            return check(*arguments)

        node.stage._grants.check = counted
    line = pipeline(client, route, session, authority.grant(session, *route), max_tokens=40)
    sent = stub_activation(10)
    answers = await line.forward(sent, HIDDEN)
    assert b"".join(answer.tensor.tobytes() for answer in answers) == sent.tobytes()
    assert held(*nodes) == [(1, 40), (1, 40)]
    num_checked = len(checked)
    authority.now += 10 * TTL_S  # what is open goes on
    for _ in range(5):
        await line.forward(stub_activation(1), HIDDEN)
    assert len(checked) == num_checked
    await line.close()
    assert held(*nodes) == [(0, 0), (0, 0)]


async def test_without_reservations_the_chunks_of_the_prompt_bring_the_grant(
    pair, client, authority
):
    route, nodes = pair
    session = new_session()
    line = pipeline(client, route, session, authority.grant(session, *route))
    await line.forward(stub_activation(30), HIDDEN)
    await line.forward(stub_activation(1), HIDDEN)
    assert held(*nodes) == [(1, 31), (1, 31)]
    await line.close()


async def refusal(work) -> str:
    with pytest.raises(MeshError) as caught:
        await work
    assert caught.value.code is Code.PERMISSION_DENIED
    return caught.value.reason


async def test_a_hop_further_on_checks_too_and_nothing_is_left_before_it(pair, client, authority):
    route, nodes = pair
    session = new_session()
    nodes[1].grants.incarnation = START + 1  # it has started again since
    token = authority.grant(session, *route)
    line = pipeline(client, route, session, token, max_tokens=9)
    assert await refusal(line.forward(stub_activation(3), HIDDEN)) == "GRANT_MISMATCH"
    assert held(*nodes) == [(0, 0), (0, 0)]
    nodes[1].grants.incarnation = START
    await pipeline(client, route, session, token, max_tokens=9).forward(stub_activation(3), HIDDEN)
    await line.close()


@pytest.mark.parametrize("ends_by", ["DELETE", "idle", "its owner", "the grace of a drain"])
async def test_a_grant_opens_its_session_once(pair, client, authority, ends_by):
    route, nodes = pair
    session = new_session()
    token = authority.grant(session, *route)
    opened = pipeline(client, route, session, token, max_tokens=9, owner=OWNER)
    await opened.forward(stub_activation(3), HIDDEN)
    for node in nodes:
        sessions = node.stage.sessions
        match ends_by:
            case "idle":
                sessions._clock = lambda: time.monotonic() + 1e6
                node.stage.release_idle()
                sessions._clock = time.monotonic
            case "its owner":
                node._owners._end_sessions((OWNER, ""))
            case "the grace of a drain":
                sessions.release_all()
    if ends_by == "DELETE":
        await client.release(route[0].address, session)
    assert held(*nodes) == [(0, 0), (0, 0)]
    for max_tokens in (None, 9):
        replayed = pipeline(client, route, session, token, max_tokens=max_tokens)
        assert await refusal(replayed.forward(stub_activation(3), HIDDEN)) == "GRANT_SPENT"
    assert held(*nodes) == [(0, 0), (0, 0)]
    again = pipeline(client, route, session, authority.grant(session, *route))
    await again.forward(stub_activation(3), HIDDEN)
    await again.close()


async def test_a_reservation_that_failed_may_be_repeated(start_node, client, authority):
    first, first_node, _ = await start_node("first", 0, 1, num_layers=2)
    second, second_node, _ = await start_node("second", 1, 2, cache_tokens=10)
    authority.rule(first_node, second_node)
    session = new_session()
    token = authority.grant(session, first, second)
    line = pipeline(client, (first, second), session, token, max_tokens=11)
    with pytest.raises(MeshError) as caught:
        await line.forward(stub_activation(3), HIDDEN)
    assert caught.value.code.http_status == 429
    line = pipeline(client, (first, second), session, token, max_tokens=10)
    await line.forward(stub_activation(3), HIDDEN)
    await line.close()


async def test_an_open_session_takes_another_route_with_a_grant_alone(
    pair, start_node, client, authority
):
    (first, second), _ = pair
    spare, spare_node, _ = await start_node("spare", 1, 2)
    authority.rule(spare_node)
    session = new_session()
    line = pipeline(client, (first, second), session, authority.grant(session, first, second))
    await line.forward(stub_activation(9), HIDDEN)
    line.reroute((first, spare))
    assert await refusal(line.rebuild(first, (spare,), RebuildMode.FAST)) == "GRANT_MISMATCH"
    assert held(spare_node) == [(0, 0)]
    line.show(authority.grant(session, first, spare))
    await line.rebuild(first, (spare,), RebuildMode.FAST)
    authority.now += 10 * TTL_S
    await line.forward(stub_activation(1), HIDDEN)
    assert held(spare_node) == [(1, 10)]
    # The grant that has expired leads nowhere else; nor does the first one.
    line.reroute((first, second))
    assert await refusal(line.forward(stub_activation(1), HIDDEN)) == "GRANT_MISMATCH"
    await line.close()


async def test_a_new_grant_that_has_expired_changes_nothing_for_hops_that_stay(
    pair, client, authority
):
    route, _ = pair
    session = new_session()
    line = pipeline(client, route, session, authority.grant(session, *route))
    await line.forward(stub_activation(3), HIDDEN)
    late = authority.grant(session, *route)
    authority.now += 2 * TTL_S
    line.show(late)
    await line.forward(stub_activation(1), HIDDEN)
    elsewhere = (route[0], Hop(NodeId("x"), "127.0.0.1:1", route[1].layers))
    late = authority.grant(session, *elsewhere)
    authority.now += 2 * TTL_S
    line.show(late)
    line.reroute(elsewhere)
    assert await refusal(line.forward(stub_activation(1), HIDDEN)) == "GRANT_EXPIRED"
    await line.close()


async def test_all_grants_of_a_session_are_spent_with_it(pair, client, authority):
    route, _ = pair
    session = new_session()
    tokens = [authority.grant(session, *route) for _ in range(3)]
    line = pipeline(client, route, session, tokens[0])
    for token in tokens:
        line.show(token)
        await line.forward(stub_activation(3), HIDDEN)
    await line.close()
    for token in tokens:
        for hop in route:  # the last one's route was the same all the time
            single = pipeline(client, (hop,), session, token)
            assert await refusal(single.forward(stub_activation(3), HIDDEN)) == "GRANT_SPENT"


async def test_a_cache_goes_to_a_granted_hop_alone(start_node, client, authority):
    old, old_node, _ = await start_node("old", 0, 1)
    new, new_node, _ = await start_node("new", 0, 1)
    authority.rule(old_node, new_node)
    session = new_session()
    line = pipeline(client, (old,), session, authority.grant(session, old))
    await line.forward(stub_activation(5), HIDDEN)

    async def move(token: str | None) -> None:
        asked = MoveHeader(session, (new,), grant=token)
        await client.move(old.address, old.node, asked, timeout_s=20.0)

    assert await refusal(move(None)) == "GRANT_MISSING"
    assert await refusal(move(authority.grant(session, old))) == "GRANT_MISMATCH"
    assert held(old_node, new_node) == [(1, 5), (0, 0)]
    token = authority.grant(session, new)
    await move(token)
    assert held(old_node, new_node) == [(0, 0), (1, 5)]
    line.reroute((new,))
    await line.forward(stub_activation(1), HIDDEN)
    await line.close()
    assert held(old_node, new_node) == [(0, 0), (0, 0)]


async def test_a_cache_that_nobody_granted_is_refused_before_it_is_received(start_node, authority):
    hop, node, backend = await start_node("only", 0, 1)
    authority.rule(node)
    session = new_session()
    kv = backend.kv.cut(0, 1)
    header = CacheHeader(session, hop.layers, 1, kv, grant=authority.grant(new_session(), hop))
    async with calling(place(hop)) as caller:
        await caller.send(written((f"PUT /sessions/{session}/cache", pack_cache(header), b"")))
        assert (await caller.read()).status == 403
        await caller.send(
            written(("DELETE /sessions/" + session, pack_release(Release(session)), b""))
        )
        assert (await caller.read()).status == 204
    assert held(node) == [(0, 0)]


# Keys, and what is remembered.


def gate(authority: Authority, **options) -> GrantGate:
    made = GrantGate(NodeId("only"), **options)
    made.layers = LayerRange(0, 1)
    authority.rule(made)
    return made


HOP = Hop(NodeId("only"), "127.0.0.1:7080", LayerRange(0, 1))


def reason_of(made: GrantGate, session: SessionId, token: str) -> str | None:
    try:
        opened = made.admit(session, None, (), token, None)
    except MeshError as error:
        return error.reason
    assert opened is not None
    return None


def test_a_key_that_is_not_known_is_asked_for(authority):
    made, session = gate(authority), new_session()
    asked = []

    def ask(key_id: str) -> None:
        asked.append(key_id)
        if len(asked) > 1:
            made.learn(required=True, keys={KEY.key_id: KEY}, now=authority.now)

    made.ask = ask
    made.learn(required=True, keys={}, now=authority.now)
    token = authority.grant(session, HOP)
    assert reason_of(made, session, token) == "GRANT_KEY_UNKNOWN"
    assert reason_of(made, session, token) is None
    assert asked == [KEY.key_id] * 2
    assert reason_of(made, session, "a.b.c") == "GRANT_INVALID"
    assert reason_of(made, session, authority.grant(session, HOP)) is None
    assert len(asked) == 2


def test_a_control_plane_that_does_not_answer_is_no_reason_to_trust(authority):
    made, session = gate(authority), new_session()
    made.learn(required=True, keys={}, now=authority.now)

    def ask(_key_id: str) -> None:
        raise MeshError(Code.UNAVAILABLE, "away", reason="GRANT_KEY_UNKNOWN")

    made.ask = ask
    with pytest.raises(MeshError) as caught:
        made.admit(session, None, (), authority.grant(session, HOP), None)
    assert caught.value.code is Code.UNAVAILABLE


def test_times_are_the_control_planes_whatever_this_machines_clock_says(authority):
    made = GrantGate(HOP.node, clock=lambda: 12.0)
    made.layers, made.incarnation = HOP.layers, START
    made.learn(required=True, keys={KEY.key_id: KEY}, now=authority.now)
    session = new_session()
    assert reason_of(made, session, authority.grant(session, HOP)) is None
    made.learn(required=True, keys={KEY.key_id: KEY}, now=authority.now + 2 * TTL_S)
    assert reason_of(made, session, authority.grant(session, HOP)) == "GRANT_EXPIRED"


def test_what_is_spent_is_not_forgotten_however_much_there_is(authority):
    most = 40
    made = gate(authority, max_spent=most)
    tokens = []
    for number in range(10 * most):
        session = new_session()
        token = authority.grant(session, HOP, expires_s=int(authority.now) + TTL_S + number)
        tokens.append((session, token))
        opened = made.admit(session, None, (), token, None)
        made.spend(opened)
    assert len(made._spent) <= most
    assert {reason_of(made, *each) for each in tokens} == {"GRANT_SPENT"}
    # One that was issued after those which were forgotten is taken.
    session = new_session()
    late = authority.grant(session, HOP, expires_s=int(authority.now) + TTL_S + 10 * most)
    assert reason_of(made, session, late) is None
    # When they have expired, nothing of them is kept.
    authority.now += TTL_S + 11 * most + LEEWAY_S
    for _ in range(most + 1):
        authority.now += 1.0
        session = new_session()
        made.spend(made.admit(session, None, (), authority.grant(session, HOP), None))
    assert len(made._spent) <= most
    assert {reason_of(made, *each) for each in tokens} == {"GRANT_EXPIRED"}
    authority.now += 1.0
    session = new_session()
    assert reason_of(made, session, authority.grant(session, HOP)) is None


def test_a_session_that_ends_as_it_opens_is_not_opened(authority):
    """Checked, then ended by another thread, then about to be opened."""
    made, session = gate(authority), new_session()
    token = authority.grant(session, HOP)
    one, other = (made.admit(session, None, (), token, None) for _ in range(2))
    made.confirm(one)
    made.spend(other)
    with pytest.raises(MeshError) as caught:
        made.confirm(one)
    assert caught.value.reason == "GRANT_SPENT"


def test_showing_grants_in_turn_keeps_no_more_of_them(authority):
    made, session = gate(authority), new_session()
    tokens = [authority.grant(session, HOP) for _ in range(2)]
    opened = made.admit(session, None, (), tokens[0], None)
    for number in range(100):
        made.check(opened, session, None, (), tokens[number % 2], None)
    assert len(opened.used) == 2


async def test_a_session_cut_back_to_nothing_runs_no_other_layers(start_node, authority):
    wide, node, backend = await start_node("wide", 0, 2)
    authority.rule(node)
    hop = Hop(wide.node, wide.address, LayerRange(0, 1))
    session = new_session()
    async with calling(place(hop)) as caller:
        for at, position in ((hop, 0), (hop, 1), (wide, 0), (hop, 0)):
            token = authority.grant(session, hop) if not backend.calls else None
            await caller.send(written(chunk(session, at, position=position, grant=token)))
            assert (await caller.read()).status == (403 if at is wide else 200)
    assert [call[2] for call in backend.calls] == ["0-1"] * 3
