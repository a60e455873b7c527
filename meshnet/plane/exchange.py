"""The server's side of one connection: request in, answer out, again and again."""

from __future__ import annotations

import contextlib
import time
from dataclasses import replace
from typing import Final, TypeVar

from meshnet.codec import ENCODINGS
from meshnet.errors import Code, MeshError, WireError
from meshnet.grammar import parse_count
from meshnet.plane.bodies import (
    check_length,
    decompress_body,
    read_body,
    read_exactly,
    read_into,
)
from meshnet.plane.caller import Caller, CallerGoneError
from meshnet.plane.handler_calls import FORWARD, HandlerCalls
from meshnet.plane.http1 import CONTINUE, RequestHead, parse_request
from meshnet.plane.inbox import LANDING_BYTES, ConnectionEndedError, Reading, read_head
from meshnet.plane.memo import POSITION, LastHead
from meshnet.plane.reply import Reply, late, not_allowed, problem, too_slow
from meshnet.plane.service import Service
from meshnet.plane.stream import Stream
from meshnet.plane.tls import check_caller, is_member, is_removed, removed
from meshnet.wire import ChunkHeader, unpack_chunk

__all__ = ["Exchange"]

_DRAIN_BYTES: Final = 64 * 1024
"""An unread body up to this is read and dropped; for a longer one the connection closes."""
_PACED_BYTES: Final = 8 * 1024 * 1024
"""Of a longer body, each so many bytes have a deadline of their own: a slow sender is found out
in minutes, however long a body it announced."""
_LINGER_S: Final = 2.0
_MAX_DIGITS: Final = 20

_T = TypeVar("_T")


class Exchange:
    """Requests of one connection, one after the other, on the thread that calls `run`.

    Attributes:
        stream: the connection; closed by its owner.
        caller: told when the other end closes.
        idle: no request is in flight, so that no answer is lost by closing.
        waits_since: of ``time.monotonic``: since when its caller owes a whole head; None
            while it owes none.
        is_hurried: its body was ended, as it came too slowly.
    """

    def __init__(self, stream: Stream, service: Service) -> None:
        self.idle = True
        self.waits_since: float | None = time.monotonic()
        self.stream = stream
        self.caller = Caller()
        self.is_hurried = False
        self._service = service
        self._calls = HandlerCalls(service, self.caller)
        self._forward = self._calls.forward
        # Bytes of the current request's body still to come; None where that is not known
        # and the connection cannot be used again.
        self._unread: int | None = 0
        self._is_member = False

    def run(self) -> None:
        """Serve until either end closes."""
        # Otherwise the caller went away, or let a deadline pass: there is no one to tell.
        with contextlib.suppress(OSError, CallerGoneError):
            self.stream.set_deadline(self._service.limits.read_timeout_s)
            self.stream.begin()
            self.caller.introduce(self.stream.peer)
            self._is_member = is_member(self._service.tls, self.stream.peer)
            while self._serve_one():
                pass

    def end_if_idle(self) -> None:
        """End a connection that waits for a request; from any thread."""
        if self.idle:
            self.stream.stop_reading()

    def give_way(self) -> None:
        """End a connection whose caller owes a head; from any thread."""
        self.waits_since = None
        self.stream.abort()

    def hurry(self) -> None:
        """End a body that comes too slowly for a crowded server; from any thread."""
        self.is_hurried = True
        self.stream.stop_reading()

    def cancel(self) -> None:
        """End the request in flight; from any thread."""
        self.caller.leave()
        self.stream.abort()

    def cancel_if_removed(self) -> None:
        """End the request in flight of a caller that is a member no more; from any thread.

        Its next one is refused anyway.
        """
        tls = self._service.tls
        if tls is not None and not self.idle and self.stream.key_sha256 in tls.removals:
            self.cancel()

    def _serve_one(self) -> bool:
        """Serve one request; False where it was the last."""
        stream, limits = self.stream, self._service.limits
        self._unread = 0
        if not stream.inbox.buffered:
            self.idle = True
            self.waits_since = time.monotonic()
            left_s = stream.expires - time.time()
            if self._service.closing or left_s <= 0:
                return False
            stream.set_deadline(min(limits.idle_timeout_s, left_s))
            stream.receive()
        self.idle = False
        tls = self._service.tls
        if tls is not None and is_removed(tls, stream):
            return self._refuse(removed(stream.peer))
        again = self._take_again()
        if again is not None:
            self.waits_since = None
            return self._answer(self._forward(*again), keep_alive=True, method="POST")
        try:
            head = stream.inbox.take_head(limits.max_header_bytes)
            if head is None:
                stream.set_deadline(limits.read_timeout_s)
                head = stream.run(read_head(stream.inbox, limits.max_header_bytes))
                if head is None:
                    return False
            self.waits_since = None
            request, header = self._read_head(head)
        except TimeoutError:
            return self._refuse(late("the head", limits.read_timeout_s))
        except MeshError as error:
            return self._refuse(error)
        if request.has_body:
            unknown = request.chunked or request.expects_continue
            self._unread = None if unknown else request.content_length
        try:
            if header is None:
                reply = self._dispatch(request, head)
            else:
                reply = self._receive_chunk(request, header)
        except MeshError as error:
            reply = problem(error)
        return self._answer(reply, keep_alive=request.keep_alive, method=request.method)

    def _take_again(self) -> tuple[ChunkHeader, memoryview] | None:
        """Take a chunk like the last one, but for its position; None where it is another."""
        inbox = self.stream.inbox
        last: LastHead[ChunkHeader] | None = inbox.last
        if last is None:
            return None
        taken = inbox.take_again(last, bytes.isdigit, _MAX_DIGITS)
        if taken is None:
            return None
        value, body = taken
        self.stream.expect(last.length, last.num_bytes)
        return last.made.at(int(value)), body

    def _remember(self, head: bytes, request: RequestHead, header: ChunkHeader) -> None:
        """Look out for a chunk like this one, where it is a short one that was raw."""
        length = request.content_length
        plain = header.encoding is None and request.keep_alive and not request.expects_continue
        if plain and length is not None and length == header.num_bytes <= LANDING_BYTES:
            self.stream.inbox.last = LastHead(head, POSITION, header, length)

    def _read_head(self, head: bytes) -> tuple[RequestHead, ChunkHeader | None]:
        """Read a head, and what it says of a chunk where one like it was read before."""
        found = self._service.chunks.find(head) if self._is_member else None
        if found is not None:
            (request, header), value = found
            with contextlib.suppress(ValueError):  # the parsers below say what is wrong with it
                position = header.position if value is None else parse_count(value.decode())
                self.stream.expect(len(head), request.content_length)
                self._remember(head, request, header)
                return request, header.at(position)
        return parse_request(head, max_fields=self._service.limits.max_header_count), None

    def _refuse(self, error: MeshError) -> bool:
        """Answer a request whose end is not known."""
        self._unread = None
        return self._answer(problem(error), keep_alive=False, method="")

    def _answer(self, reply: Reply, *, keep_alive: bool, method: str) -> bool:
        stream, limits = self.stream, self._service.limits
        too_long = self._unread is None or self._unread > _DRAIN_BYTES
        close = self._service.closing or not keep_alive or too_long or self._is_old()
        length = None if reply.body is None else len(reply.body)
        head = self._service.heads.pack(reply, length, time.time(), close=close)
        body = b"" if reply.body is None or method == "HEAD" else reply.body
        stream.set_deadline(limits.write_timeout_s + len(body) / limits.min_bytes_per_s)
        stream.send(head, body)
        if close:
            if self._unread != 0 or stream.inbox.buffered:
                self.idle = True
                stream.linger(_LINGER_S)
            return False
        if self._unread:
            stream.set_deadline(limits.read_timeout_s)
            stream.run(read_exactly(stream.inbox, self._unread))
        return True

    def _is_old(self) -> bool:
        """Tell whether credentials were renewed meanwhile: whom to trust may have changed."""
        tls = self._service.tls
        return tls is not None and self.stream.generation != tls.generation

    def _dispatch(self, request: RequestHead, head: bytes) -> Reply:
        path = request.target.partition("?")[0]
        if not self._is_member:
            check_caller(self.stream.peer, request.method, path)
        if path == FORWARD:
            if request.method == "POST":
                header = self._unpack(request)
                self._service.chunks.keep(head, (replace(request, fields=[]), header))
                return self._receive_chunk(request, header)
            return not_allowed(request.method, path, "POST")
        return self._calls.answer(request, path, lambda into: self._fill(request, into))

    def _unpack(self, request: RequestHead) -> ChunkHeader:
        header = unpack_chunk(request.fields, self._service.limits.wire)
        if header.encoding is not None and header.encoding not in ENCODINGS:
            raise WireError(
                f"X-Meshnet-Encoding: {header.encoding!r} is not read here;"
                f" expected one of {', '.join(ENCODINGS)}, or none for a raw body",
                field="X-Meshnet-Encoding",
            )
        return header

    def _receive_chunk(self, request: RequestHead, header: ChunkHeader) -> Reply:
        """Receive a chunk's body, whose header has been found good, and run it."""
        num_bytes = header.num_bytes
        body = self._receive(request, header, num_bytes)
        if header.encoding is None:
            return self._forward(header, body)
        raw, codec_s = decompress_body(header.encoding, body, num_bytes, header.width)
        return self._forward(header, raw, len(body), codec_s)

    def _receive(self, request: RequestHead, header: ChunkHeader, num_bytes: int) -> memoryview:
        """Read a chunk's body, whose header has been found good; `num_bytes` is the tensor's."""
        stream = self.stream
        length = request.content_length
        if length is not None:
            check_length(header.encoding, num_bytes, length)
        elif not request.chunked:
            raise WireError(
                f"Content-Length is missing; expected {num_bytes}, as shape and dtype say,"
                " or Transfer-Encoding: chunked",
                field="Content-Length",
                code=Code.LENGTH_REQUIRED,
            )
        if length is not None and stream.inbox.buffered >= length:
            self._unread = 0
            return stream.inbox.claim(length)[0]
        return self._run(
            request,
            read_body(
                stream.inbox,
                encoding=header.encoding,
                num_bytes=num_bytes,
                content_length=length,
                chunked=request.chunked,
            ),
            num_bytes,
        )

    def _fill(self, request: RequestHead, into: list[memoryview]) -> None:
        """Read a body of known length to where it stays."""
        self._run(request, read_into(self.stream.inbox, into), sum(map(len, into)))

    def _run(self, request: RequestHead, reading: Reading[_T], num_bytes: int) -> _T:
        """Read a body whose header has been found good."""
        stream, limits = self.stream, self._service.limits
        piece_bytes = min(num_bytes, _PACED_BYTES)
        timeout_s = limits.read_timeout_s + piece_bytes / limits.min_bytes_per_s
        stream.set_pace(piece_bytes, timeout_s)
        if request.expects_continue and not stream.inbox.buffered:
            stream.send(CONTINUE)
        self._unread = None
        try:
            read = stream.run(reading)
        except TimeoutError:
            piece = "the body" if num_bytes <= _PACED_BYTES else f"{_PACED_BYTES} bytes of the body"
            raise late(piece, timeout_s) from None
        except ConnectionEndedError:
            if self.is_hurried:
                raise too_slow(limits.crowded_bytes_per_s) from None
            raise WireError(f"the connection ended within a body of {num_bytes} bytes") from None
        finally:
            stream.end_pace()
        self._unread = 0
        return read
