"""The text of a join token: one line, with all that is needed to reach a mesh safely (pure).

``mj1.PUBLIC.SECRET.PIN@HOST:PORT[,HOST:PORT...]``: the part that operators see in lists, the
secret, SHA-256 of the authority's public key (base64url), and where replicas of the control
plane serve the JSON face over HTTPS.
"""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from typing import Final

__all__ = ["PUBLIC_PART", "SECRET_PART", "JoinText", "parse_join_text"]

PUBLIC_PART: Final = re.compile(r"[a-z0-9]{10}")
SECRET_PART: Final = re.compile(r"[A-Za-z0-9_-]{22}")

MAX_CHARS: Final = 1024
_PREFIX: Final = "mj1"
_PIN: Final = re.compile(r"[A-Za-z0-9_-]{43}")
_ADDRESS: Final = re.compile(
    r"(?:[A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})"
)


@dataclass(frozen=True, slots=True)
class JoinText:
    """What a join token says.

    Attributes:
        public: names the token.
        secret: proves that its holder may join.
        ca_spki_sha256: of the authority's public key, in hexadecimal.
        addresses: ``host:port`` of replicas, at least one.
    """

    public: str
    secret: str = field(repr=False)
    ca_spki_sha256: str
    addresses: tuple[str, ...]

    def text(self) -> str:
        """Write the token, secret and all, with as many addresses as fit a token."""
        pin = base64.urlsafe_b64encode(bytes.fromhex(self.ca_spki_sha256)).decode().rstrip("=")
        head = f"{_PREFIX}.{self.public}.{self.secret}.{pin}@"
        kept = list(self.addresses)
        while len(head) + len(",".join(kept)) > MAX_CHARS:
            kept.pop()
        return head + ",".join(kept)

    @property
    def credential(self) -> str:
        """What the control plane is sent: ``PUBLIC.SECRET``."""
        return f"{self.public}.{self.secret}"


def parse_join_text(text: str) -> JoinText:
    """Read a join token.

    Raises:
        ValueError: it is none, with the part at fault; never with the secret.
    """
    text = text.strip()
    if len(text) > MAX_CHARS:
        raise ValueError(f"join token of {len(text)} characters: expected at most {MAX_CHARS}")
    head, at, tail = text.partition("@")
    parts = head.split(".")
    if not at or len(parts) != 4 or parts[0] != _PREFIX:
        raise ValueError(
            "not a join token: expected mj1.PUBLIC.SECRET.PIN@HOST:PORT, as "
            "`meshnet token create` prints it"
        )
    _, public, secret, pin = parts
    if PUBLIC_PART.fullmatch(public) is None:
        raise ValueError(
            f"join token with a public part of {len(public)} characters: expected 10 of a-z0-9"
        )
    if SECRET_PART.fullmatch(secret) is None:
        raise ValueError(
            f"join token {public} with a secret of {len(secret)} characters: expected 22 of "
            "A-Za-z0-9_-"
        )
    if _PIN.fullmatch(pin) is None:
        raise ValueError(
            f"join token {public} with a pin of {len(pin)} characters: expected 43 of A-Za-z0-9_-"
        )
    addresses = tuple(tail.split(","))
    for address in addresses:
        found = _ADDRESS.fullmatch(address)
        if found is None or not 0 < int(found[1]) < 65536:
            raise ValueError(f"join token {public}: address {address[:100]!r}: expected HOST:PORT")
    return JoinText(public, secret, base64.urlsafe_b64decode(pin + "=").hex(), addresses)
