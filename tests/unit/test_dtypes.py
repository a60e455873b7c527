"""Element types of the wire and their bytes."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np
import pytest

from meshnet.dtypes import (
    DTYPES,
    item_size,
    numpy_dtype,
    require_little_endian,
    to_bfloat16,
    view_bytes,
)


@pytest.mark.parametrize(
    ("name", "dtype", "size"),
    [("bfloat16", ml_dtypes.bfloat16, 2), ("int32", np.int32, 4), ("float32", np.float32, 4)],
)
def test_names(name: str, dtype: type, size: int) -> None:
    assert numpy_dtype(name) == np.dtype(dtype)
    assert item_size(name) == size
    assert numpy_dtype(name).newbyteorder("<") == numpy_dtype(name)


def test_no_other_names() -> None:
    assert list(DTYPES) == ["bfloat16", "int32", "float32"]
    with pytest.raises(KeyError):
        numpy_dtype("float16")


@pytest.mark.parametrize(
    ("value", "bits"),
    [
        (0x3F800000, 0x3F80),  # 1
        (0x3F808000, 0x3F80),  # halfway, to even below
        (0x3F818000, 0x3F82),  # halfway, to even above
        (0x3F808001, 0x3F81),  # just over halfway
        (0x80000000, 0x8000),  # -0
        (0x00000001, 0x0000),  # the smallest subnormal vanishes
        (0x00010000, 0x0001),  # a subnormal of bfloat16
        (0x7F7FFFFF, 0x7F80),  # the largest float32 rounds to infinity
        (0xFF800000, 0xFF80),  # -infinity
    ],
)
def test_rounding(value: int, bits: int) -> None:
    out = np.empty(1, dtype=ml_dtypes.bfloat16)

    to_bfloat16(np.array([value], dtype=np.uint32).view(np.float32), out)

    assert out.view(np.uint16)[0] == bits


def test_nan_stays_nan() -> None:
    out = np.empty(1, dtype=ml_dtypes.bfloat16)

    to_bfloat16(np.array([np.nan], dtype=np.float32), out)

    assert np.isnan(out[0])


@pytest.mark.parametrize("name", DTYPES)
def test_bytes_of_a_contiguous_tensor_are_a_view(name: str) -> None:
    tensor = np.zeros((1, 2, 3), dtype=numpy_dtype(name))

    view = view_bytes(tensor)

    assert view.format == "B"
    assert view.nbytes == tensor.nbytes
    assert np.shares_memory(np.frombuffer(view, np.uint8), tensor)


def test_bytes_of_other_layouts_are_row_major() -> None:
    tensor = np.array([[1, 3], [2, 4]], dtype=ml_dtypes.bfloat16).T
    assert bytes(view_bytes(tensor)) == bytes.fromhex("803f004040408040")

    big_endian = np.array([1, 256], dtype=">i4")
    assert bytes(view_bytes(big_endian)) == bytes.fromhex("0100000000010000")


def test_bytes_of_an_empty_tensor() -> None:
    assert bytes(view_bytes(np.zeros((1, 0, 8), dtype=ml_dtypes.bfloat16))) == b""


def test_big_endian_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    require_little_endian()
    monkeypatch.setattr(sys, "byteorder", "big")
    with pytest.raises(RuntimeError, match="little-endian"):
        require_little_endian()
