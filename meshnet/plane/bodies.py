"""Bodies between connection and tensor: read under a bound, coded off the event loop.

The memory that a body is read into belongs to the tensor that views it and is never used
again, so a handler may keep the tensor as long as it likes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from meshnet.codec import decompress, max_body_bytes
from meshnet.compression import CompressionPolicy, compress_activation
from meshnet.dtypes import Body, view_bytes
from meshnet.errors import Code, WireError
from meshnet.plane.chunked import ChunkedDecoder
from meshnet.plane.connection import Connection, ConnectionEndedError
from meshnet.plane.http1 import AnswerHead

__all__ = [
    "allocate",
    "check_length",
    "compress_tensor",
    "decompress_body",
    "read_body",
    "read_bounded",
]

_INLINE_BYTES: Final = 256 * 1024
"""Bodies up to this are coded on the event loop: about 0.25 ms, twice a thread's handoff."""

_T = TypeVar("_T")


def allocate(num_bytes: int) -> memoryview:
    """Give memory of exactly `num_bytes` bytes, with whatever they hold.

    Never kept for the next body. Measured, round trips of 0.5 to 4 MiB take no page fault
    and no longer than with buffers kept: malloc gives back what the body before left. Only
    past its mapping threshold, at 32 MiB, do kept buffers save some 15 % of the time.
    """
    return np.empty(num_bytes, np.uint8).data


def check_length(encoding: str | None, num_bytes: int, length: int) -> None:
    """Check a stated length of a body before anything is allocated or read.

    Raises:
        WireError: a raw body that is not exactly the tensor's `num_bytes`, or an encoded
            one that is longer than any that could decode to them.
    """
    if encoding is None and length != num_bytes:
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


async def read_body(
    connection: Connection,
    *,
    encoding: str | None,
    num_bytes: int,
    content_length: int | None,
    chunked: bool,
) -> memoryview:
    """Read the body of a tensor of `num_bytes` bytes.

    With neither a length nor chunked coding the body ends with the connection.

    Raises:
        WireError: a length that cannot be right, before anything is read; or chunked
            coding that is malformed or goes past it.
        ConnectionEndedError: the connection ended within the body.
        TimeoutError: the connection's deadline passed.
    """
    if content_length is not None:
        check_length(encoding, num_bytes, content_length)
        body = allocate(content_length)
        await connection.read_into(body)
        return body
    body = allocate(max_body_bytes(encoding, num_bytes))
    if chunked:
        size = await _read_chunked(connection, body)
    else:
        size = await _read_to_end(connection, body)
    return body[:size]


async def _read_chunked(connection: Connection, out: memoryview) -> int:
    """Read a body in chunked coding into `out`; gives its length.

    Raises:
        WireError: not chunked coding, or a body longer than `out`.
        ConnectionEndedError: the connection ended first.
        TimeoutError: the connection's deadline passed.
    """
    decoder = ChunkedDecoder(out)
    while True:
        connection.consume(decoder.feed(connection.unread()))
        if decoder.done:
            return decoder.size
        await connection.receive()


async def _read_to_end(connection: Connection, out: memoryview) -> int:
    """Read into `out` until the other end closes; gives the length.

    Raises:
        WireError: a body longer than `out`.
        ConnectionEndedError: the connection was reset.
        TimeoutError: the connection's deadline passed.
    """
    size = 0
    while True:
        data = connection.unread()
        count = len(data)
        if size + count > len(out):
            raise WireError(f"body has at least {size + count} bytes; expected {len(out)}")
        out[size : size + count] = data
        connection.consume(count)
        size += count
        if connection.closed_by_peer:
            return size
        try:
            await connection.receive()
        except ConnectionEndedError:
            if not connection.closed_by_peer:
                raise


async def read_bounded(connection: Connection, head: AnswerHead, max_bytes: int) -> bytes:
    """Read the body of an answer that is no tensor.

    Raises:
        WireError: a body of more than `max_bytes`.
        ConnectionEndedError: the connection ended first.
        TimeoutError: the connection's deadline passed.
    """
    if head.status in (204, 304):
        return b""
    length = head.content_length
    if length is not None and length > max_bytes:
        raise WireError(
            f"Content-Length: {length}; expected at most {max_bytes}", field="Content-Length"
        )
    out = allocate(max_bytes if length is None else length)
    if head.chunked:
        length = await _read_chunked(connection, out)
    elif length is None:
        length = await _read_to_end(connection, out)
    else:
        await connection.read_into(out)
    return bytes(out[:length])


async def decompress_body(encoding: str | None, body: Body, num_bytes: int) -> tuple[Body, float]:
    """Decode a body to exactly `num_bytes` bytes; gives them and the seconds it took.

    Raises:
        WireError: see `meshnet.codec.decompress`.
    """
    if encoding is None:
        return decompress(None, body, num_bytes), 0.0
    started = time.perf_counter()
    raw = await _off_loop(num_bytes, lambda: decompress(encoding, body, num_bytes))
    return raw, time.perf_counter() - started


async def compress_tensor(
    tensor: npt.NDArray[Any], policy: CompressionPolicy, accepted: tuple[str, ...]
) -> tuple[Body, str | None]:
    """Give a tensor's body, and its encoding where the policy and the reader want one."""
    raw = view_bytes(tensor)
    if not accepted or not policy.enabled or len(raw) < policy.min_input_bytes:
        return raw, None
    result = await _off_loop(len(raw), lambda: compress_activation(raw, policy))
    if result.encoding is not None and result.encoding not in accepted:
        return raw, None
    return result.body, result.encoding


async def _off_loop(num_bytes: int, work: Callable[[], _T]) -> _T:
    """Run `work` here where it is short, else in a thread (the codecs release the GIL)."""
    return work() if num_bytes <= _INLINE_BYTES else await asyncio.to_thread(work)
