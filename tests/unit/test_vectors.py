"""The vectors of proto/WIRE.md against the parser alone: header fields and body, no socket."""

from __future__ import annotations

import pytest

from meshnet import errors
from meshnet.chunk import read_answer, read_chunk
from meshnet.dtypes import view_bytes
from meshnet.errors import MeshError, WireError
from meshnet.problem import pack_problem, unpack_problem
from meshnet.timing import parse_timings
from meshnet.wire import pack_answer, pack_chunk, unpack_chunk
from tests.vectors.load import (
    HERE,
    PARSER_ABILITIES,
    check_decoded,
    check_fault,
    load_answers,
    load_requests,
)

REQUESTS = load_requests(PARSER_ABILITIES)
GOOD = [vector for vector in REQUESTS if vector.good]
BAD = [vector for vector in REQUESTS if not vector.good]
ANSWERS = load_answers()
GOOD_ANSWERS = [vector for vector in ANSWERS if "code" not in vector.expect]
BAD_ANSWERS = [vector for vector in ANSWERS if "code" in vector.expect]


@pytest.mark.parametrize("vector", GOOD, ids=str)
def test_good_request(vector) -> None:
    chunk = read_chunk(vector.headers, vector.body)

    assert chunk.wire_bytes == len(vector.body)
    assert chunk.tensor.shape == chunk.header.shape
    check_decoded(vector.expect, bytes(view_bytes(chunk.tensor)))
    for name, text in vector.expect.get("header", {}).items():
        assert str(getattr(chunk.header, name)) == text, name


@pytest.mark.parametrize("vector", GOOD, ids=str)
def test_good_request_packs_to_the_same_header(vector) -> None:
    header = unpack_chunk(vector.headers)

    assert unpack_chunk(pack_chunk(header)) == header


@pytest.mark.parametrize("vector", BAD, ids=str)
def test_bad_request(vector) -> None:
    with pytest.raises(WireError) as caught:
        read_chunk(vector.headers, vector.body)

    error = caught.value
    assert error.code.http_status in vector.statuses
    check_fault(vector.expect, error.field, error.message)
    assert "\n" not in error.message
    assert len(error.message) < 600
    status, headers, _ = pack_problem(error)
    assert status == error.code.http_status
    assert ("X-Meshnet-Wire-Version", "2") in headers


@pytest.mark.parametrize("vector", GOOD_ANSWERS, ids=str)
def test_good_answer(vector) -> None:
    answer = read_answer(vector.headers, vector.body)

    if vector.expect["decoded_hex"] is None:
        assert answer.tensor is None
    else:
        assert answer.tensor is not None
        check_decoded(vector.expect, bytes(view_bytes(answer.tensor)))
    hops = [str(hop.node) for hop in parse_timings(answer.header.server_timing)]
    assert hops == vector.expect.get("hops", [])
    assert read_answer(pack_answer(answer.header), vector.body).header == answer.header


@pytest.mark.parametrize("vector", BAD_ANSWERS, ids=str)
def test_bad_answer(vector) -> None:
    if vector.status >= 400:
        error: MeshError = unpack_problem(vector.status, vector.headers, vector.body)
    else:
        with pytest.raises(WireError) as caught:
            read_answer(vector.headers, vector.body)
        error = caught.value

    assert error.code.name == vector.expect["code"]
    if "error" in vector.expect:
        assert type(error) is getattr(errors, vector.expect["error"])
    if "field" in vector.expect:
        assert error.field == vector.expect["field"]
    for name, value in vector.expect.get("attributes", {}).items():
        assert getattr(error, name) == value, name


def test_every_header_has_a_good_and_a_bad_request() -> None:
    known = {
        "Content-Type",
        "X-Meshnet-Wire",
        "X-Meshnet-Shape",
        "X-Meshnet-Dtype",
        "X-Meshnet-Session",
        "X-Meshnet-Chunk-Index",
        "X-Meshnet-Chunk-Total",
        "X-Meshnet-Encoding",
        "X-Meshnet-Position",
        "X-Meshnet-Layers",
        "X-Meshnet-Phase",
        "X-Meshnet-Want",
        "X-Meshnet-Accept-Encoding",
        "X-Meshnet-Route",
        "X-Meshnet-Max-Tokens",
        "traceparent",
        "X-Meshnet-Epoch",
        "X-Meshnet-Journal",
        "X-Meshnet-Grant",
    }
    assert {vector.expect["field"] for vector in BAD} == known | {"Content-Length"}
    assert known <= {name for vector in GOOD for name, _ in vector.headers}


def test_no_body_lies_unused() -> None:
    named = {
        case.split('"body_file": "')[1].split('"')[0]
        for path in (HERE / "requests").glob("*.json")
        if '"body_file"' in (case := path.read_text(encoding="utf-8"))
    }
    assert {f"bodies/{path.name}" for path in (HERE / "bodies").iterdir()} <= named
