"""Whose a session is at a node: its gateway and the nodes of its route act for it, nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshnet import authority as authorities
from meshnet.cache_wire import CacheHeader, MoveHeader
from meshnet.chunk import Chunk
from meshnet.credentials import Credentials
from meshnet.errors import Code, MeshError
from meshnet.grants import LEEWAY_S
from meshnet.identity import Identity, Role
from meshnet.operations import OwnerId, Rebuild, RebuildMode, Release, Reservation
from meshnet.plane.caller import Caller
from meshnet.plane.client import PlaneClient
from meshnet.plane.links import LinkSettings
from meshnet.topology import Hop, LayerRange, NodeId
from meshnet.wire import ChunkHeader
from meshnet_node.app import Node
from tests.control.secured import make_credentials
from tests.node.test_granted import HIDDEN, Authority, gate, held, pipeline
from tests.node.test_pipeline_of_stubs import stub_activation
from tests.plane.doubles import new_session

FRONT = Identity(Role.GATEWAY, "front")
OTHER = Identity(Role.GATEWAY, "other")
MALLORY = Identity(Role.NODE, "mallory")
FORMER = Identity(Role.NODE, "former")
SECOND = Identity(Role.NODE, "second")
OWNER = OwnerId(new_session())
TARGET = Hop(NodeId("second"), "127.0.0.1:1", LayerRange(1, 2))


@pytest.fixture
def authority() -> Authority:
    return Authority()


class Certified:
    """Credentials of a mesh."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._authority = authorities.Authority(folder / "authority")

    def give(self, identity: Identity) -> Credentials:
        folder = self._folder / identity.name
        return make_credentials(self._authority, identity, folder)


async def test_a_session_goes_on_through_repairs_and_moves(start_node, authority, tmp_path):
    """Each hop's certificate is checked against grants as they follow one another."""
    certified = Certified(tmp_path)
    hops: dict[str, Hop] = {}
    nodes: dict[str, Node] = {}
    for name, first in (("a", 0), ("e", 0), ("b", 1), ("c", 1), ("f", 1)):
        tls = certified.give(Identity(Role.NODE, name))
        hops[name], nodes[name], _ = await start_node(name, first, first + 1, num_layers=2, tls=tls)
        authority.rule(nodes[name])
    front = PlaneClient(LinkSettings(tls=certified.give(FRONT)))
    session = new_session()

    def grant(*names: str) -> str:
        return authority.grant(session, *(hops[name] for name in names), gateway="front")

    def route(*names: str) -> tuple[Hop, ...]:
        return tuple(hops[name] for name in names)

    line = pipeline(front, route("a", "b"), session, grant("a", "b"), max_tokens=40, owner=OWNER)
    await line.forward(stub_activation(10), HIDDEN)
    line.show(grant("a", "c"))  # b is lost
    await line.rebuild(hops["a"], route("c"), RebuildMode.FAST)
    line.reroute(route("a", "c"))
    await line.own()
    await line.forward(stub_activation(1), HIDDEN)

    # a is lost: all tokens come again through e, several chunks in flight.
    again = pipeline(front, route("e", "c"), session, grant("e", "c"), max_tokens=40, owner=OWNER)
    again.epoch = line.epoch + 1
    await again.forward(stub_activation(11), HIDDEN)
    assert held(nodes["e"], nodes["c"]) == [(1, 40), (1, 40)]

    moved = grant("e", "f")  # c drains
    asked = MoveHeader(session, route("f"), 11, moved)
    await front.move(hops["c"].address, NodeId("c"), asked, timeout_s=20.0)
    again.show(moved)
    again.reroute(route("e", "f"))
    former = PlaneClient(LinkSettings(tls=Credentials(nodes["c"].settings.tls.files)))
    assert held(nodes["c"], nodes["f"]) == [(0, 0), (1, 40)]
    await again.forward(stub_activation(1), HIDDEN)
    await refused(former.release(hops["f"].address, session, node=NodeId("f")))
    await refused(former.release(hops["e"].address, session, node=NodeId("e")))
    await again.own()
    await again.forward(stub_activation(1), HIDDEN)
    await again.close()
    await front.release(hops["a"].address, session, node=NodeId("a"), alone=True)
    await front.release(hops["b"].address, session, node=NodeId("b"), alone=True)
    assert held(*nodes.values()) == [(0, 0)] * 5
    await former.close()
    await front.close()


async def refused(work: Any, reason: str = "SESSION_OF_OTHERS") -> None:
    with pytest.raises(MeshError) as caught:
        await work
    assert (caught.value.code, caught.value.reason) == (Code.PERMISSION_DENIED, reason)


@dataclass
class Scene:
    """A node with an open session of `FRONT`, over a route to the node `second`.

    Attributes:
        node: asked.
        hop: the same.
        session: held there.
        token: its grant.
        replaced: the one before, which names the node `former`.
        authority: signs more.
    """

    node: Node
    hop: Hop
    session: str
    token: str
    replaced: str
    authority: Authority

    def chunk(self, **fields: Any) -> Chunk:
        tensor = stub_activation(1)
        header = ChunkHeader(
            tensor.shape, "bfloat16", self.session, layers=self.hop.layers, want=HIDDEN, **fields
        )
        return Chunk(header, tensor, tensor.nbytes)

    def cache(self, token: str | None) -> CacheHeader:
        kv = self.node.stage.backend.kv.cut(0, 1)
        return CacheHeader(self.session, self.hop.layers, 3, kv, owner=OWNER, grant=token)

    def seen(self) -> tuple[object, ...]:
        """Give all that an attack could change."""
        held = self.node.stage.sessions.find(self.session)
        return (
            held,
            held.cache.length,
            held.reserved_tokens,
            held.settled_tokens,
            held.owner,
            held.epoch,
            held.route,
            held.next_hop,
            held.busy,
            held.granted.grant,
            held.granted.actors,
            held.granted.shipper,
        )


@pytest.fixture
async def scene(start_node, authority) -> Scene:
    hop, node, _ = await start_node("first", 0, 1, num_layers=2)
    authority.rule(node)
    session = new_session()
    former = Hop(NodeId("former"), "127.0.0.1:1", LayerRange(1, 2))
    first = authority.grant(session, hop, former, gateway="front")
    token = authority.grant(session, hop, TARGET, gateway="front")
    scene = Scene(node, hop, session, token, first, authority)
    reserved = Reservation(session, 20, hop.layers, (), OwnerId(new_session()), first)
    await act(node.reserve, reserved, FRONT)
    for position in range(3):
        await act(node.forward, scene.chunk(position=position, grant=token), FRONT)
    return scene


async def act(work: Callable[..., Any], asked: Any, who: Identity | None) -> Any:
    return await asyncio.to_thread(work, asked, Caller(who))


ASKS: dict[str, Callable[[Scene], tuple[str, Any]]] = {
    "a step": lambda scene: ("forward", scene.chunk(position=3)),
    "what follows, unsaid where": lambda scene: ("forward", scene.chunk()),
    "its first token again": lambda scene: ("forward", scene.chunk(position=0)),
    "a later epoch": lambda scene: ("forward", scene.chunk(position=0, epoch=9)),
    "a chunk that waits": lambda scene: (
        "forward",
        scene.chunk(position=1, epoch=9, chunk_index=1, chunk_total=2),
    ),
    "more cache": lambda scene: ("reserve", Reservation(scene.session, 99, scene.hop.layers)),
    "another owner": lambda scene: (
        "reserve",
        Reservation(scene.session, 20, scene.hop.layers, (), OWNER),
    ),
    "its end": lambda scene: ("release", Release(scene.session)),
    "its end here": lambda scene: ("release", Release(scene.session, alone=True)),
    "another cache": lambda scene: ("take_cache", scene.cache(None)),
    "another cache, by the grant": lambda scene: ("take_cache", scene.cache(scene.token)),
    "its move": lambda scene: (
        "move",
        MoveHeader(scene.session, (scene.hop,), grant=scene.token),
    ),
    "its rebuild": lambda scene: ("rebuild", Rebuild(scene.session, 1, (TARGET,))),
}


@pytest.mark.parametrize("who", [MALLORY, OTHER, FORMER], ids=lambda who: who.name)
async def test_others_change_nothing_of_a_session(scene, who):
    before = scene.seen()
    for name, ask in ASKS.items():
        method, asked = ask(scene)
        if name == "a chunk that waits":
            with pytest.raises(MeshError):  # for the first of its epoch, which does not come
                await act(scene.node.forward, asked, who)
        else:
            await refused(act(getattr(scene.node, method), asked, who))
        assert scene.seen() == before, name
    scene.node._owners._end_sessions((before[4], who.uri))
    await act(scene.node.forward, scene.chunk(position=3), FRONT)
    await act(scene.node.forward, scene.chunk(position=4), SECOND)


@pytest.mark.parametrize(
    ("who", "changes", "reason"),
    [
        (FORMER, None, "SESSION_OF_OTHERS"),
        (FORMER, {"expires_s": -2 * int(LEEWAY_S)}, "SESSION_OF_OTHERS"),
        (OTHER, {"gateway": "other"}, "GRANT_MISMATCH"),
        (MALLORY, {"gateway": "other"}, "GRANT_MISMATCH"),
        (MALLORY, {"gateway": "front"}, "SESSION_OF_OTHERS"),
    ],
    ids=["replaced", "issued before", "another gateway's", "the same by a node", "not named"],
)
async def test_grants_that_let_nobody_else_act(scene, who, changes, reason):
    """The control plane signed them, for this very session and node."""
    former = Hop(NodeId("former"), "127.0.0.1:1", LayerRange(1, 2))
    token = scene.replaced
    if changes is not None:
        said = {"gateway": "front", **changes}
        if "expires_s" in said:
            said["expires_s"] += int(scene.authority.now) + 60
        token = scene.authority.grant(scene.session, scene.hop, former, **said)
    before = scene.seen()
    for method, asked in (
        ("forward", scene.chunk(position=3, grant=token)),
        ("reserve", Reservation(scene.session, 99, scene.hop.layers, (), OWNER, token)),
    ):
        await refused(act(getattr(scene.node, method), asked, who), reason)
        assert scene.seen() == before, method
    if reason == "GRANT_MISMATCH" or changes is None or "expires_s" in changes:
        await refused(act(scene.node.take_cache, scene.cache(token), who), reason)
        assert scene.seen() == before
    await act(scene.node.forward, scene.chunk(position=3), FRONT)


async def test_who_is_not_in_a_grant_opens_nothing_by_it(scene):
    session = new_session()
    token = scene.authority.grant(session, scene.hop, TARGET, gateway="front")
    opening = Reservation(session, 9, scene.hop.layers, grant=token)
    for who in (MALLORY, OTHER):
        await refused(act(scene.node.reserve, opening, who))
    await act(scene.node.reserve, opening, SECOND)
    await act(scene.node.release, Release(session), FRONT)


async def test_a_node_may_bring_a_cache_again_and_take_it_back_until_the_session_goes_on(scene):
    session = scene.session = new_session()
    token = scene.authority.grant(session, scene.hop, TARGET, gateway="front")
    for _ in range(2):
        arriving = await act(scene.node.take_cache, scene.cache(token), FORMER)
        arriving.keep()
    await act(scene.node.release, Release(session, alone=True), FORMER)
    assert scene.node.stage.sessions.find(session) is None

    session = scene.session = new_session()
    token = scene.authority.grant(session, scene.hop, TARGET, gateway="front")
    (await act(scene.node.take_cache, scene.cache(token), FORMER)).keep()
    await refused(act(scene.node.forward, scene.chunk(position=3), FORMER))
    await act(scene.node.forward, scene.chunk(position=3, grant=token), FRONT)
    await refused(act(scene.node.release, Release(session, alone=True), FORMER))


@pytest.mark.parametrize("opener", [FRONT, SECOND], ids=lambda who: who.name)
async def test_a_grant_without_a_name_makes_the_first_gateway_the_sessions_own(scene, opener):
    session = scene.session = new_session()
    token = scene.authority.grant(session, scene.hop, TARGET)
    await act(scene.node.reserve, Reservation(session, 9, scene.hop.layers, grant=token), opener)
    await refused(act(scene.node.release, Release(session), MALLORY))
    await act(scene.node.forward, scene.chunk(position=0), FRONT)
    await refused(act(scene.node.release, Release(session), OTHER))
    await act(scene.node.release, Release(session), FRONT)


def test_where_nobody_says_who_they_are_whoever_knows_the_session_acts(authority):
    made, session = gate(authority), new_session()
    hop = Hop(NodeId("only"), "127.0.0.1:7080", LayerRange(0, 1))
    opened = made.admit(session, None, (), authority.grant(session, hop, gateway="front"), None)
    assert Caller().uri in opened.actors
    assert not made.may_follow(opened, session, None, None)
