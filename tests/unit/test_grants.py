"""Route grants: what is signed is read back, and nothing else is taken."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import Code, MeshError
from meshnet.grammar import MAX_GRANT_CHARS, parse_route
from meshnet.grants import Grant, GrantKey, key_id_of, sign, verify
from meshnet.topology import Hop, LayerRange, NodeId, SessionId
from meshnet.wire import ChunkHeader, pack_chunk, unpack_chunk

NOW = 1_800_000_000.0
SESSION = SessionId("8d7f2f0a-5c1e-4b7a-9a53-0d7c6f1e2b34")
OTHER = SessionId("8d7f2f0a-5c1e-4b7a-9a53-0d7c6f1e2b35")
ROUTE = parse_route("a@10.0.0.1:7080/0-10,b@[fd00::2]:7080/10-20,c@host-c:7080/20-30")
GRANT = Grant("0123456789ab", SESSION, ROUTE, (11, 22, 33), int(NOW) + 60)
PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEY = GrantKey(PRIVATE.public_key(), int(NOW) + 3600)
KEYS = {KEY.key_id: KEY}
TOKEN = sign(GRANT, PRIVATE, KEY.key_id)


def encoded(value: object) -> str:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(text).decode().rstrip("=")


def header(**changes: object) -> dict[str, object]:
    made = {"alg": "EdDSA", "kid": KEY.key_id, "typ": "meshnet-grant", **changes}
    return {name: value for name, value in made.items() if value is not None}


def with_header(**changes: object) -> str:
    """Give the grant with another header and the signature of the first."""
    return ".".join((encoded(header(**changes)), *TOKEN.split(".")[1:]))


def signed(claims: dict[str, object]) -> str:
    payload = json.dumps(claims).encode()
    headers = {"kid": KEY.key_id, "typ": "meshnet-grant"}
    return jwt.PyJWS(algorithms=["EdDSA"]).encode(payload, PRIVATE, "EdDSA", headers)


def refusal(token: str, now: float = NOW) -> MeshError:
    with pytest.raises(MeshError) as caught:
        verify(token, KEYS, now)
    error = caught.value
    assert error.code is Code.PERMISSION_DENIED
    assert error.field == "X-Meshnet-Grant"
    assert len(token) < 9 or token not in error.message
    assert "expected" in error.message or "not valid" in error.message
    return error


def test_a_grant_is_read_back_as_it_was_signed() -> None:
    assert verify(TOKEN, KEYS, NOW) == GRANT
    assert verify(TOKEN, KEYS, GRANT.expires_s + 4.9) == GRANT
    assert key_id_of(TOKEN) == KEY.key_id
    assert GrantKey.of(KEY.public_bytes, KEY.expires_s) == KEY
    assert TOKEN not in repr(GRANT)


def test_a_grant_that_has_expired() -> None:
    assert refusal(TOKEN, GRANT.expires_s + 5.1).reason == "GRANT_EXPIRED"


def test_a_key_that_is_not_known_or_has_expired() -> None:
    other = Ed25519PrivateKey.generate()
    unknown = sign(GRANT, other, GrantKey(other.public_key(), 0).key_id)
    assert refusal(unknown).reason == "GRANT_KEY_UNKNOWN"
    late = sign(replace(GRANT, expires_s=KEY.expires_s + 900), PRIVATE, KEY.key_id)
    assert refusal(late, KEY.expires_s + 6.0).reason == "GRANT_KEY_UNKNOWN"


CLAIMS = json.loads(base64.urlsafe_b64decode(TOKEN.split(".")[1] + "=="))


@pytest.mark.parametrize(
    "token",
    [
        pytest.param(sign(GRANT, Ed25519PrivateKey.generate(), KEY.key_id), id="another key's"),
        pytest.param(with_header(alg="none"), id="alg none"),
        pytest.param(with_header(alg="none").rpartition(".")[0] + ".", id="no signature"),
        pytest.param(with_header(alg="HS256"), id="alg HS256"),
        pytest.param(with_header(alg=None), id="no alg"),
        pytest.param(with_header(kid=None), id="no kid"),
        pytest.param(with_header(kid=7), id="kid is a number"),
        pytest.param(with_header(kid="../../etc/passwd"), id="kid is a path"),
        pytest.param(with_header(kid="0" * 17), id="kid too long"),
        pytest.param(with_header(typ="JWT"), id="another type"),
        pytest.param(with_header(crit=["b64"], b64=False), id="crit and b64"),
        pytest.param(with_header(jwk={"kty": "OKP"}), id="brings its key"),
        pytest.param(with_header(pad="x" * 400), id="long header"),
        pytest.param(encoded(b"[" * 100) + "..", id="deep header"),
        pytest.param(encoded([1]) + "..", id="header is a list"),
        pytest.param(encoded(b"\xff") + "..", id="header is not UTF-8"),
        pytest.param("x", id="one segment"),
        pytest.param(TOKEN.rpartition(".")[0], id="two segments"),
        pytest.param(TOKEN + ".x", id="four segments"),
        pytest.param(TOKEN[:-8], id="cut"),
        pytest.param(signed({**CLAIMS, "hops": "nonsense"}), id="signed: hops"),
        pytest.param(signed({**CLAIMS, "starts": [1]}), id="signed: starts"),
        pytest.param(signed({**CLAIMS, "exp": None}), id="signed: exp"),
        pytest.param(signed({**CLAIMS, "sub": "x"}), id="signed: sub"),
        pytest.param(signed({**CLAIMS, "jti": ""}), id="signed: jti"),
        pytest.param(signed({}), id="signed: nothing"),
    ],
)
def test_what_is_no_grant_of_this_key(token: str) -> None:
    assert refusal(token).reason == "GRANT_INVALID"


@given(st.integers(0, len(TOKEN) - 87), st.characters(codec="ascii", categories=["L", "N"]))
def test_no_character_that_is_signed_can_be_another(at: int, character: str) -> None:
    if TOKEN[at] in (character, "."):
        return
    with pytest.raises(MeshError) as caught:
        verify(TOKEN[:at] + character + TOKEN[at + 1 :], KEYS, NOW)
    assert caught.value.reason in ("GRANT_INVALID", "GRANT_KEY_UNKNOWN")


@given(st.text(alphabet="abcXYZ0189_-.", max_size=300))
def test_no_text_is_anything_but_refused(text: str) -> None:
    for token in (text, f"{TOKEN.split('.')[0]}.{text}"):
        with pytest.raises(MeshError) as caught:
            verify(token, KEYS, NOW)
        assert caught.value.code is Code.PERMISSION_DENIED


nodes = st.lists(st.from_regex(r"[a-z][a-z0-9-]{0,12}", fullmatch=True), unique=True, max_size=6)


@given(nodes.filter(bool), st.data())
def test_any_route_is_read_back_and_serves_each_of_its_hops(names: list[str], data) -> None:
    route = tuple(
        Hop(NodeId(name), f"10.0.0.{index}:7080", LayerRange(index, index + 1))
        for index, name in enumerate(names)
    )
    starts = tuple(data.draw(st.integers(0, 2**64 - 1)) for _ in names)
    grant = verify(
        sign(replace(GRANT, route=route, incarnations=starts), PRIVATE, KEY.key_id), KEYS, NOW
    )
    assert (grant.route, grant.incarnations) == (route, starts)
    for at, hop in enumerate(route):
        for end in range(at + 1, len(route) + 1):
            grant.check(SESSION, hop.node, starts[at], hop.layers, route[at + 1 : end])
        grant.check_takers(SESSION, route[at:])


A, B, C = ROUTE
ELSEWHERE = Hop(C.node, "10.9.9.9:22", C.layers)


@pytest.mark.parametrize(
    ("session", "node", "start", "layers", "route"),
    [
        pytest.param(OTHER, A.node, 11, A.layers, (B, C), id="session"),
        pytest.param(SESSION, NodeId("d"), 11, A.layers, (B, C), id="node"),
        pytest.param(SESSION, A.node, 12, A.layers, (B, C), id="start of the node"),
        pytest.param(SESSION, A.node, 11, LayerRange(0, 9), (B, C), id="layers"),
        pytest.param(SESSION, A.node, 11, A.layers, (B, ELSEWHERE), id="address"),
        pytest.param(SESSION, A.node, 11, A.layers, (C,), id="a hop left out"),
        pytest.param(SESSION, B.node, 22, B.layers, (B, C), id="itself again"),
        pytest.param(SESSION, C.node, 33, C.layers, (C,), id="past the end"),
        pytest.param(
            SESSION, A.node, 11, A.layers, (Hop(B.node, B.address, LayerRange(10, 30)),), id="more"
        ),
    ],
)
def test_what_a_grant_is_not_for(session, node, start, layers, route) -> None:
    with pytest.raises(MeshError) as caught:
        GRANT.check(session, node, start, layers, route)
    assert caught.value.reason == "GRANT_MISMATCH"
    assert "expected" in caught.value.message
    assert SESSION not in caught.value.message


@pytest.mark.parametrize("hops", [(ELSEWHERE,), (A, C), (C, B), (B, C, C)])
def test_who_may_not_take_a_session_over(hops) -> None:
    with pytest.raises(MeshError) as caught:
        GRANT.check_takers(SESSION, hops)
    assert caught.value.reason == "GRANT_MISMATCH"
    with pytest.raises(MeshError):
        GRANT.check_takers(OTHER, (B,))


def test_a_route_that_is_too_long_for_a_grant_is_not_signed() -> None:
    hops = tuple(Hop(NodeId(f"n{i}"), f"{'h' * 200}:7080", LayerRange(i, i + 1)) for i in range(64))
    with pytest.raises(MeshError) as caught:
        sign(replace(GRANT, route=hops, incarnations=(1,) * 64), PRIVATE, KEY.key_id)
    assert caught.value.reason == "ROUTE_TOO_LONG"


def test_64_hops_of_usual_names_fit() -> None:
    hops = tuple(
        Hop(NodeId(f"node-{i}"), f"192.168.100.{i}:17080", LayerRange(i, i + 1)) for i in range(64)
    )
    token = sign(replace(GRANT, route=hops, incarnations=(2**63,) * 64), PRIVATE, KEY.key_id)
    assert len(token) <= MAX_GRANT_CHARS


def test_the_header_field() -> None:
    chunk = ChunkHeader((1, 1, 8), "bfloat16", SESSION, position=3, grant=TOKEN)
    fields = pack_chunk(chunk)
    assert unpack_chunk(fields) == chunk
    for wrong in ("", "a b", "é", "x" * (MAX_GRANT_CHARS + 1), "a,b"):
        changed = [(n, wrong if n == "X-Meshnet-Grant" else v) for n, v in fields]
        with pytest.raises(MeshError) as caught:
            unpack_chunk(changed)
        assert caught.value.field == "X-Meshnet-Grant"
        assert caught.value.code is Code.INVALID_ARGUMENT
