"""Any header fields and bytes give a chunk or a WireError, and nothing else."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from meshnet.chunk import Answer, Chunk, read_answer, read_chunk
from meshnet.codec import compress, decompress, decompress_within
from meshnet.dtypes import view_bytes
from meshnet.errors import MeshError, WireError
from meshnet.grammar import Phase, Want
from meshnet.operations import (
    Rebuild,
    RebuildMode,
    Release,
    Reservation,
    pack_rebuild,
    pack_release,
    pack_reservation,
    unpack_rebuild,
    unpack_release,
    unpack_reservation,
)
from meshnet.problem import pack_problem, unpack_problem
from meshnet.timing import HopTiming, format_timing, parse_timings
from meshnet.topology import Hop, LayerRange, NodeId, SessionId
from meshnet.wire import (
    AnswerHeader,
    ChunkHeader,
    WireLimits,
    pack_answer,
    pack_chunk,
    unpack_answer,
    unpack_chunk,
)
from tests.vectors.load import PARSER_ABILITIES, load_answers, load_requests, load_sessions

SMALL = WireLimits(max_chunk_bytes=1 << 16)
REQUESTS = [vector for vector in load_requests(PARSER_ABILITIES) if len(vector.body) < 4096]
ANSWERS = load_answers()
OPERATIONS = load_sessions()
SESSION = SessionId("8d7f2f0a-0000-4000-8000-000000000001")
NAMES = sorted(
    {name for vector in (*REQUESTS, *ANSWERS, *OPERATIONS) for name, _ in vector.headers}
)
VALUES = sorted(
    {value for vector in (*REQUESTS, *ANSWERS, *OPERATIONS) for _, value in vector.headers}
)
BODIES = sorted({vector.body for vector in (*REQUESTS, *ANSWERS)})

names = st.sampled_from(NAMES) | st.text(max_size=30)
values = (
    st.sampled_from(VALUES)
    | st.text(max_size=40)
    | st.text(alphabet="0123456789,-x @:/.[]", max_size=40)
    | st.integers(-3, 1 << 70).map(str)
    | st.lists(st.integers(0, 1 << 40), max_size=9).map(lambda d: ",".join(map(str, d)))
)
bodies = st.sampled_from(BODIES) | st.binary(max_size=200)
seeds = st.sampled_from([*REQUESTS, *ANSWERS, *OPERATIONS])


@st.composite
def fields(draw: st.DrawFn) -> list[tuple[str, str]]:
    """Give arbitrary fields, or those of a vector with some changed, dropped or repeated."""
    if draw(st.integers(0, 3)) == 0:
        return draw(st.lists(st.tuples(names, values), max_size=20))
    mutated = list(draw(seeds).headers)
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(mutated)))
        if draw(st.booleans()) and at < len(mutated):
            mutated[at] = (mutated[at][0], draw(values))
        elif draw(st.booleans()):
            del mutated[at : at + 1]
        else:
            mutated.insert(at, (draw(names), draw(values)))
    return mutated


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Give a body with some bytes changed, cut out or put in."""
    body = bytearray(draw(bodies))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(body)))
        match draw(st.integers(0, 3)):
            case 0:
                body[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case 1:
                del body[at : at + draw(st.integers(1, 8))]
            case 2:
                body[at:at] = draw(st.binary(max_size=8))
            case _:
                body[at:at] = draw(bodies)
    return bytes(body)


@given(fields(), damaged())
@settings(max_examples=400, deadline=None)
def test_any_request_gives_a_chunk_or_a_wire_error(
    headers: list[tuple[str, str]], body: bytes
) -> None:
    try:
        chunk = read_chunk(headers, body, SMALL)
    except WireError as error:
        check_error(error)
    else:
        assert isinstance(chunk, Chunk)
        assert chunk.tensor.nbytes == chunk.header.num_bytes <= SMALL.max_chunk_bytes
        assert unpack_chunk(pack_chunk(chunk.header), SMALL) == chunk.header


@given(fields(), damaged())
@settings(max_examples=300, deadline=None)
def test_any_answer_gives_an_answer_or_a_wire_error(
    headers: list[tuple[str, str]], body: bytes
) -> None:
    try:
        answer = read_answer(headers, body, SMALL)
    except WireError as error:
        check_error(error)
    else:
        assert isinstance(answer, Answer)
        assert answer.header.num_bytes <= SMALL.max_chunk_bytes
        parse_timings(answer.header.server_timing)


@given(st.integers(400, 599), fields(), damaged() | st.text(max_size=100).map(str.encode))
@settings(max_examples=200, deadline=None)
def test_any_error_answer_gives_a_mesh_error(
    status: int, headers: list[tuple[str, str]], body: bytes
) -> None:
    error = unpack_problem(status, headers, body)

    assert isinstance(error, MeshError)
    check_error(error)


def check_error(error: MeshError) -> None:
    assert len(error.message) <= 2000
    _, headers, _ = pack_problem(error)
    for name, value in headers:
        assert name.isascii()
        assert value.isascii()
        assert value.isprintable()


@given(damaged(), st.integers(0, 1 << 12))
@settings(max_examples=600, deadline=None)
@example(bytes.fromhex("28b52ffd2000") + bytes.fromhex("810000") + bytes(16), 16)
def test_any_zstd_body_gives_exact_bytes_or_a_wire_error(body: bytes, num_bytes: int) -> None:
    try:
        data = decompress("zstd", body, num_bytes)
    except WireError as error:
        check_error(error)
    else:
        assert len(data) == num_bytes
        assert bytes(decompress_within("zstd", body, num_bytes + 1)) == bytes(data)


@given(st.lists(st.binary(max_size=300), max_size=5), st.data())
@settings(max_examples=200, deadline=None)
def test_frames_of_any_kind_concatenate(pieces: list[bytes], data: st.DataObject) -> None:
    import zstandard

    body = b""
    for piece in pieces:
        if data.draw(st.booleans()):
            tail = data.draw(st.binary(max_size=9))
            body += b"\x53\x2a\x4d\x18" + len(tail).to_bytes(4, "little") + tail
        compressor = zstandard.ZstdCompressor(level=1, write_checksum=data.draw(st.booleans()))
        if data.draw(st.booleans()):
            body += compressor.compress(piece)
        else:
            stream = compressor.compressobj()
            body += stream.compress(piece) + stream.flush()
    whole = b"".join(pieces)

    assert bytes(decompress("zstd", body, len(whole))) == whole
    for wrong in {len(whole) + 1, max(0, len(whole) - 1)} - {len(whole)}:
        try:
            decompress("zstd", body, wrong)
        except WireError:
            continue
        raise AssertionError(f"{len(whole)} bytes were taken for {wrong}")


bits = st.lists(st.integers(0, 0xFFFF), min_size=1, max_size=64)


@given(bits, st.sampled_from([None, "zstd"]), st.integers(1, 8))
@settings(max_examples=300, deadline=None)
def test_any_bfloat16_bits_cross_identically(
    values: list[int], encoding: str | None, rows: int
) -> None:
    array = np.array(values * rows, dtype=np.uint16).reshape(rows, len(values))
    for layout in (array, array.T, array[::-1, ::2]):
        raw = view_bytes(layout.view(ml_dtypes.bfloat16))
        shape = (1, *layout.shape)
        header = ChunkHeader(shape, "bfloat16", SESSION, encoding=encoding)
        body = compress(encoding, raw) if encoding else raw

        chunk = read_chunk(pack_chunk(header), body)

        assert np.array_equal(chunk.tensor.view(np.uint16)[0], layout)


SESSION = SessionId("8d7f2f0a-0000-4000-8000-000000000000")
counts = st.integers(0, 10**20 - 1)
node_ids = st.from_regex(r"[a-z][a-z0-9-]{0,62}", fullmatch=True).map(NodeId)
layer_ranges = st.tuples(st.integers(0, 999_998), st.integers(1, 1000)).map(
    lambda pair: LayerRange(pair[0], min(999_999, pair[0] + pair[1]))
)
hops = st.builds(
    Hop,
    node_ids,
    st.builds(
        "{}:{}".format,
        st.sampled_from(["10.0.0.2", "[fd00::3]", "a_b.example"]),
        st.integers(1, 65535),
    ),
    layer_ranges,
)
encodings = st.sampled_from(["zstd", "bf16p", "x-1"])
headers_of_chunks = st.builds(
    ChunkHeader,
    shape=st.lists(st.integers(1, 8), min_size=1, max_size=5).map(tuple),
    dtype=st.just("bfloat16"),
    session=st.uuids().map(str).map(SessionId),
    chunk_index=st.integers(0, 5),
    chunk_total=st.integers(6, 10**20 - 1),
    encoding=st.none() | encodings,
    position=st.none() | counts,
    layers=st.none() | layer_ranges,
    phase=st.sampled_from(Phase),
    want=st.none()
    | st.sampled_from([Want("hidden"), Want("logits"), Want("none")])
    | st.integers(1, 99_999).map(lambda top: Want("top", top)),
    accept_encoding=st.lists(encodings, max_size=16).map(tuple),
    route=st.lists(hops, max_size=8).map(tuple),
    max_tokens=st.none() | st.integers(1, 10**20 - 1),
    epoch=counts,
    traceparent=st.none() | st.just(f"00-{'a' * 32}-{'b' * 16}-01"),
    grant=st.none() | st.from_regex(r"[A-Za-z0-9_.-]{1,200}", fullmatch=True),
)


@given(headers_of_chunks)
@settings(deadline=None)
def test_chunk_header_round_trip(header: ChunkHeader) -> None:
    assert unpack_chunk(pack_chunk(header)) == header


timings = st.builds(
    HopTiming,
    node_ids,
    *[st.integers(0, 10**9).map(lambda n: n / 1000)] * 5,
    st.integers(0, 1 << 40),
    st.integers(0, 1 << 40),
)


@given(st.lists(timings, max_size=5), st.integers(0, 5))
@settings(deadline=None)
def test_answer_header_round_trip(hops_timed: list[HopTiming], index: int) -> None:
    value = ""
    for timing in reversed(hops_timed):
        value = format_timing(timing, value)
    header = AnswerHeader((1, 3, 2), "float32", SESSION, index, 6, "zstd", value)

    assert unpack_answer(pack_answer(header)) == header
    assert parse_timings(value) == hops_timed


@settings(max_examples=300, deadline=None)
@given(fields())
def test_any_fields_are_an_operation_or_a_wire_error(headers):
    for unpack, pack in (
        (unpack_reservation, pack_reservation),
        (unpack_rebuild, pack_rebuild),
        (unpack_release, pack_release),
    ):
        try:
            asked = unpack(SESSION, headers)
        except WireError:
            continue
        assert unpack(SESSION, pack(asked)) == asked


counts = st.integers(1, 10**20 - 1)
routes = st.lists(
    st.builds(
        Hop,
        st.sampled_from(["a", "node-1", "z" * 63]).map(NodeId),
        st.sampled_from(["10.0.0.2:7080", "[fd00::3]:65535", "a.example:1"]),
        st.tuples(st.integers(0, 99), st.integers(100, 999999)).map(lambda p: LayerRange(*p)),
    ),
    max_size=4,
).map(tuple)


@given(
    st.builds(Reservation, st.just(SESSION), counts, st.just(LayerRange(0, 4)) | st.none(), routes)
    | st.builds(
        Rebuild,
        st.just(SESSION),
        counts,
        routes.filter(bool),
        st.sampled_from(RebuildMode),
        counts | st.none(),
        st.integers(0, 10**20 - 1),
    )
    | st.builds(Release, st.just(SESSION), st.booleans())
)
def test_every_operation_there_and_back(asked):
    pack, unpack = {
        Reservation: (pack_reservation, unpack_reservation),
        Rebuild: (pack_rebuild, unpack_rebuild),
        Release: (pack_release, unpack_release),
    }[type(asked)]
    assert unpack(SESSION, pack(asked)) == asked
