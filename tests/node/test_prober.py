"""References and probes of real tiny models: no false alarm, and what a node does about time."""

from __future__ import annotations

import threading
from typing import ClassVar

import pytest
import torch

from meshnet.errors import Code, MeshError
from meshnet.probes import HEAD, WHOLE, PartReport, Report, judge
from meshnet.topology import LayerRange
from meshnet_node.hf.reference import make_reference
from meshnet_node.hf.shard import TransformersShard
from meshnet_node.prober import Prober
from meshnet_node.scheduler import Scheduler
from tests.fakes import RecordingBackend
from tests.node.tiny import TINY, save_tiny

SPLIT = 2
REST = LayerRange(SPLIT, 5)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Give the directory of a tiny model of a family, made once."""
    made = {}

    def give(family, dtype=torch.bfloat16):
        if (family, dtype) not in made:
            folder = tmp_path_factory.mktemp(family) / "tiny"
            made[family, dtype] = save_tiny(family, folder, dtype=dtype)
        return made[family, dtype]

    return give


def _shard(directory, layers, dtype="auto"):
    return TransformersShard(directory, layers, model="tiny", digest="d", dtype=dtype)


def _prober(shard, **kwargs):
    kwargs.setdefault("interval_s", 0.0)
    return Prober(shard, shard.weights, Scheduler(), **kwargs)


def _report(shard):
    prober = _prober(shard)
    prober.run()
    return prober.latest.report


@pytest.mark.parametrize("family", TINY)
def test_shards_of_every_family_match_their_reference(family, tiny):
    directory = tiny(family)
    reference = make_reference(directory)
    for dtype in ("bfloat16", "float32"):
        for layers in (LayerRange(0, SPLIT), REST):
            report = _report(_shard(directory, layers, dtype))
            verdict = judge(report, reference, layers, head=layers.end == 5)
            assert verdict.reason == "", (dtype, layers, verdict)
            assert verdict.worst < 0.25
    assert set(report.parts) >= {"layer.2", "layer.4", HEAD, WHOLE}


def test_weights_saved_in_float32_match_in_both_types(tiny):
    directory = tiny("llama", torch.float32)
    reference = make_reference(directory)
    for dtype in ("bfloat16", "float32"):
        report = _report(_shard(directory, REST, dtype))
        assert judge(report, reference, REST, head=True).reason == ""


def test_other_kernels_and_threads_match_a_shared_reference(tiny):
    """What nodes on other machines differ by: 52 probes of both types, no false alarm."""
    directory = tiny("llama")
    reference = make_reference(directory)
    worst = 0.0
    threads = torch.get_num_threads()
    try:
        for dtype in ("bfloat16", "float32"):
            prober = _prober(_shard(directory, LayerRange(0, 5), dtype))
            for round_ in range(26):
                torch.backends.mkldnn.enabled = round_ % 2 == 0
                torch.set_num_threads(2 if round_ in (12, 13) else 1)
                prober.run()
                verdict = judge(prober.latest.report, reference, LayerRange(0, 5), head=True)
                assert prober.failure == ""  # nor does the node find that it has changed
                assert verdict.reason == "", verdict
                worst = max(worst, verdict.worst)
    finally:
        torch.backends.mkldnn.enabled = True
        torch.set_num_threads(threads)
    assert worst < 0.5


def test_another_models_weights_do_not_match(tiny, tmp_path):
    reference = make_reference(tiny("llama"))
    other = save_tiny("llama", tmp_path / "other", seed=1)
    verdict = judge(_report(_shard(other, REST)), reference, REST, head=True)
    assert verdict.reason == "WEIGHTS"


def test_numbers_alone_tell_another_models_layers(tiny, tmp_path):
    reference = make_reference(tiny("llama"))
    found = _report(_shard(save_tiny("llama", tmp_path / "other", seed=1), REST)).parts
    expected = reference.variants["bfloat16"]
    disguised = {
        name: PartReport(expected[name].digest if name in expected else b"", p.sketch, p.against)
        for name, p in found.items()
    }
    verdict = judge(Report("bfloat16", disguised), reference, REST, head=True)
    assert verdict.reason == "NUMBERS"
    assert verdict.worst > 10


def test_a_wish_is_met_and_a_failure_is_reported(tiny):
    shard = _shard(tiny("llama"), REST)
    seen = threading.Event()
    prober = _prober(shard, on_forward=seen.set)
    prober.run()
    first = prober.latest
    prober.start()
    try:
        seen.clear()
        prober.wish()
        assert seen.wait(60)
        assert _await(lambda: prober.latest.number > first.number)
        assert prober.latest.report.problem == ""
        shard.forward = _broken
        prober.wish()
        assert _await(lambda: prober.latest.report.problem == "layers 2-3: no such kernel")
    finally:
        prober.close()


def test_probes_wait_for_sessions(tiny):
    """A probe that waits goes last, whatever came after it."""
    scheduler = Scheduler()
    done, order = [], []
    began, gate = threading.Event(), threading.Event()

    def first():
        began.set()
        gate.wait(60)

    def queue(name, run):
        thread = threading.Thread(target=run, args=(lambda: order.append(name),))
        thread.start()
        done.append(thread)

    from meshnet.plane.caller import Caller

    busy = threading.Thread(
        target=lambda: scheduler.run(first, Caller(), urgent=False), daemon=True
    )
    busy.start()
    assert began.wait(60)
    queue("probe", lambda work: scheduler.run_idle(work, Caller(), max_wait_s=60))
    assert _await(lambda: len(scheduler._idles) == 1)
    queue("prefill", lambda work: scheduler.run(work, Caller(), urgent=False))
    assert _await(lambda: len(scheduler._prefills) == 1)
    queue("decode", lambda work: scheduler.run(work, Caller(), urgent=True))
    assert _await(lambda: len(scheduler._decodes) == 1)
    gate.set()
    for thread in [busy, *done]:
        thread.join(60)
    assert order == ["decode", "prefill", "probe"]


class Paced:
    """A prober of three layers and two tensors beside them, on a clock of its own.

    A digest takes `digest_s`, a forward `forward_s`.
    """

    digest_s, forward_s = 0.004, 0.005
    dtype = "bfloat16"
    parts: ClassVar[dict[str, int]] = dict.fromkeys(
        ["layer.1", "layer.2", "layer.3", "norm", "extra"], 1
    )

    def __init__(self):
        self.now_s, self.num_chunks = 1000.0, 0
        self.num_digests = self.num_forwards = 0
        self.backend = RecordingBackend(LayerRange(1, 4), hidden_size=8, num_layers=6)
        self._forward, self.backend.forward = self.backend.forward, self.forward
        self.prober = Prober(
            *(self.backend, self, Scheduler()),
            interval_s=10 / 3,
            num_chunks=lambda: self.num_chunks,
            clock=lambda: self.now_s,
        )
        self.prober.run()

    def digest(self, part):
        self.now_s += self.digest_s
        self.num_digests += 1
        return part.encode()

    def forward(self, *args, **kwargs):
        self.now_s += self.forward_s
        self.num_forwards += 1
        return self._forward(*args, **kwargs)

    def step(self):
        """Give the digests and forwards of a step, and when it is due again, in seconds."""
        before, began = (self.num_digests, self.num_forwards), self.now_s
        due = self.prober.step()
        done = (self.num_digests - before[0], self.num_forwards - before[1])
        return *done, pytest.approx(due - began)


# Each layer, the whole shard, and its layers one after the other.
FORWARDS = 3 + 1 + 3


def test_an_idle_node_is_probed_wholly_with_each_heartbeat():
    paced = Paced()
    assert (paced.num_digests, paced.num_forwards) == (5, FORWARDS)
    for _ in range(3):
        assert paced.step() == (5, FORWARDS, 10 / 3)
    assert paced.prober.failure == ""


def test_a_node_that_serves_is_probed_for_a_hundredth_of_its_time():
    paced = Paced()
    steps = []
    for _ in range(5):
        paced.num_chunks += 1
        steps.append(paced.step())
    # 33 ms: half of them for digests, of which five take 20 ms; the end of a round is an end.
    assert steps == [(5, 3, 3.5), (5, 3, 3.5), (5, 1, 10 / 3), (5, 3, 3.5), (5, 3, 3.5)]


def test_what_takes_long_is_done_less_often():
    paced = Paced()
    paced.forward_s = 1.0
    assert paced.step() == (5, 1, 20.4)  # idle: a twentieth of the time
    paced.num_chunks += 1
    assert paced.step() == (5, 1, 102.0)


def test_a_chunk_that_comes_meanwhile_ends_a_step():
    paced = Paced()
    forward = paced.backend.forward

    def interrupted(*args, **kwargs):
        paced.num_chunks += 1
        return forward(*args, **kwargs)

    paced.backend.forward = interrupted
    assert paced.step()[:2] == (5, 3)


def test_wishes_that_come_at_once_are_not_all_met():
    paced = Paced()
    paced.num_chunks += 1
    paced.prober.wish()
    assert paced.step()[:2] == (5, FORWARDS)
    paced.num_chunks += 1
    paced.prober.wish()
    assert paced.step()[:2] == (5, 3)
    paced.now_s += 2.0
    paced.num_chunks += 1
    assert paced.step()[:2] == (5, FORWARDS)


def test_a_probe_that_failed_is_done_wholly_until_it_passes():
    paced = Paced()
    forward, paced.backend.forward = paced.backend.forward, _broken
    paced.num_chunks += 1
    paced.step()
    assert "no such kernel" in paced.prober.failure
    paced.backend.forward = forward
    paced.num_chunks += 1
    assert paced.step()[:2] == (5, FORWARDS)
    assert paced.prober.failure == ""


def test_a_node_that_is_too_busy_to_be_probed_is_not_held_wrong():
    paced = Paced()
    before = paced.prober.latest

    def refuse(*_args, **_kwargs):
        raise MeshError(Code.UNAVAILABLE, "all wait", reason="QUEUE_FULL")

    paced.prober._scheduler.run_idle = paced.prober._scheduler.run = refuse
    paced.step()
    assert (paced.prober.failure, paced.prober.latest) == ("", before)


def _broken(*_args, **_kwargs):
    raise RuntimeError("no such kernel")


def _await(check, timeout_s=60.0):
    waited = threading.Event()
    for _ in range(int(timeout_s / 0.02)):
        if check():
            return True
        waited.wait(0.02)
    return False
