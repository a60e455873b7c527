"""Bodies between connection and tensor: read under a bound, decoded and encoded (sans-IO).

The memory that a body is read into belongs to the tensor that views it and is never used
again, so a handler may keep the tensor as long as it likes.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from meshnet.adaptive import EncodingChooser
from meshnet.codec import decompress, max_body_bytes
from meshnet.compression import CompressionResult
from meshnet.dtypes import Body
from meshnet.errors import Code, WireError
from meshnet.plane.chunked import ChunkedDecoder
from meshnet.plane.http1 import AnswerHead
from meshnet.plane.inbox import Inbox, Reading, allocate
from meshnet.plans import Plan

__all__ = [
    "check_length",
    "compress_body",
    "decompress_body",
    "read_body",
    "read_bounded",
    "read_exactly",
    "read_into",
]


def check_length(encoding: str | None, num_bytes: int, length: int) -> None:
    """Check a stated length of a body before anything is allocated or read.

    Raises:
        WireError: a raw body that is not exactly the tensor's `num_bytes`, or an encoded
            one that is longer than any that could decode to them.
    """
    if encoding is None:
        if length == num_bytes:
            return
        raise WireError(
            f"Content-Length: body has {length} bytes; expected {num_bytes},"
            " as shape and dtype say",
            field="Content-Length",
        )
    limit = max_body_bytes(encoding, num_bytes)
    if length > limit:
        raise WireError(
            f"Content-Length: {encoding} body has {length} bytes; expected at most {limit}"
            f" for a tensor of {num_bytes}",
            field="Content-Length",
            code=Code.TOO_LARGE,
        )


def read_body(
    inbox: Inbox,
    *,
    encoding: str | None,
    num_bytes: int,
    content_length: int | None,
    chunked: bool,
) -> Reading[memoryview]:
    """Read the body of a tensor of `num_bytes` bytes.

    With neither a length nor chunked coding the body ends with the connection.

    Raises:
        WireError: a length that cannot be right, before anything is read; or chunked
            coding that is malformed or goes past it.
    """
    if content_length is not None:
        check_length(encoding, num_bytes, content_length)
        return (yield from read_exactly(inbox, content_length))
    body = allocate(max_body_bytes(encoding, num_bytes))
    size = yield from (_read_chunked(inbox, body) if chunked else _read_to_end(inbox, body))
    return body[:size]


def read_bounded(inbox: Inbox, head: AnswerHead, max_bytes: int) -> Reading[bytes]:
    """Read the body of an answer that is no tensor.

    Raises:
        WireError: a body of more than `max_bytes`.
    """
    if head.status in (204, 304):
        return b""
    length = head.content_length
    if length is not None:
        if length > max_bytes:
            raise WireError(
                f"Content-Length: {length}; expected at most {max_bytes}", field="Content-Length"
            )
        return bytes((yield from read_exactly(inbox, length)))
    out = allocate(max_bytes)
    size = yield from (_read_chunked(inbox, out) if head.chunked else _read_to_end(inbox, out))
    return bytes(out[:size])


def read_exactly(inbox: Inbox, num_bytes: int) -> Reading[memoryview]:
    """Read `num_bytes` bytes: those not here yet go from the socket to their place."""
    body, filled = inbox.claim(num_bytes)
    if filled < num_bytes:
        yield body[filled:]
    return body


def read_into(inbox: Inbox, targets: Iterable[memoryview]) -> Reading[None]:
    """Read a body into memory that is there already, one part after the other."""
    for target in targets:
        filled = inbox.take_into(target)
        if filled < len(target):
            yield target[filled:]


def _read_chunked(inbox: Inbox, out: memoryview) -> Reading[int]:
    """Read a body in chunked coding into `out`; gives its length.

    Raises:
        WireError: not chunked coding, or a body longer than `out`.
    """
    decoder = ChunkedDecoder(out)
    while True:
        inbox.consume(decoder.feed(inbox.unread()))
        if decoder.done:
            return decoder.size
        yield None


def _read_to_end(inbox: Inbox, out: memoryview) -> Reading[int]:
    """Read into `out` until the other end closes; gives the length.

    Raises:
        WireError: a body longer than `out`.
    """
    size = 0
    while True:
        count = inbox.buffered
        if size + count > len(out):
            raise WireError(f"body has at least {size + count} bytes; expected {len(out)}")
        size += inbox.take_into(out[size:])
        if inbox.closed_by_peer:
            return size
        yield None


def decompress_body(
    encoding: str | None, body: Body, num_bytes: int, width: int | None
) -> tuple[Body, float]:
    """Decode a body to exactly `num_bytes` bytes; gives them and the seconds it took.

    `width` is that of `meshnet.codec.decompress`.

    Raises:
        WireError: see `meshnet.codec.decompress`.
    """
    if encoding is None:
        return body, 0.0  # its length is checked where it is viewed as a tensor
    started = time.perf_counter()
    raw = decompress(encoding, body, num_bytes, width)
    return raw, time.perf_counter() - started


def compress_body(body: Body, plan: Plan, chooser: EncodingChooser) -> CompressionResult:
    """Encode a tensor's bytes as its chooser planned, which learns from what that gave."""
    if plan.encoding is None:
        return chooser.pass_raw(plan, body)
    result = plan.apply(body, time.perf_counter)
    chooser.record(plan, result)
    return result
