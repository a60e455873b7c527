"""What the requests of one connection have the node do; whatever that raises is an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar

from meshnet.chunk import Answer, Chunk
from meshnet.dtypes import Body, view_bytes
from meshnet.errors import Code, MeshError
from meshnet.plane.bodies import compress_body
from meshnet.plane.caller import Caller, CallerGoneError
from meshnet.plane.http1 import RequestHead
from meshnet.plane.reply import Reply, not_allowed, problem
from meshnet.plane.service import Service
from meshnet.plane.session_requests import (
    OWNERS,
    SESSIONS,
    Receive,
    answer_owner,
    answer_session,
)
from meshnet.wire import ChunkHeader, view_tensor

__all__ = ["FORWARD", "HandlerCalls"]

logger = logging.getLogger(__name__)

FORWARD: Final = "/forward"

_T = TypeVar("_T")


class HandlerCalls:
    """Calls of the handler for one connection.

    Args:
        service: of the server.
        caller: who waits for the answers.
    """

    def __init__(self, service: Service, caller: Caller) -> None:
        self._service = service
        self._caller = caller

    def forward(
        self, header: ChunkHeader, raw: Body, wire_bytes: int | None = None, codec_s: float = 0.0
    ) -> Reply:
        """Run a chunk; an error is its answer."""
        try:
            tensor = view_tensor(raw, header.shape, header.dtype)
            chunk = Chunk(header, tensor, len(raw) if wire_bytes is None else wire_bytes, codec_s)
            return self._pack(self._service.handler.forward(chunk, self._caller), header)
        except MeshError as error:
            return problem(error)
        except CallerGoneError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a backend raises is its own fault
            return problem(_fault(FORWARD, error))

    def answer(self, request: RequestHead, path: str, receive: Receive) -> Reply:
        """Answer whatever is no chunk; `receive` reads the body of one that has some.

        Raises:
            MeshError: to be answered instead.
            CallerGoneError: nobody waits any more.
        """
        handler, caller = self._service.handler, self._caller
        if path.startswith(SESSIONS):
            return self._call(lambda: answer_session(request, path, handler, caller, receive), path)
        if path.startswith(OWNERS):
            return self._call(lambda: answer_owner(request, path, handler, caller), path)
        found = self._call(lambda: handler.get(path), path)
        if found is None:
            raise MeshError(
                Code.NOT_FOUND, f"{path[:80]!r} is not served here; chunks go to POST {FORWARD}"
            )
        if request.method not in ("GET", "HEAD"):
            return not_allowed(request.method, path, "GET, HEAD")
        status, content_type, body = found
        return Reply(status, [("Content-Type", content_type)], body)

    def _call(self, work: Callable[[], _T], path: str) -> _T:
        """Call the handler."""
        try:
            return work()
        except (MeshError, CallerGoneError):
            raise
        except Exception as error:  # noqa: BLE001 - as above
            raise _fault(path, error) from None

    def _pack(self, answer: Answer, asked: ChunkHeader) -> Reply:
        header, tensor = answer.header, answer.tensor
        if tensor is None:
            return Reply(204, [], None, header._replace(shape=None, encoding=None))
        if tensor.nbytes != header.num_bytes:
            logger.error("answer of %d bytes for a header of %s", tensor.nbytes, header)
            raise MeshError(Code.INTERNAL, "the node made an answer unlike its own header")
        body: Body = view_bytes(tensor)
        encoding = None
        if asked.accept_encoding:
            chooser = self._service.chooser
            plan = chooser.choose(
                body, asked.phase, width=header.width, accepted=asked.accept_encoding
            )
            sent = compress_body(body, plan, chooser)
            body, encoding = sent.body, sent.encoding
        if encoding != header.encoding:
            header = header._replace(encoding=encoding)
        return Reply(200, [], body, header)


def _fault(path: str, error: Exception) -> MeshError:
    """Log the handler's exception; gives the error to answer instead."""
    logger.error("handler failed on %s", path, exc_info=error)
    return MeshError(Code.INTERNAL, "the node failed on this request; its log says why")
