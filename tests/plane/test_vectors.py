"""The vectors against the server and the client, over real sockets."""

from __future__ import annotations

import asyncio
import socket

import numpy as np
import pytest

from meshnet.chunk import Answer, Chunk
from meshnet.dtypes import numpy_dtype, view_bytes
from meshnet.errors import MeshError, NextHopError
from meshnet.plane.caller import Caller
from meshnet.plane.client import PlaneClient
from meshnet.topology import NodeId, SessionId
from meshnet.wire import ChunkHeader
from tests.plane.doubles import (
    BOUND_S,
    EchoHandler,
    answer_to,
    misbehaving,
    read_request,
    serving,
)
from tests.vectors.load import (
    PARSER_ABILITIES,
    AnswerVector,
    Reply,
    RequestVector,
    check_decoded,
    check_fault,
    check_reply,
    exchange,
    load_answers,
    load_requests,
)

REQUESTS = load_requests(PARSER_ABILITIES | {"http"})
NEXT = next(vector for vector in REQUESTS if vector.name == "wire-absent")
ANSWERS = load_answers()


class Passing(EchoHandler):
    """Passes tensors through, or answers none where none is wanted."""

    def forward(self, chunk: Chunk, caller: Caller) -> Answer:
        answer = super().forward(chunk, caller)
        wanted = chunk.header.want is None or chunk.header.want.kind != "none"
        return answer if wanted else answer_to(chunk, None)


def send(place: tuple[str, int], vector: RequestVector) -> list[Reply]:
    """Send `vector` twice, and a good request after it where the connection is kept."""
    replies = []
    with socket.create_connection(place, timeout=BOUND_S) as connection:
        for sent in (vector, vector, NEXT):
            replies.append(exchange(connection, sent))
            if replies[-1].closes:
                break
    return replies


@pytest.mark.parametrize("vector", REQUESTS, ids=str)
async def test_server(vector: RequestVector) -> None:
    handler = Passing()
    async with serving(handler) as place:
        replies = await asyncio.to_thread(send, place, vector)
    for sent, reply in zip((vector, vector, NEXT), replies, strict=False):
        check_reply(sent, reply)
    if vector.good:
        assert len(replies) == 3
        for chunk in handler.chunks[:2]:
            check_decoded(vector.expect, bytes(view_bytes(chunk.tensor)))


def test_most_vectors_apply() -> None:
    assert len(REQUESTS) > 150


@pytest.mark.parametrize("vector", ANSWERS, ids=str)
async def test_client(vector: AnswerVector) -> None:
    head = [f"HTTP/1.1 {vector.status} Reason", *(f"{n}: {v}" for n, v in vector.headers)]
    if vector.status != 204:
        head.append(f"Content-Length: {len(vector.body)}")
    message = "\r\n".join([*head, "", ""]).encode("latin-1") + vector.body

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(message)
        await writer.drain()

    sent = dict(vector.headers)
    session = SessionId(sent.get("X-Meshnet-Session", "8d7f2f0a-0000-4000-8000-000000000000"))
    header = ChunkHeader((1, 1, 8), "bfloat16", session)
    tensor = np.zeros((1, 1, 8), numpy_dtype("bfloat16"))
    client = PlaneClient()
    result: Answer | MeshError
    async with misbehaving(script) as address:
        try:
            result = await client.forward(
                address, NodeId("alpha"), header, tensor, timeout_s=BOUND_S
            )
        except MeshError as error:
            result = error
        await client.close()
    check_result(vector, result)


def check_result(vector: AnswerVector, result: Answer | MeshError) -> None:
    expect = vector.expect
    if isinstance(result, Answer):
        if result.tensor is None:
            assert expect["decoded_hex"] is None
        else:
            check_decoded(expect, bytes(view_bytes(result.tensor)))
    elif vector.status < 400:
        # What breaks the wire's rules is the answering node's failure.
        assert isinstance(result, NextHopError), result
        assert result.failed_node == "alpha"
        assert expect["code"], result
        check_fault({"says": expect.get("says", [])}, None, result.message)
    else:
        assert result.code.name == expect["code"]
        assert type(result).__name__ == expect["error"]
        assert result.field == expect.get("field", result.field)
        for name, value in expect.get("attributes", {}).items():
            assert getattr(result, name) == value
