"""Header fields of the activation plane to chunk headers and back (sans-IO).

Bodies are `meshnet.codec`'s; errors on the wire are `meshnet.problem`'s.
Source: proto/WIRE.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from dataclasses import fields as fields_of
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt

from meshnet.dtypes import BFLOAT16, FLOAT32, INT32, item_size, numpy_dtype
from meshnet.errors import Code, WireError
from meshnet.grammar import (
    Phase,
    Want,
    format_route,
    parse_count,
    parse_dtype,
    parse_encoding,
    parse_encodings,
    parse_phase,
    parse_positive,
    parse_route,
    parse_session,
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

WIRE_VERSION: Final = 2
OCTET_STREAM: Final = "application/octet-stream"
_IMPOSSIBLE_BYTES: Final = 1 << 40  # no setting reaches it: a shape's fault, not a limit's

Headers = Iterable[tuple[str, str]]
"""Header fields in order, names in any case; a name that repeats is kept as often as it came."""


@dataclass(frozen=True, slots=True)
class WireLimits:
    """What a receiver accepts, checked before anything is allocated.

    Attributes:
        max_chunk_bytes: largest decoded tensor, in bytes.
    """

    max_chunk_bytes: int = 256 * 1024 * 1024


DEFAULT_LIMITS: Final = WireLimits()


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """Everything that a request's header says of its chunk.

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

    @property
    def num_tokens(self) -> int:
        """Token positions in the chunk: the second dimension, or the only one."""
        return self.shape[1] if len(self.shape) > 1 else self.shape[0]

    @property
    def num_bytes(self) -> int:
        """Bytes of the decoded tensor, in unbounded integers."""
        return _num_bytes(self.shape, self.dtype)

    @property
    def width(self) -> int | None:
        """Values in a row of a bfloat16 tensor, for `meshnet.codec`; None for other dtypes."""
        return self.shape[-1] if self.dtype == BFLOAT16 else None

    def at(self, position: int | None) -> ChunkHeader:
        """Give the same header at another position; a third of the time of `replace`."""
        moved = object.__new__(ChunkHeader)
        for get, put in _CHUNK_SLOTS:
            put(moved, get(self))
        _PUT_POSITION(moved, position)
        return moved


_CHUNK_SLOTS: Final = tuple(
    (slot.__get__, slot.__set__)
    for slot in (vars(ChunkHeader)[field.name] for field in fields_of(ChunkHeader))
)
_PUT_POSITION: Final = vars(ChunkHeader)["position"].__set__


@dataclass(frozen=True, slots=True)
class AnswerHeader:
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
        return _num_bytes(self.shape, self.dtype)

    @property
    def width(self) -> int | None:
        """Values in a row of a bfloat16 tensor, for `meshnet.codec`; None for other dtypes."""
        return self.shape[-1] if self.shape is not None and self.dtype == BFLOAT16 else None

    def timed(self, server_timing: str) -> AnswerHeader:
        """Give the same header with another Server-Timing; faster than `replace`."""
        return AnswerHeader(
            self.shape,
            self.dtype,
            self.session,
            self.chunk_index,
            self.chunk_total,
            self.encoding,
            server_timing,
            self.accept_encoding,
        )


def unpack_chunk(headers: Headers, limits: WireLimits = DEFAULT_LIMITS) -> ChunkHeader:
    """Read the header fields of one POST /forward.

    The body must then decode to exactly `ChunkHeader.num_bytes` bytes, which is
    within the limits.

    Raises:
        WireError: for the first header at fault, named in ``field``: 400, or 413 for a
            tensor over `WireLimits.max_chunk_bytes`, 415 for another media type.
    """
    fields = _collect(headers)
    _check_version(fields)
    _check_media_type(fields)
    shape = _required(fields, "X-Meshnet-Shape", parse_shape)
    dtype = _required(fields, "X-Meshnet-Dtype", parse_dtype)
    if dtype == FLOAT32:
        raise _fault("X-Meshnet-Dtype", dtype, "bfloat16 (hidden states) or int32 (token ids)")
    if dtype == INT32 and len(shape) > 2:
        raise _fault("X-Meshnet-Shape", fields["x-meshnet-shape"], "BATCH,SEQ for int32 token ids")
    _check_size(shape, dtype, limits)
    session, index, total = _identity(fields)
    tokens = shape[1] if len(shape) > 1 else shape[0]
    implied = Phase.PREFILL if total > 1 or tokens > 1 else Phase.DECODE
    return ChunkHeader(
        shape=shape,
        dtype=dtype,
        session=session,
        chunk_index=index,
        chunk_total=total,
        encoding=_optional(fields, "X-Meshnet-Encoding", parse_encoding),
        position=_optional(fields, "X-Meshnet-Position", parse_count),
        layers=_optional(fields, "X-Meshnet-Layers", parse_wire_layers),
        phase=_optional(fields, "X-Meshnet-Phase", parse_phase) or implied,
        want=_optional(fields, "X-Meshnet-Want", parse_want),
        accept_encoding=_optional(fields, "X-Meshnet-Accept-Encoding", parse_encodings) or (),
        route=_optional(fields, "X-Meshnet-Route", parse_route) or (),
        max_tokens=_optional(fields, "X-Meshnet-Max-Tokens", parse_positive),
        traceparent=_optional(fields, "traceparent", parse_traceparent),
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
    return fields


def unpack_answer(headers: Headers, limits: WireLimits = DEFAULT_LIMITS) -> AnswerHeader:
    """Read the header fields of a 200 or 204 answer.

    Raises:
        WireError: as `unpack_chunk`; every dtype of the wire is accepted.
    """
    fields = _collect(headers)
    _check_version(fields)
    session, index, total = _identity(fields)
    shape = _optional(fields, "X-Meshnet-Shape", parse_shape)
    dtype = None
    if shape is not None:
        dtype = _required(fields, "X-Meshnet-Dtype", parse_dtype)
        _check_size(shape, dtype, limits)
    return AnswerHeader(
        shape=shape,
        dtype=dtype,
        session=session,
        chunk_index=index,
        chunk_total=total,
        encoding=_optional(fields, "X-Meshnet-Encoding", parse_encoding),
        server_timing=fields.get("server-timing", ""),
        accept_encoding=_optional(fields, "X-Meshnet-Accept-Encoding", parse_encodings) or (),
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
    expected = _num_bytes(shape, dtype)
    if len(body) != expected:
        raise WireError(
            f"body has {len(body)} bytes, expected {expected}"
            f" for shape {','.join(map(str, shape))} of {dtype}",
            field="Content-Length",
        )
    return np.frombuffer(body, dtype=numpy_dtype(dtype)).reshape(shape)


_T = TypeVar("_T")


def _collect(headers: Headers) -> dict[str, str]:
    """Lower the names of the header fields that this module reads; a repeated one is refused."""
    fields: dict[str, str] = {}
    for name, value in headers:
        key = name.lower()
        if key not in _KNOWN:
            continue
        if key in fields:
            raise WireError(f"{_KNOWN[key]} is given more than once", field=_KNOWN[key])
        fields[key] = value.strip(" \t")
    return fields


def _required(fields: dict[str, str], name: str, parse: Callable[[str], _T]) -> _T:
    value = _optional(fields, name, parse)
    if value is None:
        raise WireError(f"{name} is missing", field=name)
    return value


def _optional(fields: dict[str, str], name: str, parse: Callable[[str], _T]) -> _T | None:
    text = fields.get(name.lower())
    if text is None:
        return None
    try:
        return parse(text)
    except ValueError as error:
        raise _fault(name, text, str(error)) from None


def _fault(name: str, value: str, expected: str) -> WireError:
    shown = value if len(value) <= 80 else value[:77] + "..."
    return WireError(f"{name}: {shown!r}; expected {expected}", field=name)


def _check_version(fields: dict[str, str]) -> None:
    version = fields.get("x-meshnet-wire", str(WIRE_VERSION))
    if version != str(WIRE_VERSION):
        raise _fault("X-Meshnet-Wire", version, f"one of the versions spoken here: {WIRE_VERSION}")


def _check_media_type(fields: dict[str, str]) -> None:
    media_type = fields.get("content-type", OCTET_STREAM).partition(";")[0].strip().lower()
    if media_type == "application/json":
        raise WireError(
            "Content-Type: application/json; the base64 JSON body is retired, expected"
            f" {OCTET_STREAM} with the tensor's raw bytes and X-Meshnet-* headers (proto/WIRE.md)",
            field="Content-Type",
        )
    if media_type != OCTET_STREAM:
        raise WireError(
            f"Content-Type: {media_type!r}; expected {OCTET_STREAM}",
            field="Content-Type",
            code=Code.UNSUPPORTED_MEDIA_TYPE,
        )


def _check_size(shape: tuple[int, ...], dtype: str, limits: WireLimits) -> None:
    num_bytes = _num_bytes(shape, dtype)
    if num_bytes >= _IMPOSSIBLE_BYTES:
        raise WireError(
            f"X-Meshnet-Shape: {','.join(map(str, shape))} of {dtype} is {num_bytes} bytes;"
            f" expected fewer than {_IMPOSSIBLE_BYTES}",
            field="X-Meshnet-Shape",
        )
    if num_bytes > limits.max_chunk_bytes:
        raise WireError(
            f"X-Meshnet-Shape: {','.join(map(str, shape))} of {dtype} is {num_bytes} bytes;"
            f" expected at most {limits.max_chunk_bytes} (max_chunk_bytes)",
            field="X-Meshnet-Shape",
            code=Code.TOO_LARGE,
        )


def _num_bytes(shape: tuple[int, ...], dtype: str) -> int:
    return item_size(dtype) * math.prod(shape)


def _identity(fields: dict[str, str]) -> tuple[SessionId, int, int]:
    session = _required(fields, "X-Meshnet-Session", parse_session)
    index = _required(fields, "X-Meshnet-Chunk-Index", parse_count)
    total = _required(fields, "X-Meshnet-Chunk-Total", parse_positive)
    if index >= total:
        raise _fault("X-Meshnet-Chunk-Index", str(index), f"less than the total, {total}")
    return session, index, total


_KNOWN: Final = {
    name.lower(): name
    for name in (
        "Content-Type",
        "X-Meshnet-Wire",
        "X-Meshnet-Shape",
        "X-Meshnet-Dtype",
        "X-Meshnet-Session",
        "X-Meshnet-Chunk-Index",
        "X-Meshnet-Chunk-Total",
        "X-Meshnet-Encoding",
        "X-Meshnet-Position",
        "X-Meshnet-Layers",
        "X-Meshnet-Phase",
        "X-Meshnet-Want",
        "X-Meshnet-Accept-Encoding",
        "X-Meshnet-Route",
        "X-Meshnet-Max-Tokens",
        "traceparent",
        "Server-Timing",
    )
}
