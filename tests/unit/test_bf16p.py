"""bf16p: exact on every bit pattern, strict with every body, and what it gives."""

from __future__ import annotations

import json
import random
import statistics
import struct
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.codec import compress, decompress, max_body_bytes
from meshnet.errors import Code, WireError
from tests.together import run_together
from tests.vectors.load import HERE, load_activation

MANIFEST = json.loads((HERE / "activations" / "manifest.json").read_text())
PREFILLS = [entry for entry in MANIFEST if "_prefill_" in entry["file"]]
SPECIAL = np.frombuffer(bytes.fromhex("807f80ffc07fc1ff817f008001007f7f"), np.uint16)
REAL = load_activation("smollm2_prefill_en_gpl_L15_c0.npy")


def encode(values: np.ndarray, level: int = 1) -> bytes:
    return bytes(compress("bf16p", values.tobytes(), level, width=values.shape[-1]))


def decode(body: bytes, values: np.ndarray) -> bytes:
    return bytes(decompress("bf16p", body, values.nbytes, values.shape[-1]))


def fault_of(body: bytes, num_bytes: int, width: int | None) -> str:
    with pytest.raises(WireError) as caught:
        decompress("bf16p", body, num_bytes, width)
    assert caught.value.field == "X-Meshnet-Encoding"
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert len(caught.value.message) < 300
    return caught.value.message


# --- round trips


@pytest.mark.parametrize("level", [0, 1, 22])
@pytest.mark.parametrize(
    "shape",
    [(1, 8), (1, 1), (8, 1), (63, 64), (64, 64), (200, 17), (300, 1152), (3, 70_000), (2, 140_001)],
)
def test_random_bits_of_any_shape(shape: tuple[int, int], level: int) -> None:
    values = np.random.default_rng(1).integers(0, 1 << 16, shape, np.uint16)

    body = encode(values, level)

    assert decode(body, values) == values.tobytes()
    assert len(body) <= max_body_bytes("bf16p", values.nbytes)


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("width", [1, 8, 256, 65_536])
def test_every_bfloat16_crosses_identically(width: int, level: int) -> None:
    values = np.tile(np.arange(1 << 16, dtype=np.uint16), 2).reshape(-1, width)

    assert decode(encode(values, level), values) == values.tobytes()


def test_special_values() -> None:
    values = np.tile(SPECIAL, (100, 3))  # infinities, NaNs with payloads, -0, subnormals

    assert decode(encode(values), values) == values.tobytes()


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_sources_of_any_kind(make) -> None:
    data = make(REAL.tobytes())

    assert bytes(compress("bf16p", data, width=576)) == encode(REAL)
    assert bytes(decompress("bf16p", make(encode(REAL)), REAL.nbytes, 576)) == REAL.tobytes()


def test_bodies_do_not_share_memory_with_later_ones() -> None:
    first = compress("bf16p", REAL.tobytes(), width=576)
    kept, out = bytes(first), decompress("bf16p", first, REAL.nbytes, 576)
    compress("bf16p", bytes(REAL.nbytes), width=576)
    decompress("bf16p", encode(REAL ^ 1), REAL.nbytes, 576)

    assert first == kept
    assert out == REAL.tobytes()


def test_empty_tensor() -> None:
    assert decompress("bf16p", compress("bf16p", b"", width=4), 0, 4) == b""


@pytest.mark.parametrize(("num_bytes", "width"), [(16, None), (16, 3), (15, 1), (16, 0), (16, -8)])
def test_what_is_not_rows_of_bfloat16_is_not_encoded(num_bytes: int, width: int | None) -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        compress("bf16p", bytes(num_bytes), width=width)


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 40), st.integers(1, 90), st.integers(0, 1))
def test_any_tensor_crosses(data: st.DataObject, width: int, rows: int, level: int) -> None:
    kinds = st.sampled_from([0, 0x8000, 0x7F80, 0xFFC1, 0x3F80]) | st.integers(0, 0xFFFF)
    seed = data.draw(st.lists(kinds, min_size=1, max_size=20))
    values = np.resize(np.array(seed, np.uint16), (rows, width))

    assert decode(encode(values, level), values) == values.tobytes()


# --- the layout, as the document gives it


def by_hand(values: np.ndarray, *, base: bytes = b"", rest_as_frame: bool = False) -> bytes:
    """Write a body from the document alone, in one block."""
    rows, width = values.shape
    exponents = (values >> 7 & 0xFF).astype(np.uint8)
    if base:
        exponents = np.frombuffer(base, np.uint8) - exponents
    rest = (values >> 8 & 0x80 | values & 0x7F).astype(np.uint8).tobytes()
    frame = zstandard.ZstdCompressor(level=3).compress(exponents.tobytes())
    rest_frame = zstandard.ZstdCompressor(level=3).compress(rest) if rest_as_frame else b""
    return b"".join(
        [
            struct.pack("<4sBBHII", b"BFP1", 1, bool(base), 17, rows, width),
            base,
            struct.pack("<II", len(frame), len(rest_frame)),
            frame,
            rest_frame or rest,
        ]
    )


@pytest.mark.parametrize("rest_as_frame", [False, True])
@pytest.mark.parametrize("base", [b"", bytes(576), bytes(range(192)) * 3])
def test_a_body_written_from_the_document(base: bytes, rest_as_frame: bool) -> None:
    assert decode(by_hand(REAL, base=base, rest_as_frame=rest_as_frame), REAL) == REAL.tobytes()


def test_a_body_read_by_the_document() -> None:
    body = encode(REAL)
    magic, version, flags, log, rows, width = struct.unpack_from("<4sBBHII", body)
    assert (magic, version, flags, log, rows, width) == (b"BFP1", 1, 1, 17, 128, 576)
    base = np.frombuffer(body, np.uint8, 576, 16)
    length, rest_length = struct.unpack_from("<II", body, 592)
    frame, rest = body[600 : 600 + length], np.frombuffer(body[600 + length :], np.uint8)
    assert rest_length == 0

    parameters = zstandard.get_frame_parameters(frame)
    plane = zstandard.ZstdDecompressor().decompress(frame)
    exponents = base - np.frombuffer(plane, np.uint8).reshape(128, 576)
    rest = rest.reshape(128, 576).astype(np.uint16)
    values = (rest & 0x80) << 8 | exponents.astype(np.uint16) << 7 | rest & 0x7F

    assert (parameters.content_size, parameters.has_checksum) == (REAL.size, True)
    assert np.array_equal(values, REAL)


def test_zeros_and_coarse_values_shrink_in_both_planes() -> None:
    zeros = np.zeros((128, 576), np.uint16)
    assert len(encode(zeros)) < 1024 + 576
    coarse = REAL & 0xFFF0
    assert coarse.nbytes / len(encode(coarse)) > 1.7
    assert decode(encode(coarse), coarse) == coarse.tobytes()


# --- malformed


def changed(at: int, value: bytes, body: bytes) -> bytes:
    return body[:at] + value + body[at + len(value) :]


GOOD = by_hand(REAL)
BAD = {
    "empty": (b"", "ends after 0 bytes; expected at least 16"),
    "a zstd frame": (zstandard.compress(REAL.tobytes()), "expected b'BFP1'"),
    "magic": (changed(0, b"BFP2", GOOD), "b'BFP2'"),
    "version": (changed(4, b"\2", GOOD), "version 2; expected"),
    "flags": (changed(5, b"\2", GOOD), "flags 0x02"),
    "block size": (changed(6, b"\x10\0", GOOD), "2^16"),
    "rows": (changed(8, b"\x81\0\0\0", GOOD), "129 rows"),
    "fewer rows": (changed(8, b"\x7f\0\0\0", GOOD), "expected at most 73152"),
    "no rows": (changed(8, bytes(4), GOOD), "after the last block"),
    "2^32 - 1 rows": (changed(8, b"\xff" * 4, GOOD), "4294967295 rows"),
    "width": (changed(12, b"\x41\2\0\0", GOOD), "577 values; expected 576"),
    "no width": (changed(12, bytes(4), GOOD), "0 values; expected 576"),
    "length of exponents": (changed(16, b"\xff" * 4, GOOD), "expected at least"),
    "no exponents": (changed(16, bytes(4), GOOD), "expected one frame"),
    "length of the rest": (changed(20, b"\xff" * 4, GOOD), "expected at least"),
    "rest that is no frame": (changed(20, struct.pack("<I", REAL.size), GOOD), "no zstd frame"),
    "base that is not there": (changed(5, b"\1", GOOD), "X-Meshnet-Encoding"),
    "truncated by one": (GOOD[:-1], "expected at least"),
    "truncated in the base": (changed(5, b"\1", GOOD)[:100], "expected at least 592"),
    "trailing byte": (GOOD + b"\0", "1 bytes after the last block"),
}


@pytest.mark.parametrize(("body", "says"), BAD.values(), ids=BAD.keys())
def test_malformed_body(body: bytes, says: str) -> None:
    assert says in fault_of(body, REAL.nbytes, 576)
    assert decode(GOOD, REAL) == REAL.tobytes()


def block(frame: bytes, rest: bytes = b"12345678", rest_length: int = 0) -> bytes:
    head = struct.pack("<4sBBHII", b"BFP1", 1, 0, 17, 1, 8)
    return head + struct.pack("<II", len(frame), rest_length) + frame + rest


def unsized(data: bytes) -> bytes:
    stream = zstandard.ZstdCompressor().compressobj()
    return stream.compress(data) + stream.flush()


FRAME = zstandard.compress(b"abcdefgh")
SKIPPABLE = bytes.fromhex("502a4d180400000074657374")
BAD_FRAMES = {
    "another size": zstandard.compress(b"abcdefg"),
    "one byte more": zstandard.compress(b"abcdefghi"),
    "size not stated": unsized(b"abcdefgh"),
    "two frames": zstandard.compress(b"abcd") + zstandard.compress(b"efgh"),
    "an empty frame too": FRAME + zstandard.compress(b""),
    "skippable first": SKIPPABLE + FRAME,
    "skippable last": FRAME + SKIPPABLE,
    "trailing byte": FRAME + b"\0",
    "truncated": FRAME[:-1],
    "claims 1 TiB": bytes.fromhex("28b52ffdc0000000000000010000410000803f004040408040"),
    "dictionary": bytes.fromhex("28b52ffd210108410000") + b"abcdefgh",
}


@pytest.mark.parametrize("frame", BAD_FRAMES.values(), ids=BAD_FRAMES.keys())
def test_planes_that_are_not_one_frame_of_their_size(frame: bytes) -> None:
    fault_of(block(frame), 16, 8)
    fault_of(block(FRAME, frame, len(frame)), 16, 8)


def test_planes_of_one_block() -> None:
    assert decompress("bf16p", block(FRAME), 16, 8) == decompress(
        "bf16p", block(FRAME, zstandard.compress(b"12345678"), 17), 16, 8
    )


def test_a_flipped_bit_in_the_exponents_never_passes() -> None:
    body = bytearray(encode(REAL))
    (length,) = struct.unpack_from("<I", body, 16 + 576)
    rng = random.Random(2)
    passed = 0
    for _ in range(200):
        at, flip = 16 + 576 + 8 + rng.randrange(length), 1 << rng.randrange(8)
        body[at] ^= flip
        try:
            passed += decode(bytes(body), REAL) != REAL.tobytes()
        except WireError as error:
            assert error.field == "X-Meshnet-Encoding"  # noqa: PT017 -- either outcome is right
        body[at] ^= flip
    assert passed == 0


@pytest.mark.parametrize("num_bytes", [146_304, 147_454, 147_458, 294_912])
def test_another_size_than_the_tensors(num_bytes: int) -> None:
    message = fault_of(GOOD, num_bytes, 576)

    assert str(num_bytes) in message


def test_tensors_of_other_dtypes() -> None:
    assert "bfloat16" in fault_of(GOOD, REAL.nbytes, None)


def test_truncated_anywhere() -> None:
    body = encode(REAL[:4])
    for length in range(len(body)):
        fault_of(body[:length], REAL[:4].nbytes, 576)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=120), st.integers(1, 20), st.integers(0, 20))
def test_any_bytes_give_a_tensor_or_a_wire_error(junk: bytes, width: int, rows: int) -> None:
    for body in (junk, struct.pack("<4sBBHII", b"BFP1", 1, 0, 17, rows, width) + junk):
        try:
            assert len(decompress("bf16p", body, 2 * rows * width, width)) == 2 * rows * width
        except WireError as error:
            assert error.field in ("X-Meshnet-Encoding", "Content-Length")  # noqa: PT017


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_change_gives_a_tensor_or_a_wire_error(data: st.DataObject) -> None:
    values = REAL[: data.draw(st.sampled_from([1, 70]))]
    body = bytearray(encode(values))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, 700) | st.integers(0, len(body) - 1))
        body[at % len(body)] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(body)) | st.just(len(body)))
    try:
        assert len(decode(bytes(body[:cut]), values)) == values.nbytes
    except WireError as error:
        assert error.field == "X-Meshnet-Encoding"  # noqa: PT017 -- either outcome is right


def test_hostile_claims_take_no_memory() -> None:
    limit = 256 << 20
    head = struct.pack("<4sBBHII", b"BFP1", 1, 0, 17, limit // 1152, 576)
    hostile = [
        head,
        head + struct.pack("<II", 100, 0) + bytes(100),
        head + struct.pack("<II", len(FRAME), 0) + FRAME + bytes(1 << 17),
        struct.pack("<4sBBHII", b"BFP1", 1, 0, 17, 1, limit // 2) + struct.pack("<II", 1, 1),
    ]
    tracemalloc.start()
    try:
        for body in hostile:
            for width in (576, limit // 2):
                with pytest.raises(WireError):
                    decompress("bf16p", body, limit, width)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_temporaries_are_bounded() -> None:
    values = np.tile(REAL, (60, 1))
    encode(REAL)
    tracemalloc.start()
    try:
        body = compress("bf16p", values.data.cast("B"), width=576)
        assert tracemalloc.get_traced_memory()[1] < 1.1 * values.nbytes + (1 << 20)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        decompress("bf16p", body, values.nbytes, 576)
        assert tracemalloc.get_traced_memory()[1] - before < values.nbytes + (1 << 20)
    finally:
        tracemalloc.stop()


# --- threads


def test_contexts_are_not_shared_between_threads() -> None:
    arrays = [load_activation(entry["file"]) for entry in MANIFEST]
    faults: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(40):
            values = rng.choice(arrays)
            if decode(encode(values), values) != values.tobytes():
                faults.append(f"thread {seed} got wrong bytes")

    run_together(work)
    assert faults == []


# --- what it gives on real activations


@pytest.mark.parametrize("entry", PREFILLS, ids=lambda entry: entry["file"])
def test_ratio_on_real_activations(entry) -> None:
    """Run with ``pytest -k bf16p -s`` to see the figures."""
    values = load_activation(entry["file"])
    ratio = values.nbytes / len(encode(values))
    plain = values.nbytes / len(compress("zstd", values.tobytes()))

    print(f"\n{entry['file']}: {ratio:.4f}, {ratio / plain:.4f} of zstd's")
    assert ratio == pytest.approx(entry["bf16p_ratio"], rel=0.01)
    assert ratio >= 1.14 * plain


def test_median_ratio_on_real_activations() -> None:
    arrays = [load_activation(entry["file"]) for entry in PREFILLS]

    gains = [len(compress("zstd", a.tobytes())) / len(encode(a)) for a in arrays]

    assert statistics.median(gains) >= 1.165


def test_an_encoder_is_not_needed_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "zstandard", None)
    monkeypatch.setattr("meshnet.bf16p._idle_spaces", [])

    assert "cannot be read on this node" in fault_of(GOOD, REAL.nbytes, 576)
