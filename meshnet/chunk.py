"""Whole messages of the activation plane: header fields and body to a tensor and back (sans-IO)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy.typing as npt

from meshnet.codec import decompress
from meshnet.dtypes import Body
from meshnet.errors import WireError
from meshnet.wire import (
    DEFAULT_LIMITS,
    AnswerHeader,
    ChunkHeader,
    Headers,
    WireLimits,
    unpack_answer,
    unpack_chunk,
    view_tensor,
)

__all__ = ["Answer", "Chunk", "read_answer", "read_chunk"]


class Chunk(NamedTuple):
    """One request: a tensor of consecutive token positions.

    Attributes:
        header: what the header fields say.
        tensor: of `header.shape`; views the body where that was raw.
        wire_bytes: length of the body as it was sent.
        codec_s: seconds spent decoding the body, for Server-Timing.
    """

    header: ChunkHeader
    tensor: npt.NDArray[Any]
    wire_bytes: int = 0
    codec_s: float = 0.0


class Answer(NamedTuple):
    """One answer.

    Attributes:
        header: what the header fields say.
        tensor: the output, or None where the caller wanted none.
        wire_bytes: length of the body as it was sent.
        codec_s: seconds spent decoding the body.
        sent_bytes: length of the request's body, as it was sent.
    """

    header: AnswerHeader
    tensor: npt.NDArray[Any] | None
    wire_bytes: int = 0
    codec_s: float = 0.0
    sent_bytes: int = 0


def read_chunk(headers: Headers, body: Body, limits: WireLimits = DEFAULT_LIMITS) -> Chunk:
    """Read one request whole; for sockets, `unpack_chunk` first checks the header alone.

    Raises:
        WireError: for any header or body that breaks proto/WIRE.md; nothing else.
    """
    header = unpack_chunk(headers, limits)
    raw = decompress(header.encoding, body, header.num_bytes, header.width)
    return Chunk(header, view_tensor(raw, header.shape, header.dtype), len(body))


def read_answer(headers: Headers, body: Body, limits: WireLimits = DEFAULT_LIMITS) -> Answer:
    """Read one answer of status 200 or 204 whole.

    Raises:
        WireError: as `read_chunk`.
    """
    header = unpack_answer(headers, limits)
    if header.shape is None or header.dtype is None:
        if len(body):
            raise WireError(
                f"X-Meshnet-Shape is missing from an answer with a body of {len(body)} bytes",
                field="X-Meshnet-Shape",
            )
        return Answer(header, None, len(body))
    raw = decompress(header.encoding, body, header.num_bytes, header.width)
    return Answer(header, view_tensor(raw, header.shape, header.dtype), len(body))
