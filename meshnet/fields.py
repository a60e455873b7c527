"""The header fields of a message, by name: collected once, read one by one (pure).

Source: proto/WIRE.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Final, TypeVar

from meshnet.dtypes import numpy_dtype
from meshnet.errors import Code, WireError
from meshnet.grammar import parse_count, parse_positive, parse_session
from meshnet.topology import SessionId

__all__ = [
    "OCTET_STREAM",
    "WIRE_VERSION",
    "Headers",
    "check_media_type",
    "check_size",
    "check_version",
    "collect",
    "fault",
    "identity",
    "optional",
    "required",
    "tensor_bytes",
]

WIRE_VERSION: Final = 2
OCTET_STREAM: Final = "application/octet-stream"
_IMPOSSIBLE_BYTES: Final = 1 << 40  # no setting reaches it: a shape's fault, not a limit's

Headers = Iterable[tuple[str, str]]
"""Header fields in order, names in any case; a name that repeats is kept as often as it came."""

_T = TypeVar("_T")


def collect(headers: Headers) -> dict[str, str]:
    """Lower the names of the header fields that this module reads; a repeated one is refused."""
    fields: dict[str, str] = {}
    for name, value in headers:
        key = name.lower()
        if key not in _KNOWN:
            continue
        if key in fields:
            raise WireError(f"{_KNOWN[key]} is given more than once", field=_KNOWN[key])
        fields[key] = value.strip(" \t")
    return fields


def required(fields: dict[str, str], name: str, parse: Callable[[str], _T]) -> _T:
    """Read a field that must be given.

    Raises:
        WireError: it is missing, or `parse` refuses it.
    """
    value = optional(fields, name, parse)
    if value is None:
        raise WireError(f"{name} is missing", field=name)
    return value


def optional(fields: dict[str, str], name: str, parse: Callable[[str], _T]) -> _T | None:
    """Read a field, or give None without one.

    Raises:
        WireError: `parse` refuses it.
    """
    text = fields.get(name.lower())
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise fault(name, text, str(error)) from None


def fault(name: str, value: str, expected: str) -> WireError:
    """Make the error for a field's value; a long value is cut."""
    shown = value if len(value) <= 80 else value[:77] + "..."
    return WireError(f"{name}: {shown!r}; expected {expected}", field=name)


def check_version(fields: dict[str, str]) -> None:
    """Refuse another version of the wire than the one spoken here."""
    version = fields.get("x-meshnet-wire", str(WIRE_VERSION))
    if version != str(WIRE_VERSION):
        raise fault("X-Meshnet-Wire", version, f"one of the versions spoken here: {WIRE_VERSION}")


def check_media_type(fields: dict[str, str]) -> None:
    """Refuse a body that is not raw bytes; the retired JSON body is named."""
    media_type = fields.get("content-type", OCTET_STREAM).partition(";")[0].strip().lower()
    if media_type == "application/json":
        raise WireError(
            "Content-Type: application/json; the base64 JSON body is retired, expected"
            f" {OCTET_STREAM} with the tensor's raw bytes and X-Meshnet-* headers (proto/WIRE.md)",
            field="Content-Type",
        )
    if media_type != OCTET_STREAM:
        raise WireError(
            f"Content-Type: {media_type!r}; expected {OCTET_STREAM}",
            field="Content-Type",
            code=Code.UNSUPPORTED_MEDIA_TYPE,
        )


def check_size(shape: tuple[int, ...], dtype: str, max_chunk_bytes: int) -> None:
    """Refuse a tensor that is too large, before anything is allocated for it."""
    size = tensor_bytes(shape, dtype)
    if size >= _IMPOSSIBLE_BYTES:
        raise WireError(
            f"X-Meshnet-Shape: {','.join(map(str, shape))} of {dtype} is {size} bytes;"
            f" expected fewer than {_IMPOSSIBLE_BYTES}",
            field="X-Meshnet-Shape",
        )
    if size > max_chunk_bytes:
        raise WireError(
            f"X-Meshnet-Shape: {','.join(map(str, shape))} of {dtype} is {size} bytes;"
            f" expected at most {max_chunk_bytes} (max_chunk_bytes)",
            field="X-Meshnet-Shape",
            code=Code.TOO_LARGE,
        )


def tensor_bytes(shape: tuple[int, ...], dtype: str) -> int:
    """Give the bytes of a tensor, in unbounded integers."""
    return numpy_dtype(dtype).itemsize * math.prod(shape)


def identity(fields: dict[str, str]) -> tuple[SessionId, int, int]:
    """Read whose chunk it is, and which of how many."""
    session = required(fields, "X-Meshnet-Session", parse_session)
    index = required(fields, "X-Meshnet-Chunk-Index", parse_count)
    total = required(fields, "X-Meshnet-Chunk-Total", parse_positive)
    if index >= total:
        raise fault("X-Meshnet-Chunk-Index", str(index), f"less than the total, {total}")
    return session, index, total


_KNOWN: Final = {
    name.lower(): name
    for name in (
        "Content-Type",
        "X-Meshnet-Wire",
        "X-Meshnet-Shape",
        "X-Meshnet-Dtype",
        "X-Meshnet-Session",
        "X-Meshnet-Chunk-Index",
        "X-Meshnet-Chunk-Total",
        "X-Meshnet-Encoding",
        "X-Meshnet-Position",
        "X-Meshnet-Layers",
        "X-Meshnet-Phase",
        "X-Meshnet-Want",
        "X-Meshnet-Accept-Encoding",
        "X-Meshnet-Route",
        "X-Meshnet-Max-Tokens",
        "X-Meshnet-Epoch",
        "X-Meshnet-Journal",
        "X-Meshnet-Grant",
        "X-Meshnet-Rebuild",
        "X-Meshnet-Owner",
        "X-Meshnet-Scope",
        "X-Meshnet-Kv",
        "X-Meshnet-Digest",
        "traceparent",
        "Server-Timing",
    )
}
