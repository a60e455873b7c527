"""The OpenAI surface over HTTP: routes, bodies, event streams, error answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Final

from aiohttp import web

from meshnet.errors import Code, MeshError
from meshnet_gateway.generate import Event
from meshnet_gateway.limits import GatewayLimits
from meshnet_gateway.openai_answers import Answer, sse
from meshnet_gateway.openai_errors import bad_request, error_body, error_response, upstream_error
from meshnet_gateway.openai_fields import Fields, parse_object
from meshnet_gateway.openai_requests import (
    ChatRequest,
    CompletionRequest,
    read_chat,
    read_completion,
)
from meshnet_gateway.openai_service import OpenAIService

__all__ = ["TIMINGS_HEADER", "add_routes"]

TIMINGS_HEADER: Final = "X-Meshnet-Timings"
"""A request with this set to 1 gets a ``meshnet`` object beside its usage."""

_PREFIX: Final = "/v1/"
_log = logging.getLogger(__name__)

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def add_routes(app: web.Application, service: OpenAIService) -> None:
    """Add the OpenAI routes, and the answers to errors under ``/v1/``, to an application.

    Run the application with ``handler_cancellation=True``, so that a client that goes away
    ends its completion.
    """
    routes = _Routes(service)
    app.middlewares.append(_answer_errors)
    app.router.add_get("/v1/models", routes.list_models)
    app.router.add_get("/v1/models/{model:.+}", routes.show_model)
    app.router.add_post("/v1/chat/completions", routes.chat)
    app.router.add_post("/v1/completions", routes.complete)


class _Routes:
    def __init__(self, service: OpenAIService) -> None:
        self._service = service

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response(self._service.list_models())

    async def show_model(self, request: web.Request) -> web.Response:
        return web.json_response(self._service.show_model(request.match_info["model"]))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, read_chat)

    async def complete(self, request: web.Request) -> web.StreamResponse:
        return await self._answer(request, read_completion)

    async def _answer(
        self,
        request: web.Request,
        read: Callable[[Fields, GatewayLimits], ChatRequest | CompletionRequest],
    ) -> web.StreamResponse:
        limits = self._service.limits
        body = await _read_body(request, limits)
        wanted = read(parse_object(body, limits), limits)
        with_timings = request.headers.get(TIMINGS_HEADER) == "1"
        answer, events = await self._service.start(wanted, with_timings=with_timings)
        async with aclosing(events):
            if wanted.options.stream:
                return await _stream(request, answer, events)
            try:
                return web.json_response(await answer.collect(events))
            except MeshError as error:
                raise upstream_error(error) from error


async def _read_body(request: web.Request, limits: GatewayLimits) -> bytearray:
    """Read a JSON body within limits, whatever its length field says.

    Raises:
        MeshError: UNSUPPORTED_MEDIA_TYPE, TOO_LARGE or REQUEST_TIMEOUT.
    """
    # A form or plain text is what a web page could send here without being asked first.
    if request.content_type != "application/json":
        raise MeshError(
            Code.UNSUPPORTED_MEDIA_TYPE,
            f"Content-Type: {request.content_type[:80]}; expected application/json",
            field="Content-Type",
        )
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for piece in request.content.iter_any():
                body += piece
                if len(body) > limits.max_body_bytes:
                    raise MeshError(
                        Code.TOO_LARGE,
                        f"body: more than {limits.max_body_bytes} bytes; expected at most that"
                        " (max_body_bytes)",
                        reason="REQUEST_TOO_LARGE",
                    )
    except TimeoutError:
        raise MeshError(
            Code.REQUEST_TIMEOUT,
            f"body: not whole after {limits.body_timeout_s:g} s; expected it sooner"
            " (body_timeout_s)",
            reason="REQUEST_TIMEOUT",
        ) from None
    except web.RequestPayloadError as error:
        raise bad_request(f"body: cannot be read: {error}", None, "invalid_body") from None
    return body


async def _stream(
    request: web.Request, answer: Answer, events: AsyncGenerator[tuple[int, Event], None]
) -> web.StreamResponse:
    """Send an answer as server-sent events.

    The status waits for the first event, so that a completion that cannot begin is an HTTP
    error; one that fails later ends with an error event, and neither a finish reason nor
    ``[DONE]``. Each write waits for a slow reader, and the completion with it.
    """
    async with aclosing(answer.stream(events)) as pieces:
        try:
            first = await anext(pieces)
        except MeshError as error:
            raise upstream_error(error) from error
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",
            }
        )
        try:
            await response.prepare(request)
            await response.write(first)
            async for piece in _ending_with_error(pieces):
                await response.write(piece)
            await response.write_eof()
        except ConnectionResetError:
            _log.debug("a client went away during its stream")
    return response


async def _ending_with_error(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Pass events on; where they fail, the error is the last of them."""
    try:
        async for piece in pieces:
            yield piece
    except MeshError as error:
        _log.warning("a stream broke: %s", error.message)
        yield sse(error_body(upstream_error(error)))
    except Exception:  # noqa: BLE001 - logged whole; the client gets an error without a traceback
        _log.exception("a stream broke on an unexpected error")
        yield sse(error_body(_unexpected()))


@web.middleware
async def _answer_errors(request: web.Request, handler: _Handler) -> web.StreamResponse:
    """Answer errors as OpenAI does; only `MeshError` where a path is not under ``/v1/``."""
    if not request.path.startswith(_PREFIX):
        try:
            return await handler(request)
        except MeshError as error:
            return error_response(error)
    try:
        return await handler(request)
    except MeshError as error:
        return error_response(error)
    except web.HTTPNotFound:
        return error_response(
            MeshError(
                Code.NOT_FOUND,
                f"Invalid URL ({request.method} {request.path[:200]})",
                reason="UNKNOWN_URL",
            )
        )
    except web.HTTPMethodNotAllowed as error:
        allowed = ", ".join(sorted(error.allowed_methods))
        response = error_response(
            MeshError(
                Code.METHOD_NOT_ALLOWED,
                f"{error.method}: not a method of this path; expected {allowed}",
            )
        )
        response.headers["Allow"] = allowed
        return response
    except web.HTTPException:
        raise
    except Exception:  # noqa: BLE001 - logged whole; the client gets an error without a traceback
        _log.exception("a request failed on an unexpected error")
        return error_response(_unexpected())


def _unexpected() -> MeshError:
    return MeshError(
        Code.INTERNAL, "the gateway failed on this request; its log says where", reason="INTERNAL"
    )
