"""Bodies by name under an exact bound; what a hostile body may cost."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
import zstandard

from meshnet.codec import ENCODINGS, compress, decompress, decompress_within, max_body_bytes
from meshnet.dtypes import view_bytes
from meshnet.errors import Code, WireError
from tests.together import run_together
from tests.vectors.load import HERE, load_activation

P16 = bytes.fromhex("803f0040404080400000008080bfc07f")
W1 = bytes.fromhex("807f80ffc07fc1ff817f008001007f7f")
MANIFEST = json.loads((HERE / "activations" / "manifest.json").read_text())


def fault_of(encoding: str | None, body: bytes, num_bytes: int) -> WireError:
    with pytest.raises(WireError) as caught:
        decompress(encoding, body, num_bytes)
    return caught.value


def unsized(data: bytes, **options: int | bool) -> bytes:
    stream = zstandard.ZstdCompressor(level=1, **options).compressobj()
    return stream.compress(data) + stream.flush()


def frame(*blocks: tuple[int, int, bytes], header: str = "28b52ffd0068") -> bytes:
    """Build a frame by hand from (kind, size, content) blocks; 0x68 is a window of 8 MiB."""
    out = bytearray.fromhex(header)
    for index, (kind, size, content) in enumerate(blocks):
        is_last = index == len(blocks) - 1
        out += (size << 3 | kind << 1 | is_last).to_bytes(3, "little") + content
    return bytes(out)


# --- raw


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_raw_is_a_view(make) -> None:
    body = make(P16)

    view = decompress(None, body, 16)

    assert view == P16
    assert np.shares_memory(np.frombuffer(view, np.uint8), np.frombuffer(body, np.uint8))


def test_raw_view_of_wider_items_counts_bytes() -> None:
    assert decompress(None, memoryview(np.arange(8, dtype=np.uint16)), 16).nbytes == 16


@pytest.mark.parametrize("length", [0, 15, 17, 32])
def test_raw_of_another_length(length: int) -> None:
    error = fault_of(None, bytes(length), 16)

    assert error.field == "Content-Length"
    assert error.code is Code.INVALID_ARGUMENT
    assert f"{length} bytes" in error.message
    assert "expected 16" in error.message


# --- names


def test_encodings_named() -> None:
    assert ENCODINGS == ("zstd", "bf16p")


@pytest.mark.parametrize("name", ["br", "identity", "", "ZSTD", "x" * 5000])
def test_unknown_encoding_names_those_known(name: str) -> None:
    error = fault_of(name, P16, 16)

    assert error.field == "X-Meshnet-Encoding"
    assert error.code is Code.INVALID_ARGUMENT
    assert "zstd" in error.message
    assert len(error.message) < 200
    with pytest.raises(WireError, match="zstd"):
        compress(name, P16)


# --- zstd, round trips


@pytest.mark.parametrize("level", [0, 1, 3, 19, 22])
def test_round_trip(level: int) -> None:
    data = load_activation("smollm2_decode_code_py_L15.npy").tobytes()

    assert decompress("zstd", compress("zstd", data, level), len(data)) == data


@pytest.mark.parametrize("level", [-7, -1, 23, 1000])
def test_level_out_of_range(level: int) -> None:
    with pytest.raises(ValueError, match="0 to 22"):
        compress("zstd", P16, level)


def test_frame_carries_size_and_checksum() -> None:
    parameters = zstandard.get_frame_parameters(compress("zstd", P16))

    assert parameters.content_size == 16
    assert parameters.has_checksum


def test_sources_of_any_kind_are_read_in_place() -> None:
    expected = compress("zstd", P16)
    for source in (bytearray(P16), memoryview(P16), memoryview(np.frombuffer(P16, np.uint16))):
        assert compress("zstd", source) == expected


def test_special_bits_cross_identically() -> None:
    tensor = np.frombuffer(W1, dtype=ml_dtypes.bfloat16)

    assert bytes(view_bytes(tensor)) == W1
    assert decompress("zstd", compress("zstd", view_bytes(tensor)), 16) == W1


def test_every_bfloat16_crosses_identically() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    tensor = bits.view(ml_dtypes.bfloat16)

    body = compress("zstd", view_bytes(tensor))

    assert np.array_equal(
        np.frombuffer(decompress("zstd", body, tensor.nbytes), dtype=np.uint16), bits
    )


def test_empty_tensor() -> None:
    assert decompress("zstd", compress("zstd", b""), 0) == b""
    assert decompress("zstd", b"", 0) == b""
    assert decompress(None, b"", 0) == b""


# --- zstd, valid bodies that one-shot decoding refuses


SIZED = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(P16)
EMPTY = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(b"")
SKIPPABLE = bytes.fromhex("502a4d180400000074657374")
VALID = {
    "size not stated": bytes.fromhex("28b52ffd0000810000") + P16,
    "size not stated, checksum": unsized(P16, write_checksum=True),
    "two frames": unsized(P16[:5]) + unsized(P16[5:]),
    "frames and an empty one between": unsized(P16[:5]) + EMPTY + unsized(P16[5:]),
    "skippable first": SKIPPABLE + SIZED,
    "skippable last": SIZED + SKIPPABLE,
    "empty skippable": SIZED + bytes.fromhex("5f2a4d1800000000"),
    "empty frame first": EMPTY + SIZED,
    "empty frame last": SIZED + EMPTY,
    "run-length blocks": frame((1, 16, b"a")),
    "raw and empty blocks": frame((0, 0, b""), (0, 16, P16), (0, 0, b"")),
    "dictionary id 0": bytes.fromhex("28b52ffd2100") + b"\x10\x81\0\0" + P16,
}


def content(body: bytes) -> bytes:
    return b"a" * 16 if body == VALID["run-length blocks"] else P16


def is_spare(tail: bytes) -> bool:
    """Tell whether `tail` is whole frames without content."""
    return tail in (EMPTY, SKIPPABLE, bytes.fromhex("5f2a4d1800000000"))


@pytest.mark.parametrize("body", VALID.values(), ids=VALID.keys())
def test_valid_body(body: bytes) -> None:
    assert decompress("zstd", body, 16) == content(body)


def test_window_as_wide_as_the_tensor() -> None:
    data = random.Random(7).randbytes(9 << 20)

    def body(window_log: int) -> bytes:
        params = zstandard.ZstdCompressionParameters.from_level(1, window_log=window_log)
        stream = zstandard.ZstdCompressor(compression_params=params).compressobj()
        return stream.compress(data) + stream.flush()

    assert decompress("zstd", body(23), len(data)) == data
    assert "16777216" in fault_of("zstd", body(24), len(data)).message
    data += data
    assert decompress("zstd", body(24), len(data)) == data


def test_many_frames_of_real_data() -> None:
    data = load_activation("smollm2_prefill_en_gpl_L15_c0.npy").tobytes()
    pieces = [data[at : at + 10_000] for at in range(0, len(data), 10_000)]
    body = b"".join(
        unsized(piece) if index % 2 else compress("zstd", piece)
        for index, piece in enumerate(pieces)
    )

    assert decompress("zstd", body, len(data)) == data


# --- zstd, malformed


@pytest.mark.parametrize("body", VALID.values(), ids=VALID.keys())
def test_truncated_anywhere(body: bytes) -> None:
    for length in range(len(body)):
        if is_spare(body[length:]):
            assert decompress("zstd", body[:length], 16) == content(body)
        else:
            assert fault_of("zstd", body[:length], 16).field == "X-Meshnet-Encoding"


@pytest.mark.parametrize("tail", [b"\0", b"\x28", b"\x28\xb5\x2f\xfd", b"garbage!", SIZED[:-1]])
@pytest.mark.parametrize("body", VALID.values(), ids=VALID.keys())
def test_trailing_bytes(body: bytes, tail: bytes) -> None:
    assert fault_of("zstd", body + tail, 16).field == "X-Meshnet-Encoding"


@pytest.mark.parametrize("num_bytes", [0, 1, 15, 17, 32, 1 << 20])
@pytest.mark.parametrize("body", VALID.values(), ids=VALID.keys())
def test_too_few_and_too_many_bytes(body: bytes, num_bytes: int) -> None:
    error = fault_of("zstd", body, num_bytes)

    assert error.field == "X-Meshnet-Encoding"
    assert f"expected at most {num_bytes}" in error.message or (
        f"decodes to 16 bytes; expected {num_bytes}" in error.message
    )


def test_flipped_bits_never_pass() -> None:
    data = load_activation("smollm2_decode_code_py_L15.npy")[:4].tobytes()
    body = bytearray(compress("zstd", data))
    rng = random.Random(3)
    passed = 0
    for _ in range(3000):
        bit = rng.randrange(8 * len(body))
        body[bit // 8] ^= 1 << bit % 8
        try:
            passed += bytes(decompress("zstd", body, len(data))) != data
        except WireError as error:
            assert error.field == "X-Meshnet-Encoding"  # noqa: PT017 -- either outcome is right
        body[bit // 8] ^= 1 << bit % 8
    assert passed == 0


def test_checksum_of_a_trailing_empty_frame_is_verified() -> None:
    body = SIZED + EMPTY[:-1] + bytes([EMPTY[-1] ^ 1])

    assert "checksum" in fault_of("zstd", body, 16).message


def test_too_many_blocks() -> None:
    assert decompress("zstd", frame(*[(0, 0, b"")] * 4000, (0, 16, P16)), 16) == P16
    body = frame(*[(0, 0, b"")] * 5000, (0, 16, P16))

    assert "too many blocks" in fault_of("zstd", body, 16).message


def test_body_longer_than_its_tensor_allows() -> None:
    error = fault_of("zstd", bytes(max_body_bytes("zstd", 16) + 1), 16)

    assert error.code is Code.TOO_LARGE
    assert error.field == "Content-Length"
    assert max_body_bytes(None, 16) == 16


@pytest.mark.parametrize("num_bytes", [1, 1152, 128 * 1024, 4 << 20])
def test_incompressible_data_fits_the_longest_body(num_bytes: int) -> None:
    data = random.Random(num_bytes).randbytes(num_bytes)
    body = compress("zstd", data)

    assert len(body) <= max_body_bytes("zstd", num_bytes)
    assert decompress("zstd", body, num_bytes) == data


def test_decoder_works_after_errors() -> None:
    for bad in (SIZED[:-1] + b"x", unsized(P16)[:-1], b"garbage"):
        fault_of("zstd", bad, 16)
        assert decompress("zstd", SIZED, 16) == P16


# --- within a bound


def test_within_gives_what_there_is() -> None:
    for body in VALID.values():
        assert len(decompress_within("zstd", body, 16)) == 16
        assert len(decompress_within("zstd", body, 1 << 20)) == 16
        with pytest.raises(WireError, match="expected at most 15"):
            decompress_within("zstd", body, 15)


# --- threads


def test_contexts_are_not_shared_between_threads() -> None:
    data = [load_activation(entry["file"]).tobytes() for entry in MANIFEST]
    faults: list[str] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            item = rng.choice(data)
            if decompress("zstd", compress("zstd", item), len(item)) != item:
                faults.append(f"thread {seed} got wrong bytes")

    run_together(work)
    assert faults == []


# --- what zstd gives on real activations


@pytest.mark.parametrize("entry", MANIFEST, ids=lambda entry: entry["file"])
def test_zstd_ratio_on_real_activations(entry) -> None:
    """Run with ``pytest -k zstd_ratio -s`` to see the figures."""
    data = load_activation(entry["file"]).tobytes()
    assert hashlib.sha256(data).hexdigest() == entry["sha256"]

    ratio = len(data) / len(compress("zstd", data))

    print(f"\n{entry['file']}: {ratio:.4f}, recorded {entry['zstd1_ratio']}")
    assert ratio == pytest.approx(entry["zstd1_ratio"], rel=0.01)
    assert 1.23 <= ratio <= 1.31


# --- memory

MIB = 1 << 20
HOSTILE = {
    "W8a: 64 MiB of zeros": (
        "zstandard.ZstdCompressor(level=1).compress(bytes(64 << 20))",
        (16, 4 * MIB),
    ),
    "W8b: claims 1 TiB": (
        "bytes.fromhex('28b52ffdc0000000000000010000410000803f004040408040')",
        (16, 4 * MIB),
    ),
    "claims 200 MiB, as its header does, and holds 1 byte": (
        "bytes.fromhex('28b52ffda0') + (200 << 20).to_bytes(4, 'little') + b'\\x09\\0\\0a'",
        (16, 4 * MIB, 200 * MIB),
    ),
    "10 GiB in run-length blocks": (
        "start + (((128 << 10) << 3 | 2).to_bytes(3, 'little') + b'a') * 81920 + end",
        (16, 4 * MIB, 255 * MIB),
    ),
    "10 GiB in compressed blocks": ("start + block * 81920 + end", (16, 4 * MIB)),
    "500 MiB in compressed blocks": ("start + block * 4000 + end", (16, 4 * MIB)),
    "10 GiB in frames that state their size": (
        "zstandard.ZstdCompressor(level=1).compress(bytes(64 << 20)) * 160",
        (16, 4 * MIB, 63 * MIB),
    ),
    "a window of 2 GiB": ("bytes.fromhex('28b52ffd00a8810000') + bytes(16)", (16, 4 * MIB)),
}
SCRIPT = """
import gc, resource, sys, time, zstandard
from meshnet.codec import compress, decompress
from meshnet.errors import WireError

start, end = bytes.fromhex("28b52ffd0068"), bytes.fromhex("010000")
# A compressed block of 128 KiB of zeros, the second of a frame that does not state its size.
stream = zstandard.ZstdCompressor(level=1).compressobj()
whole = stream.compress(bytes(1 << 19)) + stream.flush()
blocks, at = [], 6
while at < len(whole):
    header = int.from_bytes(whole[at : at + 3], "little")
    length = 3 + (1 if header >> 1 & 3 == 1 else header >> 3)
    blocks.append((header, whole[at : at + length]))
    at += length
block = next(part for header, part in blocks if header & 7 == 4)
assert len(decompress("zstd", start + block * 3 + end, 3 << 17)) == 3 << 17
decompress("zstd", compress("zstd", bytes(1 << 20)), 1 << 20)
body = {body}
gc.collect()


def peak():
    if sys.platform != "linux":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with open("/proc/self/status") as status:
        return int(status.read().split("VmHWM:")[1].split()[0]) * 1024


if sys.platform == "linux":
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # sets the peak back to what is resident now
before = peak()
started = time.monotonic()
for limit in {limits}:
    try:
        decompress("zstd", body, limit)
    except WireError as error:
        print(error, file=sys.stderr)
    else:
        sys.exit("accepted")
print(peak() - before, time.monotonic() - started)
"""


@pytest.mark.parametrize(("body", "limits"), HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_body_costs_little(body: str, limits: tuple[int, ...]) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(body=body, limits=limits)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0, run.stderr
    growth, seconds = map(float, run.stdout.split())
    print(f"{growth / MIB:.1f} MiB, {seconds:.3f} s\n{run.stderr}")
    assert growth < 16 * MIB, run.stderr
    assert seconds < 1
