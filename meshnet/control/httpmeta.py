"""Metadata, deadlines and errors between HTTP and gRPC (pure).

Source: grpc.io PROTOCOL-HTTP2 (Timeout, custom metadata); google/rpc/status.proto.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from google.protobuf import descriptor_pool, json_format
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from meshnet.control.status import code_of, to_status
from meshnet.control.validate import invalid
from meshnet.errors import Code, MeshError

__all__ = [
    "INTERNAL_PREFIX",
    "Metadata",
    "check_origin",
    "error_answer",
    "headers_out",
    "mesh_error_answer",
    "metadata_in",
    "status_json",
    "timeout_in",
    "to_json",
]

INTERNAL_PREFIX: Final = "meshnet-internal-"
"""Metadata keys that only the server itself may set."""

_PREFIX: Final = "grpc-metadata-"
_TIMEOUT = re.compile(r"(?P<count>[0-9]{1,8})(?P<unit>[HMSmun])")
_UNITS: Final = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_KEY = re.compile(r"[0-9a-z_.-]{1,128}")
_VALUE = re.compile(r"[\x20-\x7e]{0,8192}")
_OWN_KEYS: Final = ("content-type", "user-agent", "te")

Metadata = tuple[tuple[str, str | bytes], ...]


def check_origin(method: str, headers: Mapping[str, str]) -> None:
    """Refuse what a page of another site makes a browser send, if it could change anything.

    Programs other than browsers send neither of the headers that tell.

    Args:
        method: of the request.
        headers: with names in any case.

    Raises:
        MeshError: PERMISSION_DENIED (CROSS_ORIGIN).

    Source: W3C Fetch Metadata Request Headers; RFC 6454 for browsers without them.
    """
    if method in ("GET", "HEAD", "OPTIONS"):
        return
    site, origin = headers.get("Sec-Fetch-Site"), headers.get("Origin")
    if site is not None:
        is_other = site not in ("same-origin", "none")
    else:
        is_other = origin is not None and origin.partition("://")[2] != headers.get("Host")
    if is_other:
        raise MeshError(
            Code.PERMISSION_DENIED,
            f"a page of another site, {(origin or site or '')[:200]!r}, may not change the mesh",
            field="Origin",
            reason="CROSS_ORIGIN",
        )


def metadata_in(headers: Iterable[tuple[str, str]]) -> Metadata:
    """Give the metadata of a request: ``Grpc-Metadata-*`` without its prefix, and Authorization.

    Raises:
        MeshError: INVALID_ARGUMENT, a name or value that metadata cannot have.
    """
    metadata: list[tuple[str, str | bytes]] = []
    for name, value in headers:
        key = name.lower()
        if key != "authorization" and not key.startswith(_PREFIX):
            continue
        key = key.removeprefix(_PREFIX)
        if _is_reserved(key):
            continue
        if _KEY.fullmatch(key) is None:
            raise invalid(name, "expected letters, digits, '_', '.' and '-' after Grpc-Metadata-")
        if key.endswith("-bin"):
            try:
                padded = value + "=" * (-len(value) % 4)
                metadata.append((key, base64.b64decode(padded, validate=True)))
            except (binascii.Error, ValueError):
                raise invalid(name, "expected base64") from None
        elif _VALUE.fullmatch(value) is None:
            raise invalid(name, "expected printable ASCII")
        else:
            metadata.append((key, value))
    return tuple(metadata)


def headers_out(prefix: str, metadata: object) -> list[tuple[str, str]]:
    """Give a call's metadata as header fields with `prefix`; the protocol's own are left out."""
    headers = []
    pairs: Any = metadata or ()
    for key, value in pairs:
        if _is_reserved(key):
            continue
        text = base64.b64encode(value).decode() if isinstance(value, bytes) else value
        headers.append((f"{prefix}{key}", text))
    return headers


def timeout_in(text: str | None, default_s: float | None) -> float | None:
    """Read Grpc-Timeout as seconds.

    Raises:
        MeshError: INVALID_ARGUMENT.
    """
    if text is None:
        return default_s
    match = _TIMEOUT.fullmatch(text)
    if match is None:
        raise invalid("Grpc-Timeout", f"{text[:50]!r}: expected 1 to 8 digits and one of HMSmun")
    return int(match["count"]) * _UNITS[match["unit"]]


def to_json(message: Any) -> Any:
    """Give a message as JSON values: lowerCamelCase, 64-bit integers as strings, defaults too."""
    return json_format.MessageToDict(message, always_print_fields_with_no_presence=True)


def status_json(status: status_pb2.Status) -> dict[str, Any]:
    """Give a Status as JSON values; details of unknown types stay opaque, in base64."""
    return {
        "code": status.code,
        "message": status.message,
        "details": [_detail(detail) for detail in status.details],
    }


def error_answer(
    status: status_pb2.Status, http_status: int | None = None
) -> tuple[int, list[tuple[str, str]], bytes]:
    """Give (HTTP status, header fields, body) for a Status.

    Args:
        status: of the call.
        http_status: where HTTP has a finer one than the code's own.
    """
    number = http_status or code_of(status.code).http_status
    headers = [("Content-Type", "application/json")]
    if number == 401:
        headers.append(("WWW-Authenticate", "Bearer"))
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        if detail.Is(retry.DESCRIPTOR) and detail.Unpack(retry):
            seconds = math.ceil(retry.retry_delay.ToMilliseconds() / 1000)
            headers.append(("Retry-After", str(max(1, seconds))))
    return number, headers, json.dumps(status_json(status), ensure_ascii=False).encode()


def mesh_error_answer(error: MeshError) -> tuple[int, list[tuple[str, str]], bytes]:
    """Give (HTTP status, header fields, body) for an error found before any call was made."""
    return error_answer(to_status(error), error.code.http_status)


def _is_reserved(key: str) -> bool:
    return key.startswith(("grpc-", ":", INTERNAL_PREFIX)) or key in _OWN_KEYS


def _detail(detail: AnyMessage) -> dict[str, Any]:
    try:
        descriptor_pool.Default().FindMessageTypeByName(detail.TypeName())
        printed: dict[str, Any] = json_format.MessageToDict(detail)
    except (KeyError, TypeError, DecodeError, json_format.Error, ValueError):
        value = base64.b64encode(detail.value).decode()
        return {"@type": detail.type_url, "value": value}
    return printed
