"""Thresholds, overrides and the bound of decoding without a known size."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable

import pytest
import zstandard

from meshnet.codec import compress
from meshnet.compression import (
    CompressionError,
    CompressionPolicies,
    CompressionPolicy,
    CompressionResult,
    compress_activation,
    decompress_activation,
)
from meshnet.errors import Code, WireError
from meshnet.wire import DEFAULT_LIMITS
from tests.vectors.load import load_activation

KIB = 1024
ALWAYS = CompressionPolicy(0, min_savings_bytes=0, min_savings_ratio=0.0)
REAL = load_activation("smollm2_prefill_en_gpl_L15_c0.npy").tobytes()
NOISE = random.Random(1).randbytes(64 * KIB)
CONDITIONS = {
    ("lan", "prefill"): 64 * KIB,
    ("lan", "decode"): 128 * KIB,
    ("relay", "prefill"): 32 * KIB,
    ("relay", "decode"): 128 * KIB,
    ("benchmark", "prefill"): 64 * KIB,
    ("benchmark", "decode"): 128 * KIB,
}


def ticking() -> Callable[[], float]:
    times = iter([10.0, 12.5])
    return lambda: next(times)


# --- policies


@pytest.mark.parametrize(("condition", "min_input"), CONDITIONS.items())
def test_defaults(condition: tuple[str, str], min_input: int) -> None:
    policy = CompressionPolicies().for_condition(*condition)

    assert policy == CompressionPolicy(min_input, 4096, 0.05, 1, True)


def test_condition_has_no_case() -> None:
    policies = CompressionPolicies()
    assert policies.for_condition("LAN", "Decode") == policies.for_condition("lan", "decode")


@pytest.mark.parametrize("condition", [("wan", "prefill"), ("lan", "train"), ("", "")])
def test_unknown_condition_names_those_known(condition: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="lan/prefill"):
        CompressionPolicies().for_condition(*condition)


def test_own_policies() -> None:
    own = CompressionPolicy(5, level=9)
    policies = CompressionPolicies({("lan", "decode"): own})

    assert policies.for_condition("lan", "decode") == own
    with pytest.raises(ValueError, match="lan/decode"):
        policies.for_condition("lan", "prefill")


@pytest.mark.parametrize(
    ("name", "text", "attribute", "expected"),
    [
        ("MIN_INPUT_BYTES", "1024", "min_input_bytes", 1024),
        ("MIN_INPUT_BYTES", " 7 ", "min_input_bytes", 7),
        ("MIN_INPUT_BYTES", "-1", "min_input_bytes", 0),
        ("MIN_SAVINGS_BYTES", "0", "min_savings_bytes", 0),
        ("MIN_SAVINGS_BYTES", "-4096", "min_savings_bytes", 0),
        ("MIN_SAVINGS_RATIO", "0.25", "min_savings_ratio", 0.25),
        ("MIN_SAVINGS_RATIO", "-0.5", "min_savings_ratio", 0.0),
        ("MIN_SAVINGS_RATIO", "2", "min_savings_ratio", 2.0),
        ("LEVEL", "3", "level", 3),
        ("LEVEL", "0", "level", 0),
        ("LEVEL", "-7", "level", 0),
        ("LEVEL", "22", "level", 22),
        ("LEVEL", "99", "level", 22),
        ("ENABLED", "0", "enabled", False),
        ("ENABLED", "False", "enabled", False),
        ("ENABLED", " no ", "enabled", False),
        ("ENABLED", "OFF", "enabled", False),
        ("ENABLED", "1", "enabled", True),
        ("ENABLED", "on", "enabled", True),
        ("ENCODING", "zstd", "encoding", "zstd"),
        ("ENCODING", " BF16P ", "encoding", "bf16p"),
        ("ENCODING", "auto", "encoding", "auto"),
    ],
)
def test_override(
    name: str, text: str, attribute: str, expected: object, caplog: pytest.LogCaptureFixture
) -> None:
    policies = CompressionPolicies(overrides={f"MESHNET_COMPRESSION_RELAY_PREFILL_{name}": text})

    assert getattr(policies.for_condition("relay", "prefill"), attribute) == expected
    assert policies.for_condition("lan", "prefill") == CompressionPolicy(64 * KIB)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("MIN_INPUT_BYTES", "64k"),
        ("MIN_INPUT_BYTES", ""),
        ("MIN_INPUT_BYTES", "1.5"),
        ("MIN_SAVINGS_BYTES", "many"),
        ("MIN_SAVINGS_RATIO", "5%"),
        ("MIN_SAVINGS_RATIO", "nan"),
        ("MIN_SAVINGS_RATIO", "inf"),
        ("MIN_SAVINGS_RATIO", "-inf"),
        ("LEVEL", "fast"),
        ("ENABLED", "maybe"),
        ("ENCODING", "lz4"),
        ("ENCODING", ""),
    ],
)
def test_garbage_is_named_once_and_changes_nothing(
    name: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    variable = f"MESHNET_COMPRESSION_LAN_DECODE_{name}"
    with caplog.at_level(logging.WARNING):
        policies = CompressionPolicies(overrides={variable: text})
        for _ in range(3):
            policy = policies.for_condition("lan", "decode")

    assert policy == CompressionPolicy(128 * KIB)
    assert len(caplog.records) == 1
    assert variable in caplog.text
    assert repr(text) in caplog.text


def test_misspelt_variable_is_named(caplog: pytest.LogCaptureFixture) -> None:
    CompressionPolicies(overrides={"MESHNET_COMPRESSION_LAN_PREFIL_LEVEL": "3", "HOME": "/root"})

    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "MESHNET_COMPRESSION_LAN_PREFIL_LEVEL" in caplog.text


def test_the_environment_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_COMPRESSION_LAN_DECODE_LEVEL", "9")

    assert CompressionPolicies().for_condition("lan", "decode").level == 1


def test_overrides_are_read_at_construction() -> None:
    overrides = {"MESHNET_COMPRESSION_LAN_DECODE_LEVEL": "9"}
    policies = CompressionPolicies(overrides=overrides)
    overrides["MESHNET_COMPRESSION_LAN_DECODE_LEVEL"] = "2"

    assert policies.for_condition("lan", "decode").level == 9


# --- compressing


@pytest.mark.parametrize(
    ("body", "policy", "decision"),
    [
        (REAL, CompressionPolicy(0, enabled=False), "disabled"),
        (REAL, CompressionPolicy(len(REAL) + 1), "below_min_input"),
        (b"", CompressionPolicy(1), "below_min_input"),
        (b"", ALWAYS, "below_savings"),
        (NOISE, CompressionPolicy(0), "below_savings"),
        (REAL, CompressionPolicy(0, min_savings_bytes=40_000), "below_savings"),
        (REAL, CompressionPolicy(0, min_savings_ratio=0.3), "below_savings"),
    ],
)
@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_raw_hands_the_same_object_back(make, body, policy, decision: str) -> None:
    given = make(body)

    result = compress_activation(given, policy)

    assert result.body is given
    assert result == CompressionResult(given, None, len(body), len(body), 0.0, decision)
    assert not result.compressed


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_compressed(make) -> None:
    result = compress_activation(make(REAL), CompressionPolicy(len(REAL)), clock=ticking())

    assert result.compressed
    assert (result.encoding, result.decision) == ("zstd", "compressed")
    assert (result.input_bytes, result.output_bytes) == (len(REAL), len(result.body))
    assert result.elapsed_seconds == 2.5
    assert decompress_activation(result.body, "zstd").body == REAL


def test_planes() -> None:
    result = compress_activation(REAL, CompressionPolicy(0), encoding="bf16p", width=576)

    assert result.compressed
    assert (result.encoding, result.decision) == ("bf16p", "compressed")
    assert result.output_bytes < 0.7 * len(REAL)
    assert decompress_activation(result.body, "bf16p", width=576).body == REAL
    with pytest.raises(CompressionError, match="bfloat16"):
        decompress_activation(result.body, "bf16p")
    with pytest.raises(CompressionError, match="expected at most 1152"):
        decompress_activation(result.body[:999], "bf16p", width=576, max_output_bytes=1152)


def test_planes_that_save_too_little() -> None:
    result = compress_activation(NOISE, CompressionPolicy(0), encoding="bf16p", width=64)

    assert (result.body, result.decision) == (NOISE, "below_savings")


def test_planes_need_rows() -> None:
    with pytest.raises(ValueError, match="bfloat16"):
        compress_activation(REAL, CompressionPolicy(0), encoding="bf16p")


def test_savings_thresholds_are_inclusive() -> None:
    saved = len(REAL) - len(compress("zstd", REAL))
    policy = CompressionPolicy(0, min_savings_bytes=saved, min_savings_ratio=saved / len(REAL))

    assert compress_activation(REAL, policy).compressed
    more = CompressionPolicy(0, min_savings_bytes=saved + 1, min_savings_ratio=0.0)
    assert compress_activation(REAL, more).decision == "below_savings"


@pytest.mark.parametrize(("level", "same_as"), [(-5, 0), (0, 3), (23, 22)])
def test_level_is_clamped(level: int, same_as: int) -> None:
    body = REAL[:16384]
    policy = CompressionPolicy(0, 0, 0.0, level=level)

    assert compress_activation(body, policy).body == compress("zstd", body, same_as)


def test_memoryview_of_wider_items_counts_bytes() -> None:
    view = memoryview(REAL).cast("H")

    assert compress_activation(view, CompressionPolicy(len(REAL))).input_bytes == len(REAL)


def test_encoder_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)

    result = compress_activation(REAL, ALWAYS)

    assert result.decision == "unavailable"
    assert result.body is REAL
    with pytest.raises(CompressionError, match="cannot be read on this node"):
        decompress_activation(b"x", "zstd")


def test_encoder_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def compress(self, data: bytes) -> bytes:
            raise zstandard.ZstdError("cannot allocate")

    monkeypatch.setattr("meshnet.zstd._idle_compressors", {1: [Failing()]})

    result = compress_activation(REAL, ALWAYS)

    assert (result.decision, result.body) == ("unavailable", REAL)


# --- decompressing


@pytest.mark.parametrize("encoding", [None, ""])
@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
def test_raw_body_passes_through(make, encoding: str | None) -> None:
    body = make(REAL)

    result = decompress_activation(body, encoding, clock=ticking())

    assert result == CompressionResult(body, None, len(REAL), len(REAL), 2.5, "legacy_raw")
    assert result.body is body


@pytest.mark.parametrize("make", [bytes, bytearray, memoryview])
@pytest.mark.parametrize("limit", [None, len(REAL), 1 << 30])
def test_decompressed(make, limit: int | None) -> None:
    body = compress("zstd", REAL)

    result = decompress_activation(make(body), "zstd", max_output_bytes=limit, clock=ticking())

    assert result == CompressionResult(REAL, "zstd", len(body), len(REAL), 2.5, "decompressed")


def test_two_frames_and_a_skippable_one() -> None:
    body = compress("zstd", b"one") + bytes.fromhex("502a4d180100000074") + compress("zstd", b"two")

    assert decompress_activation(body, "zstd").body == b"onetwo"


FRAME = compress("zstd", REAL)


@pytest.mark.parametrize(
    "body",
    [FRAME[:-1], FRAME[:-4], FRAME[: len(FRAME) // 2], FRAME + b"x", FRAME + FRAME[:9], REAL],
    ids=["checksum cut", "no checksum", "half", "trailing byte", "second frame cut", "not zstd"],
)
@pytest.mark.parametrize("limit", [None, len(REAL), 4 * len(REAL)])
def test_malformed(body: bytes, limit: int | None) -> None:
    with pytest.raises(CompressionError) as caught:
        decompress_activation(body, "zstd", max_output_bytes=limit)

    assert isinstance(caught.value, WireError)
    assert isinstance(caught.value, ValueError)
    assert caught.value.field == "X-Meshnet-Encoding"
    assert caught.value.code is Code.INVALID_ARGUMENT


def test_encoding_that_is_unknown() -> None:
    with pytest.raises(CompressionError, match="expected one of: zstd"):
        decompress_activation(REAL, "br")


@pytest.mark.parametrize("limit", [0, 1, len(REAL) - 1])
def test_over_the_bound(limit: int) -> None:
    small = compress("zstd", bytes(len(REAL)))
    with pytest.raises(CompressionError, match=f"expected at most {limit}"):
        decompress_activation(small, "zstd", max_output_bytes=limit)
    with pytest.raises(CompressionError, match=f"expected at most {limit}") as caught:
        decompress_activation(REAL, None, max_output_bytes=limit)
    assert caught.value.code is Code.TOO_LARGE


def test_default_bound_is_the_wires() -> None:
    zeros = zstandard.ZstdCompressor(level=1).compress(bytes(64 << 20))
    body = zeros * (DEFAULT_LIMITS.max_chunk_bytes // (64 << 20) + 1)

    with pytest.raises(CompressionError, match=str(DEFAULT_LIMITS.max_chunk_bytes)):
        decompress_activation(body, "zstd")


def test_negative_bound() -> None:
    with pytest.raises(ValueError, match="-1"):
        decompress_activation(FRAME, "zstd", max_output_bytes=-1)
    with pytest.raises(ValueError, match="-1"):
        decompress_activation(REAL, None, max_output_bytes=-1)
