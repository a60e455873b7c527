"""Errors as OpenAI's clients know them."""

from __future__ import annotations

import json
import math
from typing import Any, Final

from aiohttp import web

from meshnet.errors import Code, MeshError, RouteError

__all__ = [
    "bad_request",
    "error_body",
    "error_headers",
    "error_response",
    "shown",
    "upstream_error",
]

_SHOWN_CHARS: Final = 80


def bad_request(message: str, param: str | None, code: str = "invalid_value") -> MeshError:
    """Make the error for a request that cannot be served as it stands (HTTP 400).

    Args:
        message: what is wrong and what was expected.
        param: path of the field, as ``messages[0].content``.
        code: OpenAI's machine-readable word.
    """
    return MeshError(Code.INVALID_ARGUMENT, message, field=param, reason=code.upper())


def upstream_error(error: MeshError) -> MeshError:
    """Give the error that a client gets for one from the pipeline.

    A node's refusal (a position gap, a lost session) is not the client's fault: it
    becomes 502, where the client's own faults keep their 4xx.
    """
    status = error.code.http_status
    if status >= 500 or status == 429 or isinstance(error, RouteError):
        return error
    return MeshError(Code.NEXT_HOP_FAILED, error.message, reason=error.reason or error.code.name)


def error_body(error: MeshError) -> dict[str, Any]:
    """Give the JSON object of an error answer, or of the last event of a broken stream."""
    word = error.reason or error.code.name
    return {
        "error": {
            "message": error.message,
            "type": _error_type(error.code.http_status),
            "param": error.field,
            "code": word.lower(),
        }
    }


def error_headers(error: MeshError) -> dict[str, str]:
    """Give the header fields that go with an error answer."""
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if error.code is Code.UNAUTHENTICATED:
        headers["WWW-Authenticate"] = "Bearer"
    return headers


def error_response(error: MeshError) -> web.Response:
    """Make the error answer."""
    response = web.json_response(
        error_body(error), status=error.code.http_status, headers=error_headers(error)
    )
    if error.code is Code.REQUEST_TIMEOUT:
        response.force_close()  # what else comes of the request would be taken for the next one
    return response


def shown(value: object) -> str:
    """Write a value of a request for a message, cut to a line's length."""
    text = ""
    for piece in json.JSONEncoder().iterencode(value):
        text += piece[: _SHOWN_CHARS + 1]
        if len(text) > _SHOWN_CHARS:
            return text[: _SHOWN_CHARS - 3] + "..."
    return text


def _error_type(status: int) -> str:
    named = {403: "permission_error", 429: "rate_limit_error"}
    return named.get(status, "server_error" if status >= 500 else "invalid_request_error")
