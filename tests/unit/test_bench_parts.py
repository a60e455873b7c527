"""The parts of `meshnet bench` that need no servers: cases, placement, pictures, input."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from xml.etree import ElementTree as ET

import ml_dtypes
import numpy as np
import pytest

from meshnet.cli.bench.codec import read_activations
from meshnet.cli.bench.echo import EchoStack, missing, pack_json, unpack_json
from meshnet.cli.bench.hop import node_address
from meshnet.cli.bench.measure import Series
from meshnet.cli.bench.placement import Placement, cpu_seconds, default_placement, placed
from meshnet.cli.bench.plot import Bar, BarGroup, draw_bars
from meshnet.cli.bench.report import Report, Table, format_us
from meshnet.cli.bench.wire_cases import STACKS, WirePlan, plan_cases, shape_of
from meshnet.errors import ConfigError
from meshnet_gateway.bench_pipeline import Prefill

SVG = "{http://www.w3.org/2000/svg}"
LINUX = pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity"), reason="this system pins no processes"
)


@pytest.mark.parametrize(
    ("num_bytes", "shape"),
    [
        (2, (1, 1, 1)),
        (1152, (1, 1, 576)),
        (32 << 10, (1, 1, 16384)),
        (4 << 20, (1, 128, 16384)),
        (64 << 20, (1, 2048, 16384)),
    ],
)
def test_a_size_becomes_hidden_states(num_bytes, shape):
    assert shape_of(num_bytes) == shape


@pytest.mark.parametrize("num_bytes", [0, 1, 1153, (32 << 10) + 2, (256 << 20) + (32 << 10)])
def test_a_size_that_no_tensor_has_is_named(num_bytes):
    with pytest.raises(ConfigError, match=f"--sizes: {num_bytes};"):
        shape_of(num_bytes)


@pytest.mark.parametrize(
    ("url", "found"),
    [
        ("http://127.0.0.1:7080", ("127.0.0.1:7080", False)),
        ("https://node.example:7080/forward", ("node.example:7080", True)),
        ("[::1]:7080", ("[::1]:7080", False)),
    ],
)
def test_a_node_is_found_by_its_url(url, found):
    assert node_address(url) == found


@pytest.mark.parametrize("url", ["", "node", "ftp://node:1", "http://:1", "http://node:x"])
def test_a_url_of_no_node_is_named(url):
    with pytest.raises(ConfigError, match="URL: "):
        node_address(url)


def test_what_is_added_is_of_the_same_round():
    ours, raw = Series([[3.0], [30.0], [4.0]]), Series([[1.0], [28.5], [2.0]])
    assert ours.added_to(raw) == 2.0


def test_a_pipeline_is_ideal_when_only_stages_take_time():
    prefill = Prefill(num_stages=3, num_chunks=16, chunk_bytes=4 << 20, compute_ms=10.0)
    assert prefill.ideal_ms == 180.0
    assert prefill.hidden_size == 16384


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [(0.4, "0 us"), (999.4, "999 us"), (1234, "1.23 ms"), (-45678, "-45.7 ms"), (2e6, "2.00 s")],
)
def test_times_are_written_in_the_unit_that_suits_them(microseconds, text):
    assert format_us(microseconds) == text


def test_each_stack_but_ours_has_a_server():
    assert set(STACKS) == {"meshnet", "meshnet_aio", *EchoStack}
    assert STACKS[:2] == ("raw", "meshnet")


def test_a_stack_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert missing(EchoStack.ZMQ) == "pyzmq is not installed"
    assert missing(EchoStack.GRPC) is None


def test_json_bodies_come_back_bit_for_bit():
    bits = np.arange(0, 65536, 7, dtype=np.uint16).reshape(1, 1, -1)
    back = unpack_json(pack_json(bits.view(ml_dtypes.bfloat16)))
    assert np.array_equal(back.view(np.uint16), bits)


@LINUX
def test_processes_are_pinned_and_let_go():
    allowed = os.sched_getaffinity(0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        with placed(Placement.ONE, [child.pid]):
            assert len(os.sched_getaffinity(0)) == 1
            assert os.sched_getaffinity(child.pid) == os.sched_getaffinity(0)
        assert os.sched_getaffinity(0) == os.sched_getaffinity(child.pid) == allowed
        with placed(Placement.FREE, [child.pid]):
            assert os.sched_getaffinity(child.pid) == allowed
        child.communicate(b"\n")


@LINUX
def test_two_cores_are_different_ones():
    if default_placement() is not Placement.TWO:
        pytest.skip("there is only one core")
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        with placed(Placement.TWO, [child.pid]):
            assert not os.sched_getaffinity(0) & os.sched_getaffinity(child.pid)
        child.communicate(b"\n")


@LINUX
def test_the_cpu_time_of_another_process_is_told():
    code = "while True: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        deadline = time.monotonic() + 60
        while (cpu_seconds(child.pid) or 0.0) < 0.05 and time.monotonic() < deadline:
            os.sched_yield()
        taken = cpu_seconds(child.pid)
        child.kill()
    assert taken is not None
    assert taken >= 0.05
    assert cpu_seconds(os.getpid()) == pytest.approx(time.process_time(), abs=1.0)


def test_a_picture_is_xml_with_bars_by_ratio():
    bars = [Bar("raw", 1.0, "1x"), Bar("<ours>", 10.0, "a & b", ours=True), Bar("zmq", None, "no")]
    root = ET.fromstring(draw_bars("T", "s", "limit", [BarGroup("group", bars)]))
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"T", "s", "limit", "group", "raw", "<ours>", "a & b", "no"} <= set(texts)
    drawn = [rect for rect in root.iter(f"{SVG}rect") if rect.get("class") in ("bar", "ours")]
    widths = [float(rect.get("width", "0")) for rect in drawn]
    assert [rect.get("class") for rect in drawn] == ["bar", "ours"]
    assert widths[1] / widths[0] == pytest.approx(np.log(20) / np.log(2), abs=0.01)
    style = root.find(f"{SVG}style")
    assert style is not None
    assert "prefers-color-scheme: dark" in (style.text or "")


def test_a_report_puts_rows_in_their_sections():
    main, idle = Table("a", ("x",)), Table("b", ("x",), section="idle")
    main.data.append({"n": 1})
    idle.data.append({"n": 2})
    report = Report("r", tables=[main, idle], facts={"decode": {"hops": 3}})
    assert report.describe() == {"results": [{"n": 1}], "idle": [{"n": 2}], "decode": {"hops": 3}}


def test_activations_are_read_as_bits(tmp_path):
    bits = np.arange(12, dtype=np.uint16).reshape(3, 4)
    for name, array in (("u2", bits), ("bf16", bits.view(ml_dtypes.bfloat16))):
        path = tmp_path / f"{name}.npy"
        np.save(path, array)
        assert np.array_equal(read_activations(path), bits)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not numpy", "not an .npy file"),
        (np.zeros((2, 2), np.float32), "float32; expected an array of uint16"),
        (np.zeros(4, np.uint16), r"shape \(4,\)"),
        (np.zeros((0, 4), np.uint16), r"shape \(0, 4\)"),
    ],
)
def test_a_file_of_something_else_is_named(tmp_path, content, message):
    path = tmp_path / "file.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_activations(path)
    assert str(path) in caught.value.message


def test_a_file_that_is_missing_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"missing\.npy: No such file"):
        read_activations(tmp_path / "missing.npy")


def test_a_plan_becomes_cases():
    plan = WirePlan(sizes=(64, 1 << 20))
    cases = plan_cases(plan, ("raw", "meshnet", "zmq"), Placement.TWO)
    found = [(case.section, case.num_bytes, case.placement, len(case.stacks)) for case in cases]
    assert found == [
        ("results", 64, Placement.TWO, 3),
        ("results", 1 << 20, Placement.TWO, 3),
        ("one_core", 64, Placement.ONE, 3),
        ("idle", 64, Placement.TWO, 3),
        ("busy_node", 64, Placement.FREE, 3),
    ]
    assert [case.pause_s > 0 for case in cases] == [False, False, False, True, False]
    assert [case.busy for case in cases] == [False, False, False, False, True]


def test_a_plan_without_extras_or_two_cores_has_fewer_cases():
    plan = WirePlan(sizes=(64,), extras=False)
    assert len(plan_cases(plan, ("raw", "meshnet"), Placement.TWO)) == 1
    free = plan_cases(WirePlan(sizes=(64,)), ("raw", "meshnet"), Placement.FREE)
    assert [case.section for case in free] == ["results", "idle", "busy_node"]
