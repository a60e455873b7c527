"""MeshError as google.rpc.Status with ErrorInfo, BadRequest and RetryInfo, and back.

Source: google/rpc/error_details.proto.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from meshnet.errors import Code, LeaseExpiredError, MeshError, RouteError

__all__ = ["DETAILS_KEY", "ERROR_DOMAIN", "code_of", "from_status", "status_of", "to_status"]

ERROR_DOMAIN: Final = "meshnet.dev"
DETAILS_KEY: Final = "grpc-status-details-bin"
"""Trailing metadata that carries the serialized Status."""

_MAX_TEXT: Final = 1000
_ROUTE_REASONS: Final = ("CACHE_FULL", "LAYERS_UNCOVERED", "MODEL_UNKNOWN")
_CODES: Final = {code.grpc_code: code for code in reversed(Code) if not code.value.reason}


def code_of(number: int) -> Code:
    """Give the code of a google.rpc.Code number; UNKNOWN for one that is not defined."""
    return _CODES.get(number, Code.UNKNOWN)


def to_status(error: MeshError) -> status_pb2.Status:
    """Write an error with its reason, field and retry delay as details."""
    message = _clean(error.message)
    status = status_pb2.Status(code=error.code.grpc_code, message=message)
    reason = error.reason or error.code.name
    _add(status, error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN))
    if error.field is not None:
        bad = error_details_pb2.BadRequest()
        bad.field_violations.add(field=_clean(error.field), description=message)
        _add(status, bad)
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromMilliseconds(round(error.retry_after_s * 1000))
        _add(status, retry)
    return status


def status_of(code: int, message: str, metadata: object) -> status_pb2.Status:
    """Read the Status that an ended call carries, or build one from its code and message.

    Args:
        code: number of the call's status code.
        message: its details.
        metadata: trailing metadata: pairs of key and value, or None.
    """
    pairs: Any = metadata or ()
    for key, value in pairs:
        if key == DETAILS_KEY:
            try:
                status = status_pb2.Status.FromString(value)
            except DecodeError:
                continue
            if status.code == code:
                return status
    return status_pb2.Status(code=code, message=message)


def from_status(status: status_pb2.Status) -> MeshError:
    """Read a Status as the error that `to_status` was given, as nearly as it can be told."""
    info = error_details_pb2.ErrorInfo()
    bad = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        for kind in (info, bad, retry):
            try:
                detail.Unpack(kind)
            except DecodeError:
                continue
    code = code_of(status.code)
    reason = info.reason if info.reason not in ("", code.name) else None
    field = bad.field_violations[0].field if bad.field_violations else None
    delay_s = retry.retry_delay.ToMilliseconds() / 1000
    retry_after_s = delay_s if delay_s > 0 else None
    if reason == "LEASE_EXPIRED":
        return LeaseExpiredError(status.message)
    kind_of = RouteError if reason in _ROUTE_REASONS else MeshError
    return kind_of(code, status.message, field=field, reason=reason, retry_after_s=retry_after_s)


def _clean(text: str) -> str:
    """Make text fit for a protobuf string and for metadata, which is limited to 8 KiB."""
    shown = text.encode("utf-8", "backslashreplace").decode()
    return shown if len(shown) <= _MAX_TEXT else f"{shown[: _MAX_TEXT - 1]}…"


def _add(status: status_pb2.Status, detail: Any) -> None:
    status.details.add().Pack(detail)
