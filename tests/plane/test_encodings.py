"""Encodings over real sockets: learnt from answers, used after that, bit for bit."""

from __future__ import annotations

import asyncio

import ml_dtypes
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from meshnet.chunk import Answer, Chunk
from meshnet.codec import ENCODINGS
from meshnet.compression import CompressionPolicies
from meshnet.errors import WireError
from meshnet.grammar import Phase
from meshnet.plane.caller import Caller
from meshnet.plane.client import PlaneClient
from meshnet.plane.hop_client import HopClient
from meshnet.plane.links import LinkSettings
from meshnet.plane.metrics import encoding_metrics
from meshnet.timing import HopTiming, format_timing
from meshnet.topology import NodeId
from tests.plane.doubles import BOUND_S, EchoHandler, answer_to, chunk_header, serving
from tests.plane.threaded import ThreadedClient
from tests.vectors.load import load_activation

ALPHA = NodeId("alpha")
TENSOR = load_activation("smollm2_prefill_en_gpl_L15_c0.npy")[np.newaxis].view(ml_dtypes.bfloat16)
RATIOS = {None: 1.0, "zstd": 1.266, "bf16p": 1.48}
CLIENTS = [PlaneClient, ThreadedClient]


def fixed(encoding: str) -> CompressionPolicies:
    """Give the manual mode of `encoding`."""
    return CompressionPolicies(overrides={"MESHNET_COMPRESSION_LAN_PREFILL_ENCODING": encoding})


@pytest.mark.parametrize("client_type", CLIENTS)
@pytest.mark.parametrize(
    ("encoding", "encodings"), [("bf16p", [None, "bf16p", "bf16p"]), ("zstd", ["zstd"] * 3)]
)
async def test_bf16p_is_sent_once_the_node_has_said_that_it_reads_it(
    client_type: type[PlaneClient], encoding: str, encodings: list[str | None]
) -> None:
    handler, client = EchoHandler(), client_type(LinkSettings(fixed(encoding)))
    async with serving(handler) as (host, port):
        for _ in encodings:
            header = chunk_header(*TENSOR.shape, phase=Phase.PREFILL, accept_encoding=(encoding,))
            answer = await client.forward(
                f"{host}:{port}", ALPHA, header, TENSOR, timeout_s=BOUND_S
            )
            assert answer.tensor is not None
            assert answer.tensor.tobytes() == TENSOR.tobytes()
            assert answer.header.accept_encoding == ENCODINGS
            assert answer.sent_bytes == handler.chunks[-1].wire_bytes
        await client.close()
    assert [chunk.header.encoding for chunk in handler.chunks] == encodings
    for chunk, used in zip(handler.chunks, encodings, strict=True):
        assert chunk.tensor.tobytes() == TENSOR.tobytes()
        assert TENSOR.nbytes / chunk.wire_bytes == pytest.approx(RATIOS[used], rel=0.01)


@pytest.mark.parametrize("client_type", CLIENTS)
async def test_what_a_node_refuses_is_not_sent_again(client_type: type[PlaneClient]) -> None:
    class Choosy(EchoHandler):
        def forward(self, chunk: Chunk, caller: Caller) -> Answer:
            self.chunks.append(chunk)
            if chunk.header.encoding is not None:
                raise WireError("X-Meshnet-Encoding: not read", field="X-Meshnet-Encoding")
            return answer_to(chunk, None)

    handler, client = Choosy(), client_type(LinkSettings(fixed("zstd")))
    async with serving(handler) as (host, port):
        address = f"{host}:{port}"
        header = chunk_header(*TENSOR.shape, phase=Phase.PREFILL)
        with pytest.raises(WireError):
            await client.forward(address, ALPHA, header, TENSOR, timeout_s=BOUND_S)
        await client.forward(address, ALPHA, header, TENSOR, timeout_s=BOUND_S)
        reports = client.choosers.report()
        await client.close()
    assert [chunk.header.encoding for chunk in handler.chunks] == ["zstd", None]
    assert {key[1:] for key in reports[0].decisions} == {
        ("zstd", "compressed"),
        (None, "not_accepted"),
    }


@pytest.mark.parametrize("tensor", [True, False], ids=["200", "204"])
async def test_a_session_that_goes_on_keeps_what_the_node_reads(*, tensor: bool) -> None:
    class Timed(EchoHandler):
        def forward(self, chunk: Chunk, caller: Caller) -> Answer:
            answer = answer_to(chunk, chunk.tensor if tensor else None)
            self.chunks.append(chunk)
            timing = HopTiming(ALPHA, 0.0, 0.0, 0.0, 0.0, float(len(self.chunks)), 1, 1)
            return Answer(answer.header.timed(format_timing(timing)), answer.tensor)

    client = PlaneClient()
    header = chunk_header(1, 1, 8)
    async with serving(Timed()) as (host, port):
        answers = [
            await client.forward(
                f"{host}:{port}", ALPHA, header, TENSOR[:, :1, :8], timeout_s=BOUND_S
            )
            for _ in range(3)
        ]
        await client.close()
    assert [answer.header.accept_encoding for answer in answers] == [ENCODINGS] * 3
    assert len({answer.header.server_timing for answer in answers}) == 3


async def test_threads_share_what_is_known_of_a_link() -> None:
    handler, client = EchoHandler(), HopClient()
    num_threads, num_each = 8, 6

    def send(address: str) -> None:
        for number in range(num_each):
            tensor = TENSOR if number % 2 else TENSOR[:, :1]
            phase = Phase.PREFILL if number % 2 else Phase.DECODE
            header = chunk_header(*tensor.shape, phase=phase, accept_encoding=ENCODINGS)
            answer = client.forward(address, ALPHA, header, tensor, timeout_s=BOUND_S)
            assert answer.tensor is not None
            assert answer.tensor.tobytes() == tensor.tobytes()

    async with serving(handler) as (host, port):
        await asyncio.gather(
            *(asyncio.to_thread(send, f"{host}:{port}") for _ in range(num_threads))
        )
        client.close()
    total = num_threads * num_each
    counts = client.choosers.totals()
    assert counts["decode", None, "below_min_input"].count == total // 2
    prefill = [item for (phase, _, _), item in counts.items() if phase == "prefill"]
    assert sum(item.count for item in prefill) == total // 2
    assert sum(item.input_bytes for item in prefill) == total // 2 * TENSOR.nbytes
    assert client.choosers.of(f"{host}:{port}").num_answers == total


async def test_decisions_are_metrics() -> None:
    client = HopClient(LinkSettings(fixed("bf16p")))
    async with serving(EchoHandler()) as (host, port):
        for _ in range(3):
            header = chunk_header(*TENSOR.shape, phase=Phase.PREFILL)
            await asyncio.to_thread(
                client.forward, f"{host}:{port}", ALPHA, header, TENSOR, timeout_s=BOUND_S
            )
        client.close()

    class Encodings:
        def collect(self):
            return encoding_metrics(client.choosers)

    registry = CollectorRegistry()
    registry.register(Encodings())
    lines = generate_latest(registry).decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    raw = '{decision="not_accepted",encoding="raw",phase="prefill"}'
    coded = '{decision="compressed",encoding="bf16p",phase="prefill"}'
    assert values[f"meshnet_bodies_total{raw}"] == "1.0"
    assert values[f"meshnet_bodies_total{coded}"] == "2.0"
    assert values[f"meshnet_bodies_saved_bytes_total{raw}"] == "0.0"
    assert float(values[f"meshnet_bodies_tensor_bytes_total{coded}"]) == 2 * TENSOR.nbytes
    assert float(values[f"meshnet_bodies_ratio{coded}"]) == pytest.approx(1.48, rel=0.01)
