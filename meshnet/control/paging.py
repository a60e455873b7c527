"""Pages of a list: opaque tokens that are bound to the request's filters."""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Sequence
from typing import Final, TypeVar

from google.protobuf.message import Message

from meshnet.control.validate import invalid

__all__ = ["page_of"]

DEFAULT_SIZE: Final = 100
MAX_SIZE: Final = 1000
_SEAL_BYTES: Final = 8

T = TypeVar("T")


def page_of(request: Message, items: Sequence[tuple[str, T]]) -> tuple[list[T], str]:
    """Cut the page that `request` asks for; gives it and the token of the next one.

    Args:
        request: has ``page_size`` and ``page_token``; its other fields are filters.
        items: all (key, item), in order of key; the token names the last key given, so
            that items which come and go between pages shift nothing.

    Raises:
        MeshError: INVALID_ARGUMENT, for a negative size or a token of another request.
    """
    size: int = getattr(request, "page_size", 0)
    if size < 0:
        raise invalid("page_size", f"{size}: expected 0 or more")
    size = min(size or DEFAULT_SIZE, MAX_SIZE)
    after = _unpack(request)
    rest = [(key, item) for key, item in items if after is None or key > after]
    page = rest[:size]
    token = _pack(request, page[-1][0]) if len(rest) > size else ""
    return [item for _, item in page], token


def _seal(request: Message) -> bytes:
    filters = type(request)()
    filters.CopyFrom(request)
    filters.ClearField("page_size")
    filters.ClearField("page_token")
    return hashlib.sha256(filters.SerializeToString(deterministic=True)).digest()[:_SEAL_BYTES]


def _pack(request: Message, key: str) -> str:
    return base64.urlsafe_b64encode(_seal(request) + key.encode()).decode().rstrip("=")


def _unpack(request: Message) -> str | None:
    token: str = getattr(request, "page_token", "")
    if not token:
        return None
    try:
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        key = raw[_SEAL_BYTES:].decode()
    except (binascii.Error, ValueError):
        raw, key = b"", ""
    if raw[:_SEAL_BYTES] != _seal(request):
        raise invalid(
            "page_token", "not a token of this list with these filters: begin without one"
        )
    return key
