"""The schema's check passes, and notices what it is there for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("proto", "third_party", "tools", "meshnet/v1", "meshnet/internal")
FILES = ("buf.yaml", "buf.gen.yaml", "proto.baseline.binpb")
NODES = "proto/meshnet/v1/node_service.proto"


@pytest.fixture
def copy(tmp_path):
    for part in PARTS:
        shutil.copytree(ROOT / part, tmp_path / part)
    for name in FILES:
        shutil.copyfile(ROOT / name, tmp_path / name)
    return tmp_path


def check(folder, *flags):
    command = [sys.executable, "tools/check_schema.py", *flags]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def test_the_schema_as_it_is_passes(copy):
    assert check(copy) == (0, "")


def test_each_fault_is_named(copy):
    for path, old, new in (
        ("meshnet/v1/types_pb2.pyi", "class Shard", "class Shards"),
        (NODES, "  string etag = 15;\n", ""),
        (NODES, "// A process that serves layers.\n", ""),
        (NODES, "  string drain_reason", "   string drain_reason"),
    ):
        target = copy / path
        text = target.read_text()
        assert old in text
        target.write_text(text.replace(old, new, 1))
    code, errors = check(copy)
    assert code == 1
    for fault in (
        "schema: lint",
        "schema: format",
        "schema: breaking change",
        "types_pb2.pyi is not up to date",
        "node_service_pb2.py is not up to date",
    ):
        assert fault in errors


def test_an_addition_is_taken_into_the_baseline_and_a_removal_is_not(copy):
    baseline = copy / "proto.baseline.binpb"
    before = baseline.read_bytes()
    target = copy / NODES
    text = target.read_text()
    added = "  string etag = 15;\n  // New.\n  string extra = 99;\n"
    target.write_text(text.replace("  string etag = 15;\n", added, 1))
    assert "proto.baseline.binpb does not hold the schema" in check(copy)[1]
    assert "baseline" not in check(copy, "--update-baseline")[1]
    assert baseline.read_bytes() != before
    target.write_text(text)
    code, errors = check(copy, "--update-baseline")
    assert code == 1
    assert "schema: breaking change" in errors
