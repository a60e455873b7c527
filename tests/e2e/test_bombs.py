"""Bodies that decode to far more than they are, sent to a node's process: its memory stays.

``python -m pytest tests/e2e/test_bombs.py -s`` prints what was measured.
"""

from __future__ import annotations

import re
import socket
import struct
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from meshnet.wire import ChunkHeader, pack_chunk
from tests.e2e.commands import Running, running
from tests.vectors.load import RequestVector, exchange

MIB = 1 << 20
ALLOWED_GROWTH = 24 * MIB
"""Of the peak of resident memory over all bombs; the largest of them would take 8 GiB."""


def frame(num_bytes: int, *, states_size: bool = True) -> bytes:
    """Give `num_bytes` zeros as one zstd frame."""
    compressor = zstandard.ZstdCompressor(level=1)
    if states_size:
        return compressor.compress(bytes(num_bytes))
    stream = compressor.compressobj()
    return stream.compress(bytes(num_bytes)) + stream.flush()


def stating(num_bytes: int) -> bytes:
    """Give a frame of a few bytes that states `num_bytes`, as one segment."""
    return struct.pack("<IBQ", 0xFD2FB528, 0xE0, num_bytes) + b"\x03\x00\x00\x00"


def rle(num_blocks: int) -> bytes:
    """Give a frame of repeated blocks, 4 bytes for 128 KiB each, that states no size."""
    block = (128 * 1024) << 3 | 1 << 1
    blocks = [block] * (num_blocks - 1) + [block | 1]
    body = b"".join(item.to_bytes(3, "little") + b"\x00" for item in blocks)
    return struct.pack("<IBB", 0xFD2FB528, 0x00, 0x38) + body


BOMBS = {
    "256 MiB in one frame": frame(256 * MIB),
    "64 MiB that states no size": frame(64 * MIB, states_size=False),
    "a stated size of 8 EiB": stating(1 << 63),
    "a stated size of 8 GiB": stating(1 << 33),
    "a window of 2 GiB": struct.pack("<IBB", 0xFD2FB528, 0x00, 0xA8) + b"\x01\x00\x00",
    "65,536 repeated blocks, 8 GiB": rle(65_536),
    "repeated blocks past the tensor by one": rle(9),
    "1,000 frames of 1 MiB": frame(MIB) * 1000,
}


@pytest.fixture
def node() -> Iterator[Running]:
    with running(
        "node",
        "--backend",
        "stub",
        "--hidden-size",
        "8",
        "--layers",
        "0:1",
        "--listen",
        "127.0.0.1:0",
    ) as process:
        process.ready = process.event("ready")
        yield process


def send(address: str, body: bytes, encoding: str = "zstd") -> tuple[int, bytes]:
    """Send a body for a tensor of 1 MiB; gives the status and the answer's body."""
    header = ChunkHeader((1, 65536, 8), "bfloat16", str(uuid.uuid4()), encoding=encoding)
    vector = RequestVector("bomb", "", frozenset(), 8, tuple(pack_chunk(header)), body, {})
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        reply = exchange(connection, vector)
        return reply.status, reply.body


def peak_bytes(pid: int) -> int:
    """Give the most resident memory that a process ever had."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmHWM:\s+([0-9]+) kB", status)
    assert found is not None
    return int(found[1]) * 1024


def test_bombs_are_refused_in_bounded_memory(node: Running) -> None:
    address = node.ready["address"]
    pid = node.process.pid
    good = zstandard.ZstdCompressor().compress(bytes(MIB))
    for _ in range(3):  # so that what every request takes is there
        assert send(address, good)[0] == 200
    before = peak_bytes(pid)
    for name, body in BOMBS.items():
        status, answer = send(address, body)
        grown = peak_bytes(pid) - before
        print(f"{name}: {len(body)} bytes, {status}, {grown / MIB:+.1f} MiB; {answer[:120]!r}")
        assert status in (400, 413), name
        assert b"X-Meshnet-Encoding" in answer or b"Content-Length" in answer, name
        assert grown < ALLOWED_GROWTH, name
    assert send(address, good) == (200, bytes(MIB))
