"""The JSON face: HTTP requests as gRPC calls, by google.api.http annotations.

Knows no service of meshnet: descriptors and a channel are all it works from.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any, Final

import grpc
from aiohttp import web
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message

from meshnet.control.binding import bind_body, bind_path, bind_query, mask_of, parse_json
from meshnet.control.httpmeta import (
    Metadata,
    check_origin,
    error_answer,
    headers_out,
    mesh_error_answer,
    metadata_in,
    status_json,
    timeout_in,
    to_json,
)
from meshnet.control.httprules import Binding, HttpRules
from meshnet.control.limits import DEFAULT_LIMITS, ControlLimits
from meshnet.control.status import status_of
from meshnet.errors import Code, MeshError

__all__ = ["Transcoder"]

UNARY_TIMEOUT_S: Final = 30.0
_FORM_TYPES: Final = ("application/x-www-form-urlencoded", "multipart/form-data", "text/plain")
"""What a form of any site can send without asking: refused even with an empty body."""

_HTTP_BODY: Final = "google.api.HttpBody"

_log = logging.getLogger(__name__)

Admit = Callable[[web.BaseRequest, str], Awaitable[Metadata]]

Answer = tuple[int, list[tuple[str, str]], bytes]


class Transcoder:
    """Answers HTTP requests by calls on a channel.

    Args:
        channel: to a server that serves `services`.
        services: whose annotated methods are served.
        admit: refuses a request for an RPC, or gives metadata that says who sent it;
            ``Authorization`` goes no further then. None lets all requests pass.
        limits: of bodies.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        services: Iterable[ServiceDescriptor],
        admit: Admit | None = None,
        limits: ControlLimits = DEFAULT_LIMITS,
    ) -> None:
        self._limits = limits
        self._channel = channel
        self._admit = admit
        self._rules = HttpRules(services)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request; faults become Status JSON, never an exception of aiohttp's."""
        try:
            return await self._handle(request)
        except MeshError as error:
            return _response(request, mesh_error_answer(error))
        except grpc.aio.AioRpcError as error:
            return _response(request, _failed(error))

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path, _, query = _target(request.raw_path)
        found = self._rules.find(path)
        if not found:
            raise MeshError(
                Code.NOT_FOUND, f"nothing is served at {path[:200]!r}", reason="PATH_UNKNOWN"
            )
        allowed = {binding.http_method for binding, _ in found} | {"OPTIONS"}
        allowed |= {"HEAD"} if "GET" in allowed else set()
        allow = ("Allow", ", ".join(sorted(allowed)))
        if request.method == "OPTIONS" and not _of_method(found, "OPTIONS"):
            return web.Response(status=204, headers=[allow])
        matching = _of_method(found, request.method)
        if not matching and request.method == "HEAD":
            matching = _of_method(found, "GET")
        if not matching:
            error = MeshError(
                Code.METHOD_NOT_ALLOWED,
                f"{request.method} is not served at {path[:200]!r}: expected {allow[1]}",
            )
            number, headers, body = mesh_error_answer(error)
            return _response(request, (number, [*headers, allow], body))
        binding, values = matching[0]
        check_origin(request.method, request.headers)
        told = () if self._admit is None else await self._admit(request, binding.rpc)
        body = await self._read(request)
        message = _message(request, binding, values, query, body)
        metadata = metadata_in(request.headers.items())
        if self._admit is not None:
            metadata = (*(pair for pair in metadata if pair[0] != "authorization"), *told)
        default_s = None if binding.is_stream else UNARY_TIMEOUT_S
        timeout_s = timeout_in(request.headers.get("Grpc-Timeout"), default_s)
        if not binding.is_stream:
            return await self._unary(request, binding, message, metadata, timeout_s)
        if request.method == "HEAD":
            return web.Response(content_type="application/json")
        return await self._stream(request, binding, message, metadata, timeout_s)

    async def _read(self, request: web.BaseRequest) -> bytes:
        """Read the body, refusing one that is too large before it is all in memory."""
        limits = self._limits
        try:
            async with asyncio.timeout(limits.body_timeout_s):
                return await request.read()
        except web.HTTPRequestEntityTooLarge:
            raise MeshError(
                Code.TOO_LARGE, f"the body is over {limits.max_body_bytes} bytes", field="body"
            ) from None
        except TimeoutError:
            raise MeshError(
                Code.REQUEST_TIMEOUT,
                f"the body did not arrive within {limits.body_timeout_s:g} s",
                field="body",
            ) from None

    async def _unary(
        self,
        request: web.BaseRequest,
        binding: Binding,
        message: Message,
        metadata: Any,
        timeout_s: float | None,
    ) -> web.Response:
        call = self._channel.unary_unary(
            binding.rpc,
            request_serializer=binding.request_type.SerializeToString,
            response_deserializer=binding.response_type.FromString,
        )(message, metadata=metadata, timeout=timeout_s)
        try:
            response: Any = await call
        finally:
            call.cancel()
        if binding.response_type.DESCRIPTOR.full_name == _HTTP_BODY:
            content_type, body = response.content_type or "application/octet-stream", response.data
        else:
            content_type, body = "application/json", _dump(to_json(response))
        headers = [
            ("Content-Type", content_type),
            *headers_out("Grpc-Metadata-", await call.initial_metadata()),
            *headers_out("Grpc-Trailer-", await call.trailing_metadata()),
        ]
        return _response(request, (200, headers, body))

    async def _stream(
        self,
        request: web.BaseRequest,
        binding: Binding,
        message: Message,
        metadata: Any,
        timeout_s: float | None,
    ) -> web.StreamResponse:
        """Stream lines of ``{"result": …}``; an error after the first one is the last line.

        An error before the first message keeps its HTTP status, as if it were no stream.
        """
        call = self._channel.unary_stream(
            binding.rpc,
            request_serializer=binding.request_type.SerializeToString,
            response_deserializer=binding.response_type.FromString,
        )(message, metadata=metadata, timeout=timeout_s)
        messages = aiter(call)
        try:
            first: Any = await anext(messages, None)
            headers = headers_out("Grpc-Metadata-", await call.initial_metadata())
            response = web.StreamResponse(headers=[("Content-Type", "application/json"), *headers])
            await response.prepare(request)
            try:
                following = first
                while following is not None:
                    await response.write(_dump({"result": to_json(following)}) + b"\n")
                    following = await anext(messages, None)
            except grpc.aio.AioRpcError as error:
                status = status_of(
                    error.code().value[0], error.details() or "", error.trailing_metadata()
                )
                await response.write(_dump({"error": status_json(status)}) + b"\n")
            except ConnectionError:
                _log.info("%s: the client went away", binding.rpc)
            else:
                await response.write_eof()
            return response
        finally:
            call.cancel()


def _target(raw: str) -> tuple[str, str, str]:
    """Split a request target into path, ``?`` and query; an absolute form loses its authority."""
    path, mark, query = raw.partition("?")
    if not path.startswith("/") and "://" in path:
        path = "/" + path.partition("://")[2].partition("/")[2]
    return path, mark, query


def _of_method(
    found: Iterable[tuple[Binding, Mapping[str, str]]], method: str
) -> list[tuple[Binding, Mapping[str, str]]]:
    return [item for item in found if item[0].http_method == method]


def _message(
    request: web.BaseRequest,
    binding: Binding,
    values: Mapping[str, str],
    query: str,
    body: bytes,
) -> Message:
    """Build the request message from body, path and query, in this order."""
    message = binding.request_type()
    if body and not binding.body:
        raise MeshError(Code.INVALID_ARGUMENT, "this method takes no body", field="body")
    encoding = request.headers.get("Content-Encoding", "identity")
    if body and encoding != "identity":
        raise MeshError(
            Code.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Encoding {encoding[:100]!r}: expected none",
            field="Content-Encoding",
        )
    media_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    is_form = bool(binding.body) and media_type in _FORM_TYPES
    if is_form or (body and media_type != "application/json"):
        raise MeshError(
            Code.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Type {media_type[:100]!r}: expected application/json",
            field="Content-Type",
        )
    parsed = None
    if body:
        parsed = parse_json(body, "body")
        bind_body(message, parsed, binding.body)
    bind_path(message, values)
    bind_query(message, query, body=binding.body, bound=set(values))
    _fill_mask(message, binding, parsed, set(values))
    return message


def _fill_mask(message: Any, binding: Binding, parsed: Any, bound: set[str]) -> None:
    """Give a PATCH without a field mask the mask of what its body has."""
    fields = message.DESCRIPTOR.fields_by_name
    mask, body = fields.get("update_mask"), fields.get(binding.body)
    if binding.http_method != "PATCH" or mask is None or body is None or body.message_type is None:
        return
    if not message.HasField("update_mask"):
        skip = {path.removeprefix(f"{binding.body}.") for path in bound}
        message.update_mask.paths.extend(mask_of(parsed, body.message_type, skip))


def _failed(error: grpc.aio.AioRpcError) -> Answer:
    metadata = error.trailing_metadata()
    number, headers, body = error_answer(
        status_of(error.code().value[0], error.details() or "", metadata)
    )
    headers += headers_out("Grpc-Metadata-", error.initial_metadata())
    headers += headers_out("Grpc-Trailer-", metadata)
    return number, headers, body


def _response(request: web.BaseRequest, answer: Answer) -> web.Response:
    number, headers, body = answer
    response = web.Response(status=number, headers=headers, body=body)
    if not request.can_read_body or request.content.is_eof():
        return response
    response.force_close()  # the rest of the body was not read
    return response


def _dump(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
