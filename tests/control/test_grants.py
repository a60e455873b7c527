"""Route grants as the control plane issues them: for whom, over what, and with which keys."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Mapping

import pytest

from meshnet.control.app import ControlServer
from meshnet.control.client import ControlClient
from meshnet.control.documents import MemoryDocuments
from meshnet.control.fresh import Fresh
from meshnet.control.grant_issuer import KIND, GrantIssuer, GrantTimes
from meshnet.control.hops import to_hops
from meshnet.control.settings import ControlSettings
from meshnet.errors import Code, MeshError
from meshnet.grammar import parse_route
from meshnet.grants import GrantKey, key_id_of, verify
from meshnet.topology import SessionId
from meshnet.v1 import route_service_pb2 as route_pb
from meshnet.v1 import types_pb2
from tests.control.conftest import MODEL, FakeClock, make_node

SESSION = SessionId("8d7f2f0a-5c1e-4b7a-9a53-0d7c6f1e2b34")
ROUTE = parse_route("a@10.0.0.1:7080/0-10,b@10.0.0.2:7080/10-20")
TIMES = GrantTimes(ttl_s=60.0, key_life_s=3600.0, lead_s=120.0, refresh_s=3600.0)


def keys_of(policy: types_pb2.GrantPolicy) -> dict[str, GrantKey]:
    return {
        key.key_id: GrantKey.of(key.public_key, key.expire_time.ToSeconds()) for key in policy.keys
    }


def now_of(policy: types_pb2.GrantPolicy) -> float:
    return policy.time.ToNanoseconds() / 1e9


async def check(
    issuer: GrantIssuer, token: str, clock: FakeClock, *, asked: bool = False
) -> Mapping[str, GrantKey]:
    """Check a grant as a node would that learns its keys from `issuer`."""
    policy = await issuer.policy(key_id_of(token) if asked else "")
    assert policy.required
    assert now_of(policy) == pytest.approx(clock.now_s)
    grant = verify(token, keys_of(policy), clock.now_s)
    assert (grant.session, grant.route, grant.incarnations) == (SESSION, ROUTE, (1, 2))
    return keys_of(policy)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(1_800_000_000.0)


async def test_a_replica_checks_what_another_signed_as_soon_as_it_is_asked(clock):
    documents = MemoryDocuments()
    one, other = (GrantIssuer(documents, TIMES, clock=clock) for _ in range(2))
    await one.start()
    await other.start()
    token = other.issue(SESSION, ROUTE, (1, 2)).grant
    with pytest.raises(MeshError) as caught:
        await check(one, token, clock)
    assert caught.value.reason == "GRANT_KEY_UNKNOWN"
    assert len(await check(one, token, clock, asked=True)) == 2
    await check(one, token, clock)
    for document in await documents.list(KIND):
        value = json.loads(document.value)
        assert value.keys() == {"public_key", "expires_s"}
        public = base64.b64decode(value["public_key"])
        assert GrantKey.of(public, 0).key_id == document.key
    await one.close()
    await other.close()


async def test_keys_change_and_no_grant_is_refused_for_it(clock):
    documents = MemoryDocuments()
    issuer = GrantIssuer(documents, TIMES, clock=clock)
    await issuer.start()
    signed_with = []
    for _ in range(400):
        known = keys_of(await issuer.policy())  # what nodes learn with a heartbeat
        clock.advance(30.0)
        await issuer.turn()
        token = issuer.issue(SESSION, ROUTE, (1, 2)).grant
        verify(token, known, clock.now_s)
        if key_id_of(token) not in signed_with:
            signed_with.append(key_id_of(token))
    assert len(signed_with) == 4
    published = [document.key for document in await documents.list(KIND)]
    assert signed_with[0] not in published
    assert len(published) <= 2
    await issuer.close()


async def test_a_process_that_ends_takes_its_keys_along_when_its_grants_have_expired(clock):
    documents = MemoryDocuments()
    one, other = (GrantIssuer(documents, TIMES, clock=clock) for _ in range(2))
    await one.start()
    await other.start()
    token = one.issue(SESSION, ROUTE, (1, 2)).grant
    await one.close()
    await check(other, token, clock, asked=True)
    clock.advance(2 * TIMES.ttl_s + 1)
    await other.turn()
    assert key_id_of(token) not in keys_of(await other.policy())
    clock.advance(TIMES.ttl_s)
    await other.turn()
    assert len(await documents.list(KIND)) == 1
    await other.close()


class Away(MemoryDocuments):
    """Documents that can be away."""

    is_away = False

    async def list(self, kind):
        self._check()
        return await super().list(kind)

    async def put(self, kind, key, value, *, expected=None):
        self._check()
        return await super().put(kind, key, value, expected=expected)

    def _check(self) -> None:
        if self.is_away:
            raise MeshError(Code.UNAVAILABLE, "away", reason="STORE_UNAVAILABLE")


async def test_without_documents_the_last_key_signs_on_while_it_is_taken(clock):
    documents = Away()
    issuer = GrantIssuer(documents, TIMES, clock=clock)
    await issuer.start()
    documents.is_away = True
    for _ in range(2):
        clock.advance(TIMES.key_life_s / 2)
        with pytest.raises(MeshError):
            await issuer.turn() or await issuer.policy("0" * 16)
        token = issuer.issue(SESSION, ROUTE, (1, 2)).grant
        verify(token, keys_of(await issuer.policy()), clock.now_s)
    clock.advance(TIMES.lead_s)
    with pytest.raises(MeshError) as caught:
        issuer.issue(SESSION, ROUTE, (1, 2))
    assert caught.value.code is Code.UNAVAILABLE
    documents.is_away = False
    await issuer.turn()
    await check(issuer, issuer.issue(SESSION, ROUTE, (1, 2)).grant, clock)
    await issuer.close()


async def test_documents_that_are_no_keys_are_passed_over_and_removed(clock):
    documents = MemoryDocuments()
    wrong = [b"", b"[]", b"{}", b'{"public_key": "AA==", "expires_s": 9}', b"\xff"]
    for number, value in enumerate(wrong):
        await documents.put(KIND, f"wrong-{number}", value)
    issuer = GrantIssuer(documents, TIMES, clock=clock)
    await issuer.start()
    await documents.put(KIND, "0" * 16, (await documents.list(KIND))[0].value)
    await issuer.turn()
    assert len(await documents.list(KIND)) == 1
    await check(issuer, issuer.issue(SESSION, ROUTE, (1, 2)).grant, clock)
    await issuer.close()


async def test_those_who_ask_at_once_share_a_reading_that_began_after_they_asked():
    began = 0
    held = asyncio.Event()

    async def read() -> None:
        nonlocal began
        began += 1
        await held.wait()

    fresh = Fresh(read, 0.0)
    first = asyncio.create_task(fresh.read())
    while began == 0:
        await asyncio.sleep(0)
    others = [asyncio.create_task(fresh.read()) for _ in range(50)]
    await asyncio.sleep(0)
    held.set()
    await asyncio.gather(first, *others)
    assert began == 2


# On sockets.


@pytest.fixture
async def granting(start_mesh):
    mesh = await start_mesh(require_grants=True)
    await mesh.join("a", (0, 4), port=7001)
    await mesh.join("b", (4, 8), port=7002, incarnation=7)
    await mesh.join("c", (4, 8), port=7003)
    return mesh


def hop(node: str, start: int, end: int, incarnation: int = 1) -> route_pb.Hop:
    layers = types_pb2.LayerRange(start=start, end=end)
    return route_pb.Hop(node=f"nodes/{node}", layers=layers, incarnation=incarnation)


async def test_a_selected_route_is_granted_as_it_is(granting):
    route = await granting.client.select_route(MODEL, session=SESSION, exclude=["c"])
    policy = (await granting.beat("a")).grants
    grant = verify(route.grant, keys_of(policy), now_of(policy))
    assert grant.session == SESSION
    assert grant.route == to_hops(route)
    assert grant.incarnations == (1, 7)
    assert 0 < grant.expires_s - now_of(policy) <= route.grant_ttl.ToSeconds() == 60
    assert await granting.client.get_grant_policy() != types_pb2.GrantPolicy()
    registered = await granting.client.register("d", make_node())
    assert keys_of(registered.grants) == keys_of(policy)


async def test_no_session_no_grant_and_none_for_an_explanation(granting):
    assert not (await granting.client.select_route(MODEL)).grant
    status, answer = await granting.json(
        "POST",
        "/v1/routes:select",
        json={"model": MODEL, "sessionId": SESSION, "explain": True, "maxRoutes": 2},
    )
    assert status == 200
    assert not any(route["grant"] for route in answer["routes"])
    status, answer = await granting.json(
        "POST", "/v1/routes:select", json={"model": MODEL, "sessionId": SESSION, "maxRoutes": 2}
    )
    assert len({route["grant"] for route in answer["routes"]}) == 2
    status, answer = await granting.json(
        "POST", "/v1/routes:select", json={"model": MODEL, "sessionId": SESSION.upper()}
    )
    assert (status, "session_id" in answer["message"]) == (400, True)


async def test_a_route_that_was_cut_otherwise_is_granted_by_the_addresses_of_the_registry(granting):
    asked = hop("b", 4, 8, 7)
    asked.endpoint.uri = "http://169.254.169.254:80/forward"
    answer = await granting.client.grant_route(MODEL, SESSION, [hop("a", 0, 4), asked])
    policy = await granting.client.get_grant_policy()
    grant = verify(answer.grant, keys_of(policy), now_of(policy))
    assert grant.route == parse_route("a@127.0.0.1:7001/0-4,b@127.0.0.1:7002/4-8")


@pytest.mark.parametrize(
    ("hops", "code", "says"),
    [
        ([hop("a", 0, 4), hop("x", 4, 8)], "FAILED_PRECONDITION", "x is not registered"),
        ([hop("a", 0, 4), hop("b", 4, 8, 6)], "FAILED_PRECONDITION", "started again"),
        ([hop("a", 0, 4)], "FAILED_PRECONDITION", "not all of one model"),
        ([hop("a", 0, 3), hop("b", 3, 8, 7)], "FAILED_PRECONDITION", "has not layers 3-8"),
        ([hop("b", 4, 8, 7)], "INVALID_ARGUMENT", "expected layers from 0"),
        ([hop("a", 0, 4), hop("b", 5, 8, 7)], "INVALID_ARGUMENT", "expected layers from 4"),
        ([hop("a", 0, 2), hop("a", 2, 4)], "INVALID_ARGUMENT", "on the route already"),
        ([hop("a", 0, 4)] * 65, "INVALID_ARGUMENT", "at most 64"),
        ([], "INVALID_ARGUMENT", "hops"),
        (
            [route_pb.Hop(node="a", layers=hop("a", 0, 4).layers)],
            "INVALID_ARGUMENT",
            "hops[0].node",
        ),
    ],
)
async def test_routes_that_are_not_granted(granting, hops, code, says):
    with pytest.raises(MeshError) as caught:
        await granting.client.grant_route(MODEL, SESSION, hops)
    assert caught.value.code.name == code
    assert says in caught.value.message


async def test_a_node_that_is_lost_is_not_granted(granting):
    granting.clock.advance(6.0)
    await granting.beat("a")
    granting.clock.advance(6.0)
    with pytest.raises(MeshError) as caught:
        await granting.client.grant_route(MODEL, SESSION, [hop("a", 0, 4), hop("b", 4, 8, 7)])
    assert caught.value.reason == "HOP_UNKNOWN"


async def test_an_open_mesh_asks_for_no_grants(mesh):
    await mesh.join("a", (0, 8))
    assert not (await mesh.client.select_route(MODEL, session=SESSION)).grant
    assert not (await mesh.beat("a")).grants.required
    assert not (await mesh.client.get_grant_policy("0" * 16)).required
    with pytest.raises(MeshError) as caught:
        await mesh.client.grant_route(MODEL, SESSION, [hop("a", 0, 8)])
    assert caught.value.reason == "GRANTS_OFF"


async def test_replicas_share_their_keys_over_a_restart(start_mesh, tmp_path):
    store = f"sqlite:{tmp_path / 'nodes.db'}"
    one = ControlServer(ControlSettings(http_port=0, grpc_port=0, require_grants=True, store=store))
    async with ControlClient(f"grpc://{(await one.start()).grpc}") as client:
        await client.register("a", make_node())
        leased = (await client.register("a", make_node())).lease
        await client.heartbeat("a", lease_id=leased.lease_id, incarnation=1, ready=True)
        route = await client.select_route(MODEL, session=SESSION)
    await one.close()
    other = await start_mesh(require_grants=True, store=store)
    policy = await other.client.get_grant_policy()
    assert len(policy.keys) == 2
    assert verify(route.grant, keys_of(policy), now_of(policy)).session == SESSION
    assert ControlSettings().require_grants is False
