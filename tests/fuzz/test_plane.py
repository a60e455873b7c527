"""Any bytes sent to the server end in answers or a closed connection, never in a fault."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re

import pytest

from tests.plane.doubles import BOUND_S, P16, EchoHandler, calling, chunk_header, request, serving

SEEDS = [
    request(header=chunk_header(position=3)),
    request(b"8\r\n" + P16[:8] + b"\r\n8\r\n" + P16[8:] + b"\r\n0\r\n\r\n",
            "Transfer-Encoding: chunked", length=None),
    request(bytes.fromhex("28b52ffd2010810000") + P16, "X-Meshnet-Encoding: zstd"),
    request(P16, "Expect: 100-continue"),
    request(b"", "X-Meshnet-Dtype: odd", without="X-Meshnet-Dtype", length=1 << 20),
    b"DELETE /sessions/8d7f2f0a-0000-4000-8000-000000000000 HTTP/1.1\r\nHost: n\r\n\r\n",
    b"GET /healthz HTTP/1.0\r\n\r\n",
]  # fmt: skip
SPLICES = [b"\r\n", b"\n", b"\r", b"\x00", b" ", b":", b",", b"0", b"-", b"\xff", b"chunked", b"\t"]
STATUSES = {100, 200, 204, 400, 404, 405, 408, 411, 413, 415, 431, 501}


def mutate(rng: random.Random) -> bytes:
    data = bytearray(b"".join(rng.choices(SEEDS, k=rng.randint(1, 3))))
    for _ in range(rng.randint(0, 6)):
        at = rng.randrange(len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                data[at:at] = rng.choice(SPLICES)
            case 2:
                del data[at : at + rng.randint(1, 8)]
            case _:
                data[at:at] = data[at : at + rng.randint(1, 60)]
    return bytes(data)


async def talk(place: tuple[str, int], rng: random.Random) -> bytes:
    """Send what a mutated caller would in a few pieces, then end; gives all that came back."""
    data = mutate(rng)
    async with calling(place) as caller:
        with contextlib.suppress(ConnectionError):
            while data:
                count = rng.randint(1, len(data))
                await caller.send(data[:count])
                data = data[count:]
            caller.writer.write_eof()
            async with asyncio.timeout(BOUND_S):
                return await caller.reader.read()
    return b""


@pytest.mark.parametrize("seed", range(8))
async def test_mutated_requests(seed: int, caplog: pytest.LogCaptureFixture) -> None:
    rng = random.Random(seed)
    seen = set()
    async with serving(EchoHandler()) as place:
        for _ in range(60):
            answers = await talk(place, rng)
            if answers:
                assert answers.startswith(b"HTTP/1.1 ")
            seen |= {int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answers)}
            assert b"Traceback" not in answers
        async with calling(place) as caller:
            await caller.send(request())
            assert (await caller.read()).body == P16
    assert seen <= STATUSES
    assert {200, 400} <= seen
    assert not caplog.records
