"""Encodings over real sockets: learnt from answers, used after that, bit for bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from meshnet.chunk import Answer, Chunk
from meshnet.codec import ENCODINGS
from meshnet.compression import CompressionPolicies
from meshnet.errors import WireError
from meshnet.grammar import Phase
from meshnet.plane.client import PlaneClient
from meshnet.topology import NodeId
from tests.plane.doubles import BOUND_S, EchoHandler, answer_to, chunk_header, serving
from tests.vectors.load import load_activation

ALPHA = NodeId("alpha")
TENSOR = load_activation("smollm2_prefill_en_gpl_L15_c0.npy")[np.newaxis].view(ml_dtypes.bfloat16)
RATIOS = {None: 1.0, "zstd": 1.266, "bf16p": 1.48}


def client_of(encoding: str) -> PlaneClient:
    variable = "MESHNET_COMPRESSION_LAN_PREFILL_ENCODING"
    return PlaneClient(policies=CompressionPolicies(overrides={variable: encoding}))


@pytest.mark.parametrize(
    ("fixed", "encodings"), [("bf16p", [None, "bf16p", "bf16p"]), ("zstd", ["zstd"] * 3)]
)
async def test_bf16p_is_sent_once_the_node_has_said_that_it_reads_it(
    fixed: str, encodings: list[str | None]
) -> None:
    handler, client = EchoHandler(), client_of(fixed)
    async with serving(handler) as (host, port):
        for _ in encodings:
            header = chunk_header(*TENSOR.shape, phase=Phase.PREFILL, accept_encoding=(fixed,))
            answer = await client.forward(
                f"{host}:{port}", ALPHA, header, TENSOR, timeout_s=BOUND_S
            )
            assert answer.tensor is not None
            assert answer.tensor.tobytes() == TENSOR.tobytes()
            assert answer.header.accept_encoding == ENCODINGS
        await client.close()
    assert [chunk.header.encoding for chunk in handler.chunks] == encodings
    for chunk, encoding in zip(handler.chunks, encodings, strict=True):
        assert chunk.tensor.tobytes() == TENSOR.tobytes()
        assert TENSOR.nbytes / chunk.wire_bytes == pytest.approx(RATIOS[encoding], rel=0.01)


async def test_what_a_node_refuses_is_not_sent_again() -> None:
    class Choosy(EchoHandler):
        async def forward(self, chunk: Chunk) -> Answer:
            self.chunks.append(chunk)
            if chunk.header.encoding is not None:
                raise WireError("X-Meshnet-Encoding: not read", field="X-Meshnet-Encoding")
            return answer_to(chunk, None)

    handler, client = Choosy(), client_of("zstd")
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
