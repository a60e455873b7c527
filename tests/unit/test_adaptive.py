"""Choosing encodings: against every fixed choice on simulated links, and rule by rule."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import pytest

from meshnet.adaptive import EncodingChooser
from meshnet.choosers import LinkChoosers, record_answer
from meshnet.compression import CompressionPolicies, CompressionResult
from meshnet.estimates import CodecSpeeds, LinkSpeed, Ratio
from meshnet.plans import Decisions, Plan
from meshnet.sample import ends_in_repeats, predict_ratio
from meshnet.timing import HopTiming, format_timing
from meshnet.topology import NodeId, SessionId
from meshnet.wire import AnswerHeader
from tests.vectors.load import load_activation

BITS = load_activation("smollm2_prefill_en_gpl_L15_c0.npy")
WIDTH = BITS.shape[1]
REAL = BITS.tobytes()
NOISE = random.Random(5).randbytes(len(REAL))
ALL = ("zstd", "bf16p")
SAMPLE_S = 40e-6
FAST, SLOW = 1e10, 1e8


@dataclass
class World:
    """A link and a machine, whose times a chooser does not know.

    Attributes:
        bits_per_s: of the link, for each body in turn.
        speed: of the machine's codecs; 1 is what a chooser takes for granted.
        jitter: by how much times and ratios scatter.
    """

    bits_per_s: Iterator[float]
    speed: float = 1.0
    jitter: float = 0.02
    latency_s: float = 0.0002

    def __post_init__(self) -> None:
        self._rng = random.Random(11)

    def codec_s(self, encoding: str | None, size: int) -> tuple[float, float]:
        if encoding is None:
            return 0.0, 0.0
        fixed, encode, decode = {
            "zstd": (20e-6, 1.0e-9, 1.0e-9),
            "bf16p": (50e-6, 0.9e-9, 0.7e-9),
        }[encoding]
        return fixed + size * encode / self.speed, fixed + size * decode / self.speed

    def scatter(self, value: float) -> float:
        return value * self._rng.uniform(1 - self.jitter, 1 + self.jitter)


RATIOS = {None: 1.0, "zstd": 1.27, "bf16p": 1.48}


def steady(bits_per_s: float) -> Callable[[], Iterator[float]]:
    def rates() -> Iterator[float]:
        while True:
            yield bits_per_s

    return rates


def flipping(*phases: tuple[float, int]) -> Callable[[], Iterator[float]]:
    """Give rates that each hold for so many bodies, in turn."""

    def rates() -> Iterator[float]:
        while True:
            for bits_per_s, count in phases:
                yield from [bits_per_s] * count

    return rates


def run_fixed(world: World, encoding: str | None, size: int, count: int) -> float:
    """Give the seconds that `count` bodies take by one choice."""
    encode_s, decode_s = world.codec_s(encoding, size)
    wire = size / RATIOS[encoding]
    return sum(
        encode_s + 8 * wire / next(world.bits_per_s) + world.latency_s + decode_s
        for _ in range(count)
    )


def run_adaptive(
    world: World, chooser: EncodingChooser, body: bytes, count: int, *, tells_decoding: bool
) -> float:
    size, total = len(body), 0.0
    for _ in range(count):
        plan = chooser.choose(body, "prefill", width=WIDTH, accepted=ALL)
        encode_s, decode_s = world.codec_s(plan.encoding, size)
        wire = int(size / world.scatter(RATIOS[plan.encoding])) if plan.encoding else size
        result = CompressionResult(
            b"",
            plan.encoding,
            size,
            wire,
            world.scatter(encode_s),
            "compressed" if plan.encoding else plan.reason,
        )
        chooser.record(plan, result)
        sent_s = 8 * wire / next(world.bits_per_s) + world.latency_s
        total += encode_s + sent_s + decode_s + (SAMPLE_S if plan.sampled is not None else 0.0)
        seconds = world.scatter(sent_s + decode_s)
        chooser.record_sent(result, seconds, decode_s if tells_decoding else None)
    return total


def new_chooser(**overrides: str) -> EncodingChooser:
    prefix = "MESHNET_COMPRESSION_LAN_PREFILL_"
    variables = {prefix + name: value for name, value in overrides.items()}
    return EncodingChooser(CompressionPolicies(overrides=variables), "lan")


LINKS = {
    "100 Mbit/s": steady(1e8),
    "1 Gbit/s": steady(1e9),
    "10 Gbit/s": steady(1e10),
    "flips each 100": flipping((FAST, 100), (SLOW, 100)),
    "flips each 40": flipping((FAST, 40), (1e9, 40), (SLOW, 40)),
    "mostly fast": flipping((FAST, 400), (SLOW, 20)),
}


@pytest.mark.parametrize("tells_decoding", [True, False], ids=["told", "estimated"])
@pytest.mark.parametrize("speed", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("repeats", [1, 8, 28], ids=["144 KiB", "1.1 MiB", "3.9 MiB"])
@pytest.mark.parametrize("rates", LINKS.values(), ids=LINKS.keys())
def test_within_3_percent_of_the_best_fixed_choice(
    rates: Callable[[], Iterator[float]], repeats: int, speed: float, tells_decoding: bool
) -> None:
    count, body = 900, REAL * repeats
    fixed = {
        name: run_fixed(World(rates(), speed), name, len(body), count) for name in (None, *ALL)
    }

    total = run_adaptive(
        World(rates(), speed), new_chooser(), body, count, tells_decoding=tells_decoding
    )

    best = min(fixed.values())
    assert total <= max(1.03 * best, best + 50e-6 * count)


def test_a_receiver_that_decodes_slowly_is_learnt_from_what_it_says() -> None:
    chooser = new_chooser()
    world = World(steady(1e9)())
    for _ in range(200):
        plan = chooser.choose(REAL * 8, "prefill", width=WIDTH, accepted=ALL)
        size = len(REAL) * 8
        wire = int(size / RATIOS[plan.encoding])
        encode_s, decode_s = world.codec_s(plan.encoding, size)
        decode_s *= 8
        result = CompressionResult(b"", plan.encoding, size, wire, encode_s, "compressed")
        chooser.record(plan, result)
        chooser.record_sent(result, 8e-9 * wire + decode_s, decode_s)

    plan = chooser.choose(REAL * 8, "prefill", width=WIDTH, accepted=ALL)
    assert (plan.encoding, plan.reason) == (None, "link_faster")


# --- the floor and the manual mode


def tell_link(chooser: EncodingChooser, bits_per_s: float) -> None:
    for _ in range(5):
        raw = CompressionResult(b"", None, 1 << 20, 1 << 20, 0.0, "link_faster")
        chooser.record_sent(raw, 8 * (1 << 20) / bits_per_s)


def choose(chooser: EncodingChooser, body: bytes = REAL, **options: object) -> Plan:
    return chooser.choose(body, "prefill", **{"width": WIDTH, "accepted": ALL, **options})  # type: ignore[arg-type]


def test_the_link_decides() -> None:
    chooser = new_chooser()
    for bits_per_s, encoding, reason in [
        (SLOW, "bf16p", "fastest"),
        (FAST, None, "link_faster"),
        (SLOW, "bf16p", "fastest"),
    ]:
        tell_link(chooser, bits_per_s)
        plan = choose(chooser)
        assert (plan.encoding, plan.reason) == (encoding, reason)


@pytest.mark.parametrize(
    ("accepted", "width", "encoding"),
    [
        (("zstd", "bf16p"), WIDTH, "bf16p"),
        (("zstd",), WIDTH, "zstd"),
        (("bf16p",), WIDTH, "bf16p"),
        (("zstd", "bf16p"), None, "zstd"),
        (("bf16p",), None, None),
        (("br",), WIDTH, None),
        ((), WIDTH, None),
        (None, WIDTH, "zstd"),
    ],
)
def test_only_what_the_receiver_reads(accepted, width: int | None, encoding: str | None) -> None:
    chooser = new_chooser()
    tell_link(chooser, SLOW)

    plan = choose(chooser, accepted=accepted, width=width)

    assert plan.encoding == encoding
    assert (plan.reason == "not_accepted") == (encoding is None)


def test_what_the_receiver_says_it_reads_is_used() -> None:
    chooser = new_chooser()
    tell_link(chooser, SLOW)
    chooser.reads = ("zstd", "bf16p")

    assert choose(chooser, accepted=None).encoding == "bf16p"


@pytest.mark.parametrize(
    ("overrides", "encoding", "reason"),
    [
        ({"ENABLED": "off"}, None, "disabled"),
        ({"ENABLED": "off", "ENCODING": "zstd"}, None, "disabled"),
        ({"MIN_INPUT_BYTES": str(len(REAL) + 1)}, None, "below_min_input"),
        ({"MIN_INPUT_BYTES": str(len(REAL))}, "bf16p", "fastest"),
        ({"MIN_SAVINGS_BYTES": "40000"}, "bf16p", "fastest"),
        ({"MIN_SAVINGS_BYTES": "60000"}, None, "sample"),
        ({"MIN_SAVINGS_RATIO": "0.4"}, None, "sample"),
        ({"ENCODING": "zstd"}, "zstd", "manual"),
        ({"ENCODING": " BF16P "}, "bf16p", "manual"),
        ({"ENCODING": "auto"}, "bf16p", "fastest"),
        ({"ENCODING": "lz4"}, "bf16p", "fastest"),
    ],
)
def test_floor_and_manual_mode(
    overrides: dict[str, str], encoding: str | None, reason: str
) -> None:
    chooser = new_chooser(**overrides)
    tell_link(chooser, SLOW)

    plan = choose(chooser)

    assert (plan.encoding, plan.reason) == (encoding, reason)


def test_manual_mode_does_not_measure() -> None:
    chooser = new_chooser(ENCODING="zstd")
    tell_link(chooser, FAST)

    assert {choose(chooser).encoding for _ in range(200)} == {"zstd"}
    assert choose(new_chooser(ENCODING="bf16p"), width=None).reason == "not_accepted"


def test_a_phase_that_does_not_exist() -> None:
    with pytest.raises(ValueError, match="lan/train"):
        new_chooser().choose(REAL, "train", width=WIDTH)


# --- what a sample shows


@pytest.mark.parametrize("accepted", [("zstd",), ("bf16p",), ALL])
@pytest.mark.parametrize("bits_per_s", [1e6, SLOW, FAST])
def test_random_bytes_are_never_compressed(accepted, bits_per_s: float) -> None:
    chooser = new_chooser()
    tell_link(chooser, bits_per_s)
    for _ in range(300):
        plan = choose(chooser, NOISE, accepted=accepted)
        assert plan.encoding is None
        chooser.record(plan, plan.apply(NOISE, lambda: 0.0))

    assert choose(chooser, NOISE, accepted=accepted).reason in ("sample", "link_faster")
    # They have not spoilt what is known of other bodies.
    tell_link(chooser, SLOW)
    assert choose(chooser, accepted=accepted).encoding in accepted


def test_padding_goes_through_zstd() -> None:
    chooser = new_chooser()
    tell_link(chooser, SLOW)
    rows = np.concatenate([BITS[:16], np.repeat(BITS[16:17], 112, axis=0)])

    plan = choose(chooser, rows.tobytes())
    result = plan.apply(rows.tobytes(), lambda: 0.0)
    chooser.record(plan, result)

    assert plan.encoding == "zstd"
    assert result.input_bytes / result.output_bytes > 4
    assert choose(chooser).encoding == "bf16p"


def test_repeats() -> None:
    assert ends_in_repeats(bytes(8), 2)
    assert not ends_in_repeats(bytes(4), 2)
    assert not ends_in_repeats(bytes(8), None)
    assert not ends_in_repeats(REAL, WIDTH)


@pytest.mark.parametrize("encoding", ALL)
@pytest.mark.parametrize(
    "name",
    [
        "smollm2_prefill_en_gpl_L15_c0.npy",
        "smollm2_prefill_en_pydoc_L30n_c1.npy",
        "smollm2_prefill_ml_zh_L25_c1.npy",
    ],
)
def test_sample_of_real_activations(name: str, encoding: str) -> None:
    bits = load_activation(name)
    body = bits.tobytes()
    plan = new_chooser(ENCODING=encoding, MIN_INPUT_BYTES="0")
    result = choose(plan, body, width=bits.shape[1]).apply(body, lambda: 0.0)

    predicted = predict_ratio(encoding, body, bits.shape[1])

    assert result.input_bytes / result.output_bytes == pytest.approx(predicted, rel=0.05)


@pytest.mark.parametrize("size", [1, 2, 3, 255, 4096, 70_000])
def test_sample_of_any_size(size: int) -> None:
    assert predict_ratio("zstd", NOISE[:size], None) >= 1
    assert predict_ratio("zstd", bytes(size), None) > 4
    assert predict_ratio("bf16p", bytes(2 * size), size) == 2


# --- visible decisions


def test_decisions_are_counted() -> None:
    chooser = new_chooser()
    tell_link(chooser, SLOW)
    bodies = [(REAL, ALL), (REAL, ALL), (NOISE, ALL), (REAL, ()), (b"", ALL)]
    for body, accepted in bodies:
        plan = choose(chooser, body, accepted=accepted)
        chooser.record(plan, plan.apply(body, lambda: 0.0))

    compressed = chooser.decisions.pop(("prefill", "bf16p", "compressed"))
    assert compressed.count == 2
    assert compressed.input_bytes == 2 * len(REAL)
    assert compressed.ratio == pytest.approx(1.48, abs=0.01)
    assert compressed.saved_bytes == compressed.input_bytes - compressed.output_bytes
    others = {key: (item.count, item.saved_bytes) for key, item in chooser.decisions.items()}
    assert others == {
        ("prefill", None, "sample"): (1, 0),
        ("prefill", None, "not_accepted"): (1, 0),
        ("prefill", None, "below_min_input"): (1, 0),
    }
    assert chooser.decisions["prefill", None, "below_min_input"].ratio == 1.0


def test_phases_have_their_own_counters() -> None:
    chooser = new_chooser()
    plan = chooser.choose(REAL, "decode", width=WIDTH, accepted=())
    chooser.record(plan, plan.apply(REAL, lambda: 0.0))

    assert list(chooser.decisions) == [("decode", None, "not_accepted")]


def test_raw_is_not_weighed_anew_for_each_body_until_the_link_becomes_slower(monkeypatch) -> None:
    chooser = new_chooser()
    for _ in range(30):
        tell_link(chooser, 2e10)
    weighed = []
    costs = chooser._costs
    monkeypatch.setattr(chooser, "_costs", lambda *given: weighed.append(1) or costs(*given))
    plans = [choose(chooser) for _ in range(32)]
    assert {(plan.encoding, plan.reason) for plan in plans} == {(None, "link_faster")}
    assert len(weighed) == 2
    assert choose(chooser, REAL[: len(REAL) // 2]).encoding is None  # another size: weighed
    assert len(weighed) == 3
    choose(chooser)
    tell_link(chooser, 1e8)
    assert choose(chooser).encoding is not None


def test_probes_are_rare_and_keep_the_estimates_true() -> None:
    chooser = new_chooser()
    tell_link(chooser, SLOW)
    reasons: list[tuple[str | None, str]] = []
    for _ in range(1000):
        plan = choose(chooser)
        reasons.append((plan.encoding, plan.reason))
        size = len(REAL)
        wire = int(size / RATIOS[plan.encoding])
        result = CompressionResult(b"", plan.encoding, size, wire, 2e-4, "compressed")
        chooser.record(plan, result)
        chooser.record_sent(result, 8 * wire / SLOW)

    assert 2 <= reasons.count((None, "probe")) <= 15
    assert 2 <= reasons.count(("zstd", "probe")) <= 15
    assert reasons.count(("bf16p", "fastest")) > 970


# --- estimates


def test_link_of_a_short_body_is_latency() -> None:
    link = LinkSpeed(1e-9)
    link.record(1000, 0.020)
    link.record(1000, 0.010)
    link.record(1 << 20, 0.110)

    assert link.latency_s == 0.010
    assert link.s_per_byte == pytest.approx(0.1 / (1 << 20))
    link.record(20_000, 5.0)
    link.record(1 << 20, 0.0)
    assert link.num_samples == 1


def test_a_hiccup_moves_little_and_a_slow_link_is_seen_at_once() -> None:
    link = LinkSpeed(1e-9)
    link.record(100_000, 100e-6)
    link.record(100_000, 700e-6)
    assert link.s_per_byte < 2.5e-9
    link.record(1 << 20, 80e-9 * (1 << 20))
    assert link.s_per_byte > 70e-9
    link.record(1 << 20, 1e-9 * (1 << 20))
    assert link.s_per_byte == pytest.approx(1e-9)


def record_often(speeds: CodecSpeeds, encoding: str, num_bytes: int, seconds: float) -> None:
    for _ in range(60):
        speeds.record(encoding, num_bytes, seconds)


def test_codec_speeds_by_size() -> None:
    speeds = CodecSpeeds()
    assert speeds.seconds("zstd", 1 << 20) == pytest.approx(20e-6 + 1.05e-9 * (1 << 20))
    record_often(speeds, "zstd", 1 << 17, 1.0)
    record_often(speeds, "zstd", 1 << 22, 4.0)
    speeds.record("zstd", 0, 1.0)

    assert speeds.seconds("zstd", 1 << 16) == pytest.approx(0.5, rel=0.01)
    assert speeds.seconds("zstd", 1 << 23) == pytest.approx(8.0, rel=0.01)
    assert speeds.seconds("bf16p", 1 << 20) < 0.01
    assert speeds.seconds("new", 1 << 20) < 0.01


def test_a_first_call_and_an_interrupted_one_say_little() -> None:
    speeds = CodecSpeeds()
    expected = speeds.seconds("zstd", 1 << 20)
    speeds.record("zstd", 1 << 20, 50 * expected)
    assert speeds.seconds("zstd", 1 << 20) == pytest.approx(expected)
    record_often(speeds, "zstd", 1 << 20, expected)
    speeds.record("zstd", 1 << 20, 50 * expected)
    assert speeds.seconds("zstd", 1 << 20) < 1.21 * expected
    record_often(speeds, "zstd", 1 << 20, 5 * expected)
    assert speeds.seconds("zstd", 1 << 20) == pytest.approx(5 * expected, rel=0.01)


def test_decoders_are_taken_to_be_as_fast_as_encoders_until_measured() -> None:
    encoders = CodecSpeeds("encode")
    decoders = CodecSpeeds("decode", like=encoders)
    before = decoders.seconds("bf16p", 1 << 20)
    record_often(encoders, "bf16p", 1 << 20, 3 * encoders.seconds("bf16p", 1 << 20))

    slow = encoders.slowness("bf16p", 1 << 20)
    assert slow > 2
    assert decoders.seconds("bf16p", 1 << 20) == pytest.approx(slow * before)
    record_often(decoders, "bf16p", 1 << 20, before)
    assert decoders.seconds("bf16p", 1 << 20) == pytest.approx(before, rel=0.01)


def test_ratio_follows_bodies_rather_than_samples() -> None:
    ratio = Ratio(1.27)
    assert ratio.given(2.0) == 2.0
    ratio.record(1.30, 1.25)

    assert ratio.given(1.28) == 1.30
    assert ratio.given(1.0) == pytest.approx(1.30 / 1.25)
    ratio.record(1.0, 1.25)
    low = ratio.actual
    ratio.relax(1.25)
    assert low < ratio.actual < 1.3
    ratio.relax(0.5)
    assert ratio.actual < 1.3


# --- the links of a process


def answer(
    *,
    total_ms: float,
    codec_ms: float,
    reads: tuple[str, ...] = (),
    shape: tuple[int, ...] | None = None,
) -> AnswerHeader:
    timing = HopTiming(NodeId("a"), 0.0, 0.0, codec_ms, 0.0, total_ms, 1, 1)
    session = SessionId("8d7f2f0a-0000-4000-8000-000000000000")
    text = format_timing(timing, format_timing(HopTiming(NodeId("b"), 9, 9, 9, 9, 9, 9, 9)))
    dtype = None if shape is None else "bfloat16"
    return AnswerHeader(shape, dtype, session, server_timing=text, accept_encoding=reads)


def test_an_answer_tells_the_link_the_decoder_and_what_is_read() -> None:
    chooser = new_chooser()
    sent = CompressionResult(b"", "zstd", 1_270_000, 1_000_000, 1e-3, "compressed")
    for _ in range(40):
        record_answer(chooser, sent, 0.250, answer(total_ms=140, codec_ms=10, reads=ALL))

    assert chooser.link.s_per_byte == pytest.approx(0.1 / 1_000_000, rel=0.01)
    assert chooser.reads == ALL
    record_answer(chooser, sent, 0.250, answer(total_ms=140, codec_ms=10))
    assert chooser.reads == ALL


def test_decoding_is_not_believed_where_a_hop_may_have_decoded_its_answer_too() -> None:
    chooser, other = new_chooser(), new_chooser()
    sent = CompressionResult(b"", "zstd", 1_270_000, 1_000_000, 1e-3, "compressed")
    header = answer(total_ms=140, codec_ms=60, shape=(1, 1, 8))
    record_answer(chooser, sent, 0.250, header)
    other.record_sent(sent, 0.110)

    assert chooser.link.s_per_byte == pytest.approx(other.link.s_per_byte)


def test_a_long_answer_takes_its_share_of_the_time() -> None:
    chooser = new_chooser()
    sent = CompressionResult(b"", None, 1_000_000, 1_000_000, 0.0, "link_faster")
    record_answer(chooser, sent, 0.340, answer(total_ms=140, codec_ms=0), 1_000_000)
    assert chooser.link.s_per_byte == pytest.approx(0.1 / 1_000_000)


def test_a_long_answer_to_a_short_request_tells_nothing() -> None:
    chooser = new_chooser()
    sent = CompressionResult(b"", None, 1152, 1152, 0.0, "below_min_input")
    record_answer(chooser, sent, 0.340, answer(total_ms=140, codec_ms=0), 1_000_000)
    assert chooser.link.latency_s is None


def test_what_was_refused_goes_raw_until_an_answer_says_what_is_read() -> None:
    chooser = new_chooser()
    tell_link(chooser, SLOW)
    chooser.forget_reads()
    assert chooser.choose(REAL, "prefill", width=WIDTH).reason == "not_accepted"
    chooser.count_answer(())
    assert chooser.reads == ()
    assert chooser.count_answer(ALL) == 2
    assert chooser.choose(REAL, "prefill", width=WIDTH).encoding == "bf16p"


def test_an_answer_without_timing_tells_nothing_of_the_link() -> None:
    chooser = new_chooser()
    sent = CompressionResult(b"", None, 1 << 20, 1 << 20, 0.0, "link_faster")
    header = AnswerHeader(None, None, SessionId("x"), accept_encoding=("zstd",))
    record_answer(chooser, sent, 0.5, header)

    assert chooser.link.num_samples == 0
    assert chooser.reads == ("zstd",)


def test_short_answers_are_looked_at_now_and_then() -> None:
    chooser = new_chooser()
    sent = CompressionResult(b"", None, 1152, 1152, 0.0, "below_min_input")
    record_answer(chooser, sent, 0.012, answer(total_ms=10, codec_ms=0))
    assert chooser.link.latency_s == pytest.approx(0.002)
    for _ in range(15):
        record_answer(chooser, sent, 0.011, answer(total_ms=10, codec_ms=0))
    assert chooser.link.latency_s == pytest.approx(0.002)
    record_answer(chooser, sent, 0.011, answer(total_ms=10, codec_ms=0))
    assert chooser.link.latency_s == pytest.approx(0.001)


def test_links_are_kept_apart_and_bounded() -> None:
    choosers = LinkChoosers(CompressionPolicies())
    first = choosers.of("a:1")
    tell_link(first, SLOW)
    second = choosers.of("b:1")
    plan = choose(second, accepted=())
    second.record(plan, plan.apply(REAL, lambda: 0.0))
    for number in range(300):
        assert choosers.of(f"c:{number}") is not first
        assert choosers.of("a:1") is first
    plan = choose(first)
    first.record(plan, plan.apply(REAL, lambda: 0.0))

    reports = choosers.report()
    assert len(reports) == 256
    assert [report.link for report in reports][-2:] == ["c:299", "a:1"]
    assert reports[-1].bits_per_s == pytest.approx(SLOW)
    assert reports[-1].num_samples > 0
    assert reports[-2].num_samples == 0
    assert reports[-1].decisions["prefill", "bf16p", "compressed"].saved_bytes > 40_000

    totals = choosers.totals()
    assert totals["prefill", None, "not_accepted"].count == 1  # b:1 is not kept any more
    assert totals["prefill", "bf16p", "compressed"] == Decisions(
        1, len(REAL), reports[-1].decisions["prefill", "bf16p", "compressed"].output_bytes
    )
    first.record(plan, plan.apply(REAL, lambda: 0.0))
    assert reports[-1].decisions["prefill", "bf16p", "compressed"].count == 1


def test_threads_lose_no_count() -> None:
    choosers = LinkChoosers(CompressionPolicies(), lock=threading.Lock())
    num_threads, num_each = 4, 100

    def work(number: int) -> None:
        for step in range(num_each):
            chooser = choosers.of(f"a:{1 + (number + step) % 300}")
            body = REAL if step % 10 == 0 else b""
            plan = chooser.choose(body, "prefill", width=WIDTH)
            chooser.record(plan, plan.apply(body, lambda: 0.0))
            record_answer(chooser, plan.apply(b"", lambda: 0.0), 0.01, answer_of_all)
            choosers.report()

    answer_of_all = answer(total_ms=1, codec_ms=0, reads=ALL)
    with ThreadPoolExecutor(num_threads) as pool:
        list(pool.map(work, range(num_threads)))
    assert sum(item.count for item in choosers.totals().values()) == num_threads * num_each
