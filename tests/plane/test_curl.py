"""The server called by curl."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from tests.plane.doubles import (
    P16,
    EchoHandler,
    serving,
)
from tests.programs import program

CURL_FIELDS = [
    "-H", "Content-Type: application/octet-stream",
    "-H", "X-Meshnet-Session: 8d7f2f0a-0000-4000-8000-000000000001",
    "-H", "X-Meshnet-Chunk-Index: 0",
    "-H", "X-Meshnet-Chunk-Total: 1",
]  # fmt: skip


async def curl(*arguments: str) -> bytes:
    process = await asyncio.create_subprocess_exec(
        program("curl"), "-sS", "--noproxy", "*", "--max-time", "10", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return out


@pytest.mark.parametrize(
    "extra",
    [
        (),
        ("-H", "Transfer-Encoding: chunked"),
        ("-H", "Expect: 100-continue"),
        ("-H", "Expect:"),
        ("--http1.0",),
    ],
    ids=["as-is", "w9a-chunked", "w9b-expect", "no-expect", "http-1.0"],
)
@pytest.mark.parametrize("shape", ["1,1,8", "1,128,8192"])
async def test_w9_curl(tmp_path: Path, shape: str, extra: tuple[str, ...]) -> None:
    num_bytes = 2 * int(np.prod([int(part) for part in shape.split(",")]))
    body = (P16 * (num_bytes // 16))[:num_bytes]
    path = tmp_path / "body"
    path.write_bytes(body)
    async with serving(EchoHandler()) as (host, port):
        url = f"http://{host}:{port}/forward"
        fields = [*CURL_FIELDS, *extra, "--data-binary", f"@{path}"]
        shaped = ["-H", f"X-Meshnet-Shape: {shape}"]
        good = await curl(*fields, *shaped, "-H", "X-Meshnet-Dtype: bfloat16", url)
        assert good == body
        bad = await curl(*fields, *shaped, "-H", "X-Meshnet-Dtype: bf16", "-w", "%{http_code}", url)
        assert bad.endswith(b"400")
        assert b"X-Meshnet-Dtype" in bad
