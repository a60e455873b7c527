"""Text that lets somebody in: route grants (`meshnet.grants`) and join tokens (`meshnet.join`).

The first byte chooses which, the rest is the text.
"""

from __future__ import annotations

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from meshnet.errors import MeshError
from meshnet.grammar import parse_route
from meshnet.grants import Grant, GrantKey, sign, verify
from meshnet.join import parse_join_text
from meshnet.topology import SessionId
from tests.fuzz.targets.errors import check_error

NOW = 1_800_000_000.0
PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEY = GrantKey.of(PRIVATE.public_key().public_bytes_raw(), int(NOW) + 3600)
GRANT = Grant(
    "0" * 32,
    SessionId("8d7f2f0a-0000-4000-8000-000000000001"),
    parse_route("a@10.0.0.2:7080/0-4,b@10.0.0.3:7080/4-8"),
    (1, 2),
    int(NOW) + 60,
)
TOKEN = sign(GRANT, PRIVATE, KEY.key_id)


def check(data: bytes) -> None:
    text = data[1:].decode("latin-1")
    if data[:1] == b"j":
        try:
            joined = parse_join_text(text)
        except ValueError:
            return
        assert parse_join_text(joined.text()) == joined
        return
    try:
        grant = verify(text, {KEY.key_id: KEY}, NOW)
    except MeshError as error:
        check_error(error)
    else:
        assert grant == GRANT, "a grant that nobody signed"
