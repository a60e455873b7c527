"""The schema's check passes, and notices what it is there for."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("proto", "third_party", "tools", "meshnet/v1")
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


@pytest.mark.parametrize(
    ("path", "old", "new", "faults"),
    [
        ("meshnet/v1/types_pb2.pyi", "class Shard", "class Shards", ["types_pb2.pyi is not up"]),
        (NODES, "  string etag = 15;\n", "", ["breaking change", "node_service_pb2.py is not up"]),
        (NODES, "// A process that serves layers.\n", "", ["lint"]),
        (NODES, "  string etag = 15;", "   string etag = 15;", ["format"]),
    ],
)
def test_a_fault_is_named(copy, path, old, new, faults):
    target = copy / path
    text = target.read_text()
    assert old in text
    target.write_text(text.replace(old, new, 1))
    code, errors = check(copy)
    assert code == 1
    assert [fault for fault in faults if fault not in errors] == []
