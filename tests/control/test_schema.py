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


def check(folder):
    command = [sys.executable, "tools/check_schema.py"]
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
