"""Header fields to chunk and answer headers and back; what the vectors cannot say."""

from __future__ import annotations

import time

import numpy as np
import pytest

from meshnet.errors import Code, WireError
from meshnet.grammar import Phase, Want
from meshnet.topology import Hop, LayerRange, NodeId, SessionId
from meshnet.wire import (
    AnswerHeader,
    ChunkHeader,
    WireLimits,
    pack_answer,
    pack_chunk,
    unpack_answer,
    unpack_chunk,
    view_tensor,
)

SESSION = SessionId("8d7f2f0a-0000-4000-8000-000000000000")
SMALLEST = ChunkHeader(shape=(1, 1, 8), dtype="bfloat16", session=SESSION)
FULL = ChunkHeader(
    shape=(1, 128, 16384),
    dtype="bfloat16",
    session=SESSION,
    chunk_index=3,
    chunk_total=16,
    encoding="zstd",
    position=384,
    layers=LayerRange(10, 20),
    phase=Phase.PREFILL,
    want=Want("top", 20),
    accept_encoding=("zstd", "bf16p"),
    route=(Hop(NodeId("beta"), "10.0.0.2:7080", LayerRange(20, 30)),),
    max_tokens=2048,
    traceparent=f"00-{'a' * 32}-{'b' * 16}-01",
)


def replace(header: ChunkHeader, name: str, value: str | None) -> list[tuple[str, str]]:
    fields = [(key, text) for key, text in pack_chunk(header) if key != name]
    return fields if value is None else [*fields, (name, value)]


@pytest.mark.parametrize("header", [SMALLEST, FULL], ids=["smallest", "full"])
def test_chunk_round_trip(header: ChunkHeader) -> None:
    assert unpack_chunk(pack_chunk(header)) == header


def test_fields_as_they_are_written() -> None:
    assert pack_chunk(FULL) == [
        ("Content-Type", "application/octet-stream"),
        ("X-Meshnet-Wire", "2"),
        ("X-Meshnet-Shape", "1,128,16384"),
        ("X-Meshnet-Dtype", "bfloat16"),
        ("X-Meshnet-Session", SESSION),
        ("X-Meshnet-Chunk-Index", "3"),
        ("X-Meshnet-Chunk-Total", "16"),
        ("X-Meshnet-Encoding", "zstd"),
        ("X-Meshnet-Position", "384"),
        ("X-Meshnet-Layers", "10-20"),
        ("X-Meshnet-Phase", "prefill"),
        ("X-Meshnet-Want", "top-20"),
        ("X-Meshnet-Accept-Encoding", "zstd, bf16p"),
        ("X-Meshnet-Route", "beta@10.0.0.2:7080/20-30"),
        ("X-Meshnet-Max-Tokens", "2048"),
        ("traceparent", f"00-{'a' * 32}-{'b' * 16}-01"),
    ]


def test_sizes() -> None:
    assert FULL.num_tokens == 128
    assert FULL.num_bytes == 4 << 20
    flat = ChunkHeader(shape=(8,), dtype="int32", session=SESSION)
    assert (flat.num_tokens, flat.num_bytes) == (8, 32)


@pytest.mark.parametrize(
    ("shape", "total", "phase"),
    [
        ("1,1,8", "1", Phase.DECODE),
        ("1,2,8", "1", Phase.PREFILL),
        ("1,1,8", "2", Phase.PREFILL),
        ("1", "1", Phase.DECODE),
        ("2", "1", Phase.PREFILL),
        ("4,1,8", "1", Phase.DECODE),
    ],
)
def test_implied_phase(shape: str, total: str, phase: Phase) -> None:
    fields = dict(pack_chunk(SMALLEST))
    del fields["X-Meshnet-Phase"]
    fields |= {"X-Meshnet-Shape": shape, "X-Meshnet-Chunk-Total": total}

    assert unpack_chunk(fields.items()).phase is phase


@pytest.mark.parametrize("name", [key for key, _ in pack_chunk(FULL)])
def test_any_field_given_twice(name: str) -> None:
    fields = pack_chunk(FULL)
    fields.append((name.upper(), dict(fields)[name]))

    with pytest.raises(WireError, match="more than once") as caught:
        unpack_chunk(fields)
    assert caught.value.field == name


@pytest.mark.parametrize("name", [key for key, _ in pack_chunk(FULL) if key.startswith("X-")])
@pytest.mark.parametrize("value", ["", "\0", "é", "1" * 70_000, "a, b;c", "\r\nX-Evil: 1"])
def test_nonsense_names_the_header_briefly(name: str, value: str) -> None:
    with pytest.raises(WireError) as caught:
        unpack_chunk(replace(FULL, name, value))

    assert caught.value.field == name
    assert caught.value.message.startswith(name)
    assert len(caught.value.message) < 400
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["Shape", "Dtype", "Session", "Chunk-Index", "Chunk-Total"])
def test_required(name: str) -> None:
    with pytest.raises(WireError, match="missing") as caught:
        unpack_chunk(replace(FULL, f"X-Meshnet-{name}", None))
    assert caught.value.field == f"X-Meshnet-{name}"


@pytest.mark.parametrize(
    ("shape", "code"),
    [
        ("1,1,512", None),
        ("1,1,513", Code.TOO_LARGE),
        ("1,1,549755813887", Code.TOO_LARGE),
        ("1,1,549755813888", Code.INVALID_ARGUMENT),
        ("4294967296,4294967296", Code.INVALID_ARGUMENT),
        (",".join(["9" * 20] * 8), Code.INVALID_ARGUMENT),
    ],
)
def test_size_limits(shape: str, code: Code | None) -> None:
    fields = replace(SMALLEST, "X-Meshnet-Shape", shape)
    limits = WireLimits(max_chunk_bytes=1024)

    if code is None:
        assert unpack_chunk(fields, limits).num_bytes == 1024
        return
    started = time.perf_counter()
    with pytest.raises(WireError) as caught:
        unpack_chunk(fields, limits)
    assert time.perf_counter() - started < 1
    assert caught.value.code is code
    assert caught.value.field == "X-Meshnet-Shape"
    assert ("1024" in caught.value.message) == (code is Code.TOO_LARGE)


@pytest.mark.parametrize(
    "header",
    [
        AnswerHeader((1, 1, 8), "bfloat16", SESSION),
        AnswerHeader((1, 21, 2), "float32", SESSION, 2, 3, "zstd", "hop;desc=a;dur=1"),
        AnswerHeader(None, None, SESSION, 0, 1),
        AnswerHeader(None, None, SESSION, accept_encoding=("zstd", "bf16p")),
    ],
)
def test_answer_round_trip(header: AnswerHeader) -> None:
    assert unpack_answer(pack_answer(header)) == header


def test_answer_sizes() -> None:
    assert AnswerHeader((1, 21, 2), "float32", SESSION).num_bytes == 168
    assert AnswerHeader(None, None, SESSION).num_bytes == 0


def test_width_is_of_bfloat16_rows() -> None:
    assert ChunkHeader((1, 3, 8), "bfloat16", SESSION).width == 8
    assert ChunkHeader((1, 3), "int32", SESSION).width is None
    assert AnswerHeader((1, 3, 8), "bfloat16", SESSION).width == 8
    assert AnswerHeader((1, 21, 2), "float32", SESSION).width is None
    assert AnswerHeader(None, None, SESSION).width is None


def test_answer_over_the_callers_limit() -> None:
    fields = pack_answer(AnswerHeader((1, 1, 513), "bfloat16", SESSION))

    with pytest.raises(WireError, match="1026"):
        unpack_answer(fields, WireLimits(max_chunk_bytes=1024))


# --- tensors


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_view_shares_memory(make) -> None:
    body = make(bytes(range(16)))

    tensor = view_tensor(body, (1, 2, 4), "bfloat16")

    assert tensor.shape == (1, 2, 4)
    assert np.shares_memory(tensor, np.frombuffer(body, np.uint8))
    assert tensor.flags.writeable == (make is bytearray)


def test_view_is_row_major_and_little_endian() -> None:
    tensor = view_tensor(bytes.fromhex("803f004040408040"), (2, 2), "bfloat16")

    assert tensor.tolist() == [[1, 2], [3, 4]]
    assert view_tensor(b"\1\0\0\0\0\1\0\0", (1, 2), "int32").tolist() == [[1, 256]]


@pytest.mark.parametrize("length", [0, 15, 17, 32])
def test_view_of_another_length(length: int) -> None:
    with pytest.raises(WireError, match=f"{length} bytes, expected 16") as caught:
        view_tensor(bytes(length), (1, 1, 8), "bfloat16")
    assert caught.value.field == "Content-Length"
