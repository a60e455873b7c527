"""API keys of gateway clients: made, kept as hashes, listed, revoked.

A key's text is ``mk-ID-SECRET``: a public id of 12 letters and digits, and 43 characters that
stand for 256 random bits. What is kept is a hash of the text.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
import string
from dataclasses import dataclass
from typing import Any, Final

from meshnet.control.documents import Document, Documents, put_if_unchanged
from meshnet.control.hashed import hash_secret, is_secret
from meshnet.errors import Code, ConfigError, MeshError
from meshnet.identity import NAME

__all__ = [
    "MAX_LIMIT",
    "ApiKey",
    "create_api_key",
    "list_api_keys",
    "matches",
    "public_id",
    "revoke_api_key",
]

MAX_LIMIT: Final = 1_000_000
"""Of requests a minute and of concurrent streams."""

_KIND: Final = "api-keys"
_ID_LETTERS: Final = string.ascii_lowercase + string.digits
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_TEXT: Final = re.compile(r"mk-([a-z0-9]{12})-[A-Za-z0-9_-]{43}")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ApiKey:
    """What is kept of a key.

    Attributes:
        name: of its holder, as an operator chose it; unique among the keys that are valid.
        id: public part of the text.
        hashed: SHA-256 of the whole text, in hexadecimal.
        created_s: seconds since the epoch.
        requests_per_minute: completions that each gateway starts for it; None for any number.
        streams: completions that each gateway has in progress for it; None for any number.
    """

    name: str
    id: str
    hashed: str
    created_s: float
    requests_per_minute: int | None = None
    streams: int | None = None


def public_id(text: str) -> str | None:
    """Give the id in a key's text; None for what is no key."""
    found = _TEXT.fullmatch(text)
    return None if found is None else found[1]


def matches(key: ApiKey, text: str) -> bool:
    """Tell whether `text` is the key's; takes the same time whatever differs."""
    return is_secret(text, key.hashed)


async def create_api_key(
    documents: Documents,
    name: str,
    *,
    now_s: float,
    requests_per_minute: int | None = None,
    streams: int | None = None,
) -> tuple[ApiKey, str]:
    """Make a key; gives it and its text, which is nowhere else.

    Args:
        documents: where keys are kept.
        name: of its holder: 1 to 63 of ``a-z0-9.-``, a letter or digit at both ends.
        now_s: seconds since the epoch.
        requests_per_minute: see `ApiKey`.
        streams: see `ApiKey`.

    Raises:
        ConfigError: a name or limit that cannot be used.
        MeshError: ALREADY_EXISTS, there is a key of that name; UNAVAILABLE.
    """
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"name {name[:80]!r}: expected 1 to 63 of a-z, 0-9, . and -, with a letter or digit"
            " at both ends",
            field="NAME",
        )
    for flag, limit in (
        ("--requests-per-minute", requests_per_minute),
        ("--streams", streams),
    ):
        if limit is not None and not 1 <= limit <= MAX_LIMIT:
            raise ConfigError(f"{flag} {limit}: expected 1 to {MAX_LIMIT}", field=flag)
    public = "".join(secrets.choice(_ID_LETTERS) for _ in range(12))
    text = f"mk-{public}-{secrets.token_urlsafe(32)}"
    key = ApiKey(name, public, hash_secret(text), now_s, requests_per_minute, streams)
    if not await put_if_unchanged(documents, _KIND, name, _write(key), 0):
        raise MeshError(
            Code.ALREADY_EXISTS,
            f"there is a key named {name!r}: revoke it first, or choose another name",
            field="NAME",
        )
    return key, text


async def list_api_keys(documents: Documents) -> list[ApiKey]:
    """Give all keys that are valid, in order of name.

    A record that cannot be read is logged and is no key.

    Raises:
        MeshError: UNAVAILABLE.
    """
    found = []
    for document in await documents.list(_KIND):
        try:
            found.append(_read(document))
        except (ValueError, KeyError, TypeError):
            _log.warning("the record of API key %r cannot be read: it opens nothing", document.key)
    return found


async def revoke_api_key(documents: Documents, name: str) -> None:
    """End a key.

    Raises:
        MeshError: NOT_FOUND; UNAVAILABLE, it may be revoked nevertheless.
    """
    if not NAME.fullmatch(name) or not await documents.delete(_KIND, name):
        raise MeshError(Code.NOT_FOUND, f"there is no key named {name[:80]!r}", field="NAME")


def _write(key: ApiKey) -> bytes:
    return json.dumps(
        {
            "id": key.id,
            "sha256": key.hashed,
            "created": key.created_s,
            "requests_per_minute": key.requests_per_minute,
            "streams": key.streams,
        }
    ).encode()


def _read(document: Document) -> ApiKey:
    """Read a record.

    Raises:
        ValueError: or KeyError or TypeError, it is none.
    """
    record = json.loads(document.value)
    key = ApiKey(
        name=document.key,
        id=str(record["id"]),
        hashed=str(record["sha256"]),
        created_s=float(record["created"]),
        requests_per_minute=_limit(record["requests_per_minute"]),
        streams=_limit(record["streams"]),
    )
    if not _SHA256.fullmatch(key.hashed):
        raise ValueError("no SHA-256 hash")
    return key


def _limit(value: Any) -> int | None:
    return None if value is None else int(value)
