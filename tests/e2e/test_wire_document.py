"""The commands of proto/WIRE.md and README.md, run as they stand against a node."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshnet.grammar import parse_shape
from meshnet.wire import unpack_chunk
from tests.programs import program

DOCUMENT = (Path(__file__).parents[2] / "proto" / "WIRE.md").read_text(encoding="utf-8")
WITH_CURL = DOCUMENT.split("\n## 7. With curl\n")[1].split("\n## 8. ")[0]
README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
README_CURL = README.split("\n## Drive a node with curl\n")[1].split("\n## ")[0]
README_COMMANDS = re.findall(r"```sh\n(.*?)```", README_CURL, re.DOTALL)
COMMANDS = re.findall(r"```\n(.*?)```", WITH_CURL, re.DOTALL)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    command = re.search(r"`meshnet (node --backend stub [^`]*)`", WITH_CURL)
    assert command is not None
    arguments = command[1].replace(":7080", ":0").split()
    with subprocess.Popen(
        [sys.executable, "-m", "meshnet", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as node:
        assert node.stdout is not None
        seen = ""
        bound = None
        # Serving comes after listening; both end with the process, so this cannot hang.
        for line in node.stdout:
            seen += line
            bound = bound or re.search(r"listening on (127\.0\.0\.1:\d+)", line)
            if "serving layers" in line:
                break
        assert bound is not None, seen
        yield bound[1]
        node.terminate()
        node.stdout.read()


def run_all(commands: list[str], address: str, folder: Path) -> list[str]:
    """Run shell commands in `folder` against the node; gives what each printed."""
    for name in ("curl", "xxd", "zstd"):
        program(name)
    outputs = []
    for command in commands:
        run = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command.replace("127.0.0.1:7080", address)],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert run.returncode == 0, run.stderr
        outputs.append(run.stdout)
    return outputs


def test_commands(address: str, tmp_path: Path) -> None:
    outputs = run_all(COMMANDS, address, tmp_path)
    assert [output.split("  ")[0] for output in outputs] == [
        "00000000: 803f 0040 4040 8040 0000 0080 80bf c07f",
        "00000000: 803f 0040 4040 8040 0000 0080 80bf c07f",
        "",
    ]


def test_commands_of_the_readme(address: str, tmp_path: Path) -> None:
    outputs = run_all(README_COMMANDS, address, tmp_path)
    assert [output.strip() for output in outputs] == [
        "80 3f 00 40 40 40 80 40 00 00 00 80 80 bf c0 7f"
    ] * 2


def test_first_example_is_a_good_request() -> None:
    example = DOCUMENT.split("```\nPOST /forward HTTP/1.1\n")[1].split("\n\n")[0]
    fields = [tuple(line.split(": ", 1)) for line in example.splitlines()]

    header = unpack_chunk([(name, value) for name, value in fields])

    assert header.num_bytes == int(dict(fields)["Content-Length"])
    assert header.shape == parse_shape("1,128,16384")
