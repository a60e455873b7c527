"""What the README says of the API works as written, but for the ports."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.programs import program

README = Path(__file__).parents[2] / "README.md"
SECTION = README.read_text("utf-8").split("## The control plane's API\n")[1].split("\n## ")[0]
PYTHON, CURL, BUF = re.findall(r"```(?:python|sh)\n(.*?)```", SECTION, re.DOTALL)
MODEL = "models/smollm2-135m-instruct"


@pytest.fixture
async def run(mesh):
    """Give a function that runs a command against a mesh of two nodes."""
    await mesh.join("left", (0, 4), port=7081, model=MODEL)
    await mesh.join("right", (4, 8), port=7082, model=MODEL)

    async def command(*arguments: str, text: str) -> str:
        text = text.replace("127.0.0.1:7071", mesh.addresses.grpc)
        text = text.replace("127.0.0.1:7070", mesh.addresses.http)
        folder = Path(sys.executable).parent
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        done = await asyncio.to_thread(
            subprocess.run,
            [*arguments, text],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
            env={**os.environ, "PATH": path},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return command


async def test_the_python_client_runs_and_is_short(run):
    assert len(PYTHON.strip().splitlines()) <= 15
    printed = await run(sys.executable, "-c", text=PYTHON)
    assert "serving {'NODE_STATE_READY': 2}" in printed
    assert f"{MODEL} covered" in printed
    assert "nodes/left 0 4" in printed
    assert "nodes/right 4 8" in printed


@pytest.mark.parametrize("text", [CURL, BUF], ids=["curl", "buf"])
async def test_the_same_with_curl_and_with_buf(run, text):
    if text is CURL:
        program("curl")
    printed = await run("sh", "-ec", text=text)
    for part in ('"serving":true', MODEL, "nodes/left", "nodes/right"):
        assert part in printed.replace(": ", ":")
