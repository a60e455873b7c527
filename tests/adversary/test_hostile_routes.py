"""A hostile node on the activation plane: chunks, grants, routes and sessions that are not its own.

Everything is sent with a good certificate of the mesh to a node that did not ask for it. Where
a grant is not what a control plane issues, it is nevertheless signed by a key that one has
published, so that only what it says can be refused.
"""

from __future__ import annotations

import asyncio
import base64
import json
import socket
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from meshnet.credentials import Credentials
from meshnet.grants import Grant, GrantKey, key_id_of, sign
from meshnet.identity import Role
from meshnet.operations import OwnerId
from meshnet.plane.client import PlaneClient
from meshnet.plane.links import LinkSettings
from meshnet.topology import LayerRange, NodeId
from meshnet.wire import ChunkHeader, pack_chunk
from tests.adversary.mesh import BOUND_S, LAYERS, Granted, Mesh, ReplicaKey, Said, reason_of
from tests.plane.doubles import P16, new_session


@dataclass(frozen=True)
class Scene:
    """What an attack can use.

    Attributes:
        granted: a route of an open session of the gateway `front`.
        owner: as which the gateway shows that it lives.
        listener: ``host:port`` that nobody may connect to.
        key: signs grants as another replica of the control plane.
        incarnations: of the nodes of the route.
    """

    granted: Granted
    owner: OwnerId
    listener: str
    key: ReplicaKey
    incarnations: tuple[int, ...]

    @property
    def beyond(self) -> str:
        """A route that leads to the listener."""
        return f"beta@{self.listener}/1-2"


Fields = Mapping[str, str]


def opening(scene: Scene, **changes: Any) -> Grant:
    """Give a grant that beta would take for a new session, but for `changes`."""
    route = scene.granted.hops
    grant = Grant(uuid.uuid4().hex, new_session(), route, scene.incarnations, int(time.time()) + 60)
    return replace(grant, **changes)


def chunk(session: str, **fields: str) -> dict[str, str]:
    """Give the header of a chunk that opens a session at beta."""
    header = ChunkHeader((1, 1, 8), "bfloat16", session, layers=LayerRange(1, 2))
    return {**dict(pack_chunk(header)), **{f"X-Meshnet-{n}": v for n, v in fields.items()}}


def granted_chunk(scene: Scene, grant: Grant) -> dict[str, str]:
    return chunk(grant.session, Grant=scene.key.sign(grant))


def by_a_strange_key(scene: Scene) -> Fields:
    key = Ed25519PrivateKey.generate()
    grant = opening(scene)
    key_id = GrantKey(key.public_key(), grant.expires_s).key_id
    return chunk(grant.session, Grant=sign(grant, key, key_id))


def by_a_strange_key_under_a_known_name(scene: Scene) -> Fields:
    grant = opening(scene)
    key_id = key_id_of(scene.granted.token)
    return chunk(grant.session, Grant=sign(grant, Ed25519PrivateKey.generate(), key_id))


def with_other_claims(scene: Scene) -> Fields:
    """Keep header and signature of a real grant; have it be for a session of one's own."""
    head, claims, signature = scene.granted.token.split(".")
    told = json.loads(base64.urlsafe_b64decode(claims + "=="))
    session = new_session()
    changed = base64.urlsafe_b64encode(json.dumps({**told, "sub": session}).encode()).decode()
    return chunk(session, Grant=f"{head}.{changed.rstrip('=')}.{signature}")


def without_a_signature(scene: Scene) -> Fields:
    told = {"alg": "none", "kid": key_id_of(scene.granted.token), "typ": "meshnet-grant"}
    head = base64.urlsafe_b64encode(json.dumps(told).encode()).decode().rstrip("=")
    return chunk(new_session(), Grant=f"{head}.{scene.granted.token.split('.')[1]}.")


def for_other_layers(scene: Scene) -> Fields:
    first, last = scene.granted.hops
    hops = (replace(first, layers=LayerRange(0, 2)), replace(last, layers=LayerRange(2, 3)))
    return granted_chunk(scene, opening(scene, route=hops))


def for_other_nodes(scene: Scene) -> Fields:
    first, last = scene.granted.hops
    return granted_chunk(scene, opening(scene, route=(first, replace(last, node=NodeId("gamma")))))


def for_an_earlier_start(scene: Scene) -> Fields:
    first, last = scene.incarnations
    return granted_chunk(scene, opening(scene, incarnations=(first, last - 1)))


def expired(scene: Scene) -> Fields:
    return granted_chunk(scene, opening(scene, expires_s=int(time.time()) - 10))


def led_away(scene: Scene) -> Fields:
    """A real grant and a route that it does not name."""
    session = scene.granted.session
    return {**reservation(scene, session), "X-Meshnet-Grant": scene.granted.token}


def reservation(scene: Scene, session: str) -> dict[str, str]:
    return {
        "X-Meshnet-Layers": "0-1",
        "X-Meshnet-Route": scene.beyond,
        "X-Meshnet-Max-Tokens": "8",
    }


MISSING, INVALID, MISMATCH = "GRANT_MISSING", "GRANT_INVALID", "GRANT_MISMATCH"

CHUNKS: dict[str, tuple[Callable[[Scene], Fields], str]] = {
    "no grant": (lambda _: chunk(new_session()), MISSING),
    "no grant, and a route that leads away": (
        lambda scene: chunk(new_session(), Route=f"gamma@{scene.listener}/2-3"),
        MISSING,
    ),
    "what is no grant": (lambda _: chunk(new_session(), Grant="a.b.c"), INVALID),
    "without a signature": (without_a_signature, INVALID),
    "with other claims": (with_other_claims, INVALID),
    "by a strange key": (by_a_strange_key, "GRANT_KEY_UNKNOWN"),
    "by a strange key under a known name": (by_a_strange_key_under_a_known_name, INVALID),
    "expired": (expired, "GRANT_EXPIRED"),
    "of another session": (
        lambda scene: chunk(new_session(), Grant=scene.granted.token),
        MISMATCH,
    ),
    "for other layers": (for_other_layers, MISMATCH),
    "for other nodes": (for_other_nodes, MISMATCH),
    "for an earlier start": (for_an_earlier_start, MISMATCH),
}

Path = Callable[[Scene], str]


def new(suffix: str = "") -> Path:
    return lambda _: f"/sessions/{new_session()}{suffix}"


def held(suffix: str = "") -> Path:
    return lambda scene: f"/sessions/{scene.granted.session}{suffix}"


CACHE = {
    "Content-Type": "application/octet-stream",
    "X-Meshnet-Layers": "0-1",
    "X-Meshnet-Position": "4",
    "X-Meshnet-Dtype": "bfloat16",
    "X-Meshnet-Kv": "none",
}
MOVED = "X-Meshnet-Route"

ACTS: dict[str, tuple[str, Path, Callable[[Scene], Fields], int, str]] = {
    "reserves a session": (
        "PUT",
        new(),
        lambda scene: reservation(scene, ""),
        403,
        MISSING,
    ),
    "reserves by the grant of another session": (
        "PUT",
        new(),
        lambda scene: {**reservation(scene, ""), **scene.granted.headers},
        403,
        MISMATCH,
    ),
    "leads an open session away": ("PUT", held(), led_away, 403, MISMATCH),
    "leads an open session away without a grant": (
        "PUT",
        held(),
        lambda scene: reservation(scene, ""),
        403,
        MISMATCH,
    ),
    "moves a session": (
        "POST",
        held("/move"),
        lambda scene: {MOVED: f"gamma@{scene.listener}/0-1"},
        403,
        MISSING,
    ),
    "moves a session by its grant": (
        "POST",
        held("/move"),
        lambda scene: {
            MOVED: f"gamma@{scene.listener}/0-1",
            "X-Meshnet-Grant": scene.granted.token,
        },
        403,
        MISMATCH,
    ),
    "has a session rebuilt elsewhere": (
        "POST",
        held("/rebuild"),
        lambda scene: {"X-Meshnet-Position": "1", MOVED: scene.beyond},
        403,
        MISMATCH,
    ),
    "brings a cache": ("PUT", new("/cache"), lambda _: CACHE, 403, MISSING),
    "brings a cache by the grant of another session": (
        "PUT",
        new("/cache"),
        lambda scene: {**CACHE, "X-Meshnet-Grant": scene.granted.token},
        403,
        MISMATCH,
    ),
    "frees a session that is not known": ("DELETE", new(), lambda _: {}, 204, ""),
    "guesses at sessions": (
        "DELETE",
        lambda _: "/sessions/*",
        lambda _: {},
        400,
        "INVALID_ARGUMENT",
    ),
    "lists sessions": ("GET", lambda _: "/sessions/", lambda _: {}, 405, "METHOD_NOT_ALLOWED"),
    "looks elsewhere": ("GET", lambda _: "/v1/nodes", lambda _: {}, 404, "NOT_FOUND"),
}


@pytest.fixture
async def scene(mesh: Mesh) -> AsyncIterator[Scene]:
    """An open session of an honest gateway, whose cache holds a token at both nodes."""
    owner = OwnerId(str(new_session()))
    front = mesh.certified(Role.GATEWAY, "front")
    granted = await mesh.grant()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        async with mesh.client(front) as client:
            nodes = {node.name: node.incarnation for node in await client.list_nodes()}
        status, answer = await mesh.ask_plane(
            "alpha",
            "PUT",
            f"/sessions/{granted.session}",
            front,
            {**granted.headers, "X-Meshnet-Owner": owner},
        )
        assert status == 204, answer
        await fill(mesh, front, granted)
        yield Scene(
            granted=granted,
            key=mesh.replica_key,
            owner=owner,
            listener=f"127.0.0.1:{listener.getsockname()[1]}",
            incarnations=tuple(nodes[f"nodes/{hop.node}"] for hop in granted.hops),
        )
        with pytest.raises(BlockingIOError):
            listener.accept()
    status, _ = await mesh.ask_plane("alpha", "DELETE", f"/sessions/{granted.session}", front)
    assert status == 204
    assert (await mesh.figures("beta"))["meshnet_sessions"] == 0


async def fill(mesh: Mesh, front: Credentials, granted: Granted) -> None:
    """Send the session's next chunk, of one token, over both nodes."""
    header = ChunkHeader((1, 1), "int32", granted.session)
    fields = {**dict(pack_chunk(header)), **granted.headers}
    status, answer = await mesh.ask_plane("alpha", "POST", "/forward", front, fields, bytes(4))
    assert status == 200, answer


async def learned(mesh: Mesh, scene: Scene) -> None:
    """Wait until beta knows the key: what it refuses from now on, it refuses for what it says."""
    front = mesh.certified(Role.GATEWAY, "front")
    async with asyncio.timeout(BOUND_S):
        while True:
            _, answer = await mesh.ask_plane("beta", "POST", "/forward", front, expired(scene), P16)
            if reason_of(answer) == "GRANT_EXPIRED":
                return
            assert reason_of(answer) == "GRANT_KEY_UNKNOWN", answer
            await asyncio.sleep(0.2)


async def test_the_grant_that_the_following_are_made_of_is_good(mesh: Mesh, scene: Scene) -> None:
    await learned(mesh, scene)
    front = mesh.certified(Role.GATEWAY, "front")
    grant = opening(scene)
    fields = granted_chunk(scene, grant)
    assert (await mesh.ask_plane("beta", "POST", "/forward", front, fields, P16))[0] == 200
    path = f"/sessions/{grant.session}"
    assert (await mesh.ask_plane("beta", "DELETE", path, front))[0] == 204


@pytest.mark.parametrize("what", CHUNKS)
async def test_a_chunk_without_a_good_grant_opens_nothing(
    mesh: Mesh, scene: Scene, what: str
) -> None:
    make, reason = CHUNKS[what]
    await learned(mesh, scene)
    fields = make(scene)
    async with mesh.unharmed():
        status, answer = await mesh.ask_plane(
            "beta", "POST", "/forward", mesh.joined("alpha"), fields, P16
        )
        assert Said(status, reason_of(answer)) == Said(403, reason), answer


@pytest.mark.parametrize("what", ACTS)
async def test_the_sessions_of_others_stay_where_they_are(
    mesh: Mesh, scene: Scene, what: str
) -> None:
    method, path, make, status, reason = ACTS[what]
    async with mesh.unharmed():
        found, answer = await mesh.ask_plane(
            "alpha", method, path(scene), mesh.joined("beta"), make(scene)
        )
        assert Said(found, reason_of(answer)) == Said(status, reason), answer
    await fill(mesh, mesh.certified(Role.GATEWAY, "front"), scene.granted)


def of_the_session(scene: Scene, node: str) -> dict[str, tuple[str, str, Fields, bytes]]:
    """Give what whoever knows an open session's id may ask of a node of its route for it."""
    path, owner = f"/sessions/{scene.granted.session}", {"X-Meshnet-Owner": new_session()}
    layers = {"X-Meshnet-Layers": str(LayerRange(*LAYERS[node]))}
    grant, reserved = {"X-Meshnet-Grant": scene.granted.token}, {"X-Meshnet-Max-Tokens": "9"}
    shape, dtype = ((1, 1), "int32") if node == "alpha" else ((1, 1, 8), "bfloat16")
    header = ChunkHeader(shape, dtype, scene.granted.session, layers=LayerRange(*LAYERS[node]))
    body = bytes(header.num_bytes)
    return {
        "feeds it": ("POST", "/forward", dict(pack_chunk(header)), body),
        "cuts it back": ("POST", "/forward", dict(pack_chunk(header.at(0))), body),
        "begins another epoch": (
            "POST",
            "/forward",
            {**dict(pack_chunk(header.at(0))), "X-Meshnet-Epoch": "7"},
            body,
        ),
        "frees it": ("DELETE", path, {}, b""),
        "frees it here": ("DELETE", path, {"X-Meshnet-Scope": "node"}, b""),
        "owns it": ("PUT", path, {**layers, **reserved, **owner}, b""),
        "owns it by its grant": ("PUT", path, {**layers, **reserved, **owner, **grant}, b""),
        "replaces its cache": ("PUT", f"{path}/cache", {**CACHE, **layers, **grant}, b""),
    }


@pytest.mark.parametrize("role", [Role.NODE, Role.GATEWAY], ids=lambda role: role.value)
async def test_a_session_whose_id_is_known_is_still_not_theirs(
    mesh: Mesh, scene: Scene, role: Role
) -> None:
    own = mesh.certified(role)
    async with mesh.unharmed():
        for node in mesh.nodes:
            for what, (method, path, fields, body) in of_the_session(scene, node).items():
                status, answer = await mesh.ask_plane(node, method, path, own, fields, body)
                said = Said(status, reason_of(answer))
                assert said == Said(403, "SESSION_OF_OTHERS"), (node, what, answer)
    await fill(mesh, mesh.certified(Role.GATEWAY, "front"), scene.granted)


async def test_a_grant_that_was_seen_opens_no_session_that_has_ended(mesh: Mesh) -> None:
    front = mesh.certified(Role.GATEWAY, "front")
    granted = await mesh.grant()
    path = f"/sessions/{granted.session}"
    assert (await mesh.ask_plane("alpha", "PUT", path, front, granted.headers))[0] == 204
    assert (await mesh.ask_plane("alpha", "DELETE", path, front))[0] == 204
    async with mesh.unharmed():
        for node, seen_by in (("beta", "alpha"), ("alpha", "beta")):
            fields = dict(granted.headers)
            if node == "beta":
                del fields["X-Meshnet-Route"]
                fields["X-Meshnet-Layers"] = "1-2"
            status, answer = await mesh.ask_plane(node, "PUT", path, mesh.joined(seen_by), fields)
            assert Said(status, reason_of(answer)) == Said(403, "GRANT_SPENT")


async def test_sessions_do_not_end_with_somebody_who_poses_as_their_owner(
    mesh: Mesh, scene: Scene
) -> None:
    own = mesh.joined("beta")
    front = PlaneClient(LinkSettings(tls=mesh.certified(Role.GATEWAY, "front")))
    false = PlaneClient(LinkSettings(tls=own))
    address, alpha = mesh.nodes["alpha"], NodeId("alpha")
    here = asyncio.create_task(front.attend(address, scene.owner, node=alpha))
    await fill(mesh, mesh.certified(Role.GATEWAY, "front"), scene.granted)
    posing = asyncio.create_task(false.attend(address, scene.owner, node=alpha))
    async with mesh.unharmed():
        posing.cancel()
        await asyncio.wait({posing}, timeout=BOUND_S)
        await false.close()
    await fill(mesh, mesh.certified(Role.GATEWAY, "front"), scene.granted)
    assert not here.done()
    here.cancel()
    await asyncio.wait({here}, timeout=BOUND_S)
    await front.close()
