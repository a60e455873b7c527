"""The bytes of a connection: heads, bodies and their framing (`meshnet.plane`).

The first byte chooses the side: a server's that reads requests, or a client's that reads
answers. The second says in what pieces the bytes arrive.
"""

from __future__ import annotations

from meshnet.errors import WireError
from meshnet.plane.bodies import read_body, read_bounded
from meshnet.plane.http1 import build_answer, build_request, parse_answer, parse_request
from meshnet.plane.inbox import ConnectionEndedError, Inbox, read_head

MAX_HEAD = 4096
MAX_FIELDS = 32
MAX_BODY = 8192


def check(data: bytes) -> None:
    if len(data) < 2:
        return
    reading = _serve if data[0] & 1 else _answers
    inbox = Inbox()
    try:
        _drive(inbox, reading(inbox, data[0] >> 1), data[2:], step=data[1] or 256)
    except (WireError, ConnectionEndedError):
        return


def _drive(inbox, reading, data, *, step):
    """Feed `reading` as a socket would, `step` bytes at a time, then end the stream."""
    at = 0
    try:
        while True:
            target = next(reading)
            if inbox.failure is not None:
                raise ConnectionEndedError(str(inbox.failure))
            space = inbox.space() if target is None else target
            piece = data[at : at + min(step, len(space))]
            space[: len(piece)] = piece
            at += len(piece)
            if target is None:
                inbox.add(len(piece))
            elif len(piece) < len(target):
                raise ConnectionEndedError("within a body")
    except StopIteration:
        return


def _serve(inbox, num_bytes):
    while (head := (yield from read_head(inbox, MAX_HEAD))) is not None:
        request = parse_request(head, max_fields=MAX_FIELDS)
        assert len(request.fields) <= MAX_FIELDS
        names = [name for name, _ in request.fields]
        assert all(name and name.isascii() for name in names), names
        rebuilt = build_request(request.method, request.target, "h", (), request.content_length)
        again = parse_request(rebuilt, max_fields=MAX_FIELDS)
        assert again.content_length == request.content_length
        if request.has_body:
            body = yield from read_body(
                inbox,
                encoding="zstd" if request.chunked else None,
                num_bytes=num_bytes,
                content_length=request.content_length,
                chunked=request.chunked,
            )
            assert len(body) <= num_bytes + num_bytes // 16 + 64 * 1024


def _answers(inbox, _num_bytes):
    while (head := (yield from read_head(inbox, MAX_HEAD))) is not None:
        answer = parse_answer(head, max_fields=MAX_FIELDS)
        assert 100 <= answer.status <= 599
        body = yield from read_bounded(inbox, answer, MAX_BODY)
        assert len(body) <= MAX_BODY
        build_answer(answer.status, answer.fields, None, close=False)
