"""Header fields of the activation plane to chunk headers and back (sans-IO).

Bodies are `meshnet.codec`'s; errors on the wire are `meshnet.problem`'s.
Source: proto/WIRE.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from meshnet.dtypes import BFLOAT16, FLOAT32, INT32, numpy_dtype
from meshnet.errors import WireError
from meshnet.fields import (
    OCTET_STREAM,
    WIRE_VERSION,
    Headers,
    check_media_type,
    check_size,
    check_version,
    collect,
    fault,
    identity,
    optional,
    required,
    tensor_bytes,
)
from meshnet.grammar import (
    Phase,
    Want,
    format_route,
    parse_count,
    parse_dtype,
    parse_encoding,
    parse_encodings,
    parse_flag,
    parse_grant,
    parse_phase,
    parse_positive,
    parse_route,
    parse_shape,
    parse_traceparent,
    parse_want,
    parse_wire_layers,
)
from meshnet.topology import LayerRange, Route, SessionId

__all__ = [
    "DEFAULT_LIMITS",
    "OCTET_STREAM",
    "WIRE_VERSION",
    "AnswerHeader",
    "ChunkHeader",
    "Headers",
    "WireLimits",
    "pack_answer",
    "pack_chunk",
    "unpack_answer",
    "unpack_chunk",
    "view_tensor",
]


@dataclass(frozen=True, slots=True)
class WireLimits:
    """What a receiver accepts, checked before anything is allocated.

    Attributes:
        max_chunk_bytes: largest decoded tensor, in bytes.
    """

    max_chunk_bytes: int = 256 * 1024 * 1024


DEFAULT_LIMITS: Final = WireLimits()


class ChunkHeader(NamedTuple):
    """Everything that a request's header says of its chunk.

    A named tuple, as all is that is made anew for each chunk: a third of a frozen dataclass's
    time to make, and compared without a line of Python.

    Attributes:
        shape: dimensions, row-major; ``[batch, seq, hidden]`` for hidden states,
            ``[batch, seq]`` for token ids.
        dtype: wire dtype name.
        session: whose KV cache the chunk extends.
        chunk_index: of the chunk in its prompt; a decode step is 0.
        chunk_total: chunks of the prompt; a decode step is of 1.
        encoding: coding of the body; None is raw.
        position: index of the chunk's first token in the session; None appends.
        layers: run only these layers of the shard; None runs all.
        phase: prefill or decode.
        want: what the last hop answers; None takes the shard's default.
        accept_encoding: encodings that the caller reads in the answer.
        route: the hops after this one.
        max_tokens: tokens that the session will need in all.
        traceparent: W3C trace context, passed on as it came.
        epoch: how often the session's route has changed; lower ones are refused once a
            node has seen a higher.
        journal: keep the output of the last hop there as if it were sent on.
        grant: of the control plane for the session; only until every hop has it.
    """

    shape: tuple[int, ...]
    dtype: str
    session: SessionId
    chunk_index: int = 0
    chunk_total: int = 1
    encoding: str | None = None
    position: int | None = None
    layers: LayerRange | None = None
    phase: Phase = Phase.DECODE
    want: Want | None = None
    accept_encoding: tuple[str, ...] = ()
    route: Route = ()
    max_tokens: int | None = None
    traceparent: str | None = None
    epoch: int = 0
    journal: bool = False
    grant: str | None = None

    @property
    def num_tokens(self) -> int:
        """Token positions in the chunk: the second dimension, or the only one."""
        return self.shape[1] if len(self.shape) > 1 else self.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of the decoded tensor, in unbounded integers."""
        return tensor_bytes(self.shape, self.dtype)

    @property
    def width(self) -> int | None:
        """Values in a row of a bfloat16 tensor, for `meshnet.codec`; None for other dtypes."""
        return self.shape[-1] if self.dtype == BFLOAT16 else None

    def at(self, position: int | None) -> ChunkHeader:
        """Give the same header at another position; a third of the time of `_replace`."""
        fields = (*self[:_POSITION], position, *self[_POSITION + 1 :])
        return tuple.__new__(ChunkHeader, fields)

    def repeats(self, other: ChunkHeader) -> bool:
        """Tell whether this is `other`, but for the position."""
        return (
            self[:_POSITION] == other[:_POSITION]
            and self[_POSITION + 1 :] == other[_POSITION + 1 :]
        )


_POSITION: Final = ChunkHeader._fields.index("position")


class AnswerHeader(NamedTuple):
    """Everything that an answer's header says.

    Attributes:
        shape: of the output; None where the caller wanted none (HTTP 204, no body).
        dtype: of the output; None likewise.
        session: echoed.
        chunk_index: echoed.
        chunk_total: echoed.
        encoding: coding of the body; None is raw.
        server_timing: value of Server-Timing, see `meshnet.timing`.
        accept_encoding: encodings that the node reads in requests; empty where it does not say.
    """

    shape: tuple[int, ...] | None
    dtype: str | None
    session: SessionId
    chunk_index: int = 0
    chunk_total: int = 1
    encoding: str | None = None
    server_timing: str = ""
    accept_encoding: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the decoded tensor; 0 without one."""
        if self.shape is None or self.dtype is None:
            return 0
        return tensor_bytes(self.shape, self.dtype)

    @property
    def width(self) -> int | None:
        """Values in a row of a bfloat16 tensor, for `meshnet.codec`; None for other dtypes."""
        return self.shape[-1] if self.shape is not None and self.dtype == BFLOAT16 else None

    def timed(self, server_timing: str) -> AnswerHeader:
        """Give the same header with another Server-Timing; faster than `_replace`."""
        return tuple.__new__(AnswerHeader, (*self[:_TIMING], server_timing, *self[_TIMING + 1 :]))


_TIMING: Final = AnswerHeader._fields.index("server_timing")


def unpack_chunk(headers: Headers, limits: WireLimits = DEFAULT_LIMITS) -> ChunkHeader:
    """Read the header fields of one POST /forward.

    The body must then decode to exactly `ChunkHeader.num_bytes` bytes, which is
    within the limits.

    Raises:
        WireError: for the first header at fault, named in ``field``: 400, or 413 for a
            tensor over `WireLimits.max_chunk_bytes`, 415 for another media type.
    """
    fields = collect(headers)
    check_version(fields)
    check_media_type(fields)
    shape = required(fields, "X-Meshnet-Shape", parse_shape)
    dtype = required(fields, "X-Meshnet-Dtype", parse_dtype)
    if dtype == FLOAT32:
        raise fault("X-Meshnet-Dtype", dtype, "bfloat16 (hidden states) or int32 (token ids)")
    if dtype == INT32 and len(shape) > 2:
        raise fault("X-Meshnet-Shape", fields["x-meshnet-shape"], "BATCH,SEQ for int32 token ids")
    check_size(shape, dtype, limits.max_chunk_bytes)
    session, index, total = identity(fields)
    tokens = shape[1] if len(shape) > 1 else shape[0]
    implied = Phase.PREFILL if total > 1 or tokens > 1 else Phase.DECODE
    return ChunkHeader(
        shape=shape,
        dtype=dtype,
        session=session,
        chunk_index=index,
        chunk_total=total,
        encoding=optional(fields, "X-Meshnet-Encoding", parse_encoding),
        position=optional(fields, "X-Meshnet-Position", parse_count),
        layers=optional(fields, "X-Meshnet-Layers", parse_wire_layers),
        phase=optional(fields, "X-Meshnet-Phase", parse_phase) or implied,
        want=optional(fields, "X-Meshnet-Want", parse_want),
        accept_encoding=optional(fields, "X-Meshnet-Accept-Encoding", parse_encodings) or (),
        route=optional(fields, "X-Meshnet-Route", parse_route) or (),
        max_tokens=optional(fields, "X-Meshnet-Max-Tokens", parse_positive),
        traceparent=optional(fields, "traceparent", parse_traceparent),
        epoch=optional(fields, "X-Meshnet-Epoch", parse_count) or 0,
        journal=optional(fields, "X-Meshnet-Journal", parse_flag) or False,
        grant=optional(fields, "X-Meshnet-Grant", parse_grant),
    )


def pack_chunk(header: ChunkHeader) -> list[tuple[str, str]]:
    """Write a chunk's header fields, in WIRE.md's order; Content-Length is the framing's."""
    fields = [
        ("Content-Type", OCTET_STREAM),
        ("X-Meshnet-Wire", str(WIRE_VERSION)),
        ("X-Meshnet-Shape", ",".join(map(str, header.shape))),
        ("X-Meshnet-Dtype", header.dtype),
        ("X-Meshnet-Session", header.session),
        ("X-Meshnet-Chunk-Index", str(header.chunk_index)),
        ("X-Meshnet-Chunk-Total", str(header.chunk_total)),
    ]
    if header.encoding is not None:
        fields.append(("X-Meshnet-Encoding", header.encoding))
    if header.position is not None:
        fields.append(("X-Meshnet-Position", str(header.position)))
    if header.layers is not None:
        fields.append(("X-Meshnet-Layers", str(header.layers)))
    fields.append(("X-Meshnet-Phase", header.phase.value))
    if header.want is not None:
        fields.append(("X-Meshnet-Want", str(header.want)))
    if header.accept_encoding:
        fields.append(("X-Meshnet-Accept-Encoding", ", ".join(header.accept_encoding)))
    if header.route:
        fields.append(("X-Meshnet-Route", format_route(header.route)))
    if header.max_tokens is not None:
        fields.append(("X-Meshnet-Max-Tokens", str(header.max_tokens)))
    if header.traceparent is not None:
        fields.append(("traceparent", header.traceparent))
    if header.epoch:
        fields.append(("X-Meshnet-Epoch", str(header.epoch)))
    if header.journal:
        fields.append(("X-Meshnet-Journal", "1"))
    if header.grant is not None:
        fields.append(("X-Meshnet-Grant", header.grant))
    return fields


def unpack_answer(headers: Headers, limits: WireLimits = DEFAULT_LIMITS) -> AnswerHeader:
    """Read the header fields of a 200 or 204 answer.

    Raises:
        WireError: as `unpack_chunk`; every dtype of the wire is accepted.
    """
    fields = collect(headers)
    check_version(fields)
    session, index, total = identity(fields)
    shape = optional(fields, "X-Meshnet-Shape", parse_shape)
    dtype = None
    if shape is not None:
        dtype = required(fields, "X-Meshnet-Dtype", parse_dtype)
        check_size(shape, dtype, limits.max_chunk_bytes)
    return AnswerHeader(
        shape=shape,
        dtype=dtype,
        session=session,
        chunk_index=index,
        chunk_total=total,
        encoding=optional(fields, "X-Meshnet-Encoding", parse_encoding),
        server_timing=fields.get("server-timing", ""),
        accept_encoding=optional(fields, "X-Meshnet-Accept-Encoding", parse_encodings) or (),
    )


def pack_answer(header: AnswerHeader) -> list[tuple[str, str]]:
    """Write an answer's header fields."""
    fields = [("X-Meshnet-Wire", str(WIRE_VERSION))]
    if header.shape is not None and header.dtype is not None:
        fields.append(("Content-Type", OCTET_STREAM))
        fields.append(("X-Meshnet-Shape", ",".join(map(str, header.shape))))
        fields.append(("X-Meshnet-Dtype", header.dtype))
    fields.append(("X-Meshnet-Session", header.session))
    fields.append(("X-Meshnet-Chunk-Index", str(header.chunk_index)))
    fields.append(("X-Meshnet-Chunk-Total", str(header.chunk_total)))
    if header.encoding is not None:
        fields.append(("X-Meshnet-Encoding", header.encoding))
    if header.accept_encoding:
        fields.append(("X-Meshnet-Accept-Encoding", ", ".join(header.accept_encoding)))
    if header.server_timing:
        fields.append(("Server-Timing", header.server_timing))
    return fields


def view_tensor(
    body: bytes | bytearray | memoryview, shape: tuple[int, ...], dtype: str
) -> npt.NDArray[Any]:
    """View raw little-endian `body` as a row-major array, without a copy.

    The array keeps `body` alive and is writable only where `body` is.

    Raises:
        WireError: the body has not exactly as many bytes as shape and dtype say.
    """
    element = numpy_dtype(dtype)
    expected = element.itemsize * math.prod(shape)
    if len(body) != expected:
        raise WireError(
            f"body has {len(body)} bytes, expected {expected}"
            f" for shape {','.join(map(str, shape))} of {dtype}",
            field="Content-Length",
        )
    return np.ndarray(shape, element, body)
