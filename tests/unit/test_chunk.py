"""Whole messages: header fields and body to a tensor and back, bit for bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from meshnet.chunk import read_answer, read_chunk
from meshnet.codec import compress
from meshnet.dtypes import view_bytes
from meshnet.errors import Code, WireError
from meshnet.topology import SessionId
from meshnet.wire import AnswerHeader, ChunkHeader, WireLimits, pack_answer, pack_chunk
from tests.vectors.load import load_activation

SESSION = SessionId("8d7f2f0a-0000-4000-8000-000000000000")


def sent(tensor: np.ndarray, encoding: str | None) -> tuple[list[tuple[str, str]], bytes]:
    """Write a chunk as a caller does."""
    dtype = "bfloat16" if tensor.dtype == ml_dtypes.bfloat16 else tensor.dtype.name
    header = ChunkHeader(shape=tensor.shape, dtype=dtype, session=SESSION, encoding=encoding)
    raw = view_bytes(tensor)
    return pack_chunk(header), compress(encoding, raw) if encoding else bytes(raw)


@pytest.mark.parametrize("encoding", [None, "zstd"])
def test_every_bfloat16_crosses_bit_for_bit(encoding: str | None) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).reshape(1, 64, 1024)

    chunk = read_chunk(*sent(bits.view(ml_dtypes.bfloat16), encoding))

    assert chunk.tensor.dtype == ml_dtypes.bfloat16
    assert np.array_equal(chunk.tensor.view(np.uint16), bits)


@pytest.mark.parametrize("encoding", [None, "zstd"])
@pytest.mark.parametrize(
    "layout",
    [
        lambda array: array.T,
        lambda array: array[::2, ::-1],
        lambda array: array[:, 1:3],
        np.asfortranarray,
        lambda array: np.broadcast_to(array[0], (3, 4)),
    ],
    ids=["transposed", "strided", "sliced", "column-major", "broadcast"],
)
def test_any_layout_is_sent_row_major(layout, encoding: str | None) -> None:
    bits = np.arange(0x7F7A, 0x7F7A + 16, dtype=np.uint16).reshape(4, 4)  # across inf and NaNs
    tensor = layout(bits.view(ml_dtypes.bfloat16))

    chunk = read_chunk(*sent(tensor, encoding))

    assert chunk.tensor.flags.c_contiguous
    assert np.array_equal(chunk.tensor.view(np.uint16), layout(bits))


def test_transposed_two_by_two() -> None:
    tensor = np.array([[1, 3], [2, 4]], dtype=ml_dtypes.bfloat16).T

    assert sent(tensor, None)[1] == bytes.fromhex("803f004040408040")


@pytest.mark.parametrize("encoding", [None, "zstd"])
def test_real_activation(encoding: str | None) -> None:
    bits = load_activation("smollm2_prefill_ml_zh_L25_c1.npy")[np.newaxis]
    headers, body = sent(bits.view(ml_dtypes.bfloat16), encoding)

    chunk = read_chunk(headers, body)

    assert chunk.wire_bytes == len(body)
    assert chunk.header.num_tokens == 128
    assert np.array_equal(chunk.tensor.view(np.uint16), bits)


def test_raw_tensor_views_the_body() -> None:
    headers, body = sent(np.ones((1, 1, 8), dtype=ml_dtypes.bfloat16), None)
    buffer = bytearray(body)

    chunk = read_chunk(headers, memoryview(buffer))
    buffer[:2] = b"\x00\x40"

    assert chunk.tensor[0, 0, 0] == 2


def test_limits_hold_for_encoded_bodies() -> None:
    headers, body = sent(np.zeros((1, 1, 1024), dtype=ml_dtypes.bfloat16), "zstd")

    with pytest.raises(WireError) as caught:
        read_chunk(headers, body, WireLimits(max_chunk_bytes=2047))
    assert caught.value.code is Code.TOO_LARGE


@pytest.mark.parametrize("encoding", [None, "zstd"])
def test_answer(encoding: str | None) -> None:
    tensor = np.array([[[42, 3.5], [-1, 4]]], dtype=np.float32)
    raw = tensor.tobytes()
    header = AnswerHeader(tensor.shape, "float32", SESSION, encoding=encoding)

    answer = read_answer(pack_answer(header), compress(encoding, raw) if encoding else raw)

    assert answer.header == header
    assert np.array_equal(answer.tensor, tensor)


def test_answer_without_tensor() -> None:
    headers = pack_answer(AnswerHeader(None, None, SESSION))

    assert read_answer(headers, b"").tensor is None
    with pytest.raises(WireError, match="3 bytes") as caught:
        read_answer(headers, b"abc")
    assert caught.value.field == "X-Meshnet-Shape"
