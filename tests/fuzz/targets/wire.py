"""Header fields of chunks, answers, errors and what is asked of sessions (`meshnet.wire`).

The first byte chooses the message, the rest are its header fields; for an error, the body
follows an empty line.
"""

from __future__ import annotations

from meshnet.errors import MeshError, WireError
from meshnet.operations import (
    pack_rebuild,
    pack_release,
    pack_reservation,
    unpack_rebuild,
    unpack_release,
    unpack_reservation,
)
from meshnet.problem import pack_problem, unpack_problem
from meshnet.timing import parse_timings
from meshnet.topology import SessionId
from meshnet.wire import WireLimits, pack_answer, pack_chunk, unpack_answer, unpack_chunk
from tests.fuzz.targets.errors import check_error
from tests.fuzz.targets.fields import read_fields

LIMITS = WireLimits(max_chunk_bytes=1 << 20)
SESSION = SessionId("8d7f2f0a-0000-4000-8000-000000000001")


def check(data: bytes) -> None:
    kind, rest = data[:1], data[1:]
    if kind == b"p":
        head, _, body = rest.partition(b"\n\n")
        _check_passed_on(unpack_problem(400 + len(head) % 200, read_fields(head), body))
        return
    fields = read_fields(rest)
    try:
        match kind:
            case b"a":
                answer = unpack_answer(fields, LIMITS)
                assert answer.num_bytes <= LIMITS.max_chunk_bytes
                parse_timings(answer.server_timing)
                assert unpack_answer(pack_answer(answer), LIMITS) == answer
            case b"o":
                for unpack, pack in (
                    (unpack_reservation, pack_reservation),
                    (unpack_rebuild, pack_rebuild),
                    (unpack_release, pack_release),
                ):
                    _check_operation(unpack, pack, fields)
            case _:
                chunk = unpack_chunk(fields, LIMITS)
                assert chunk.num_bytes <= LIMITS.max_chunk_bytes
                assert unpack_chunk(pack_chunk(chunk), LIMITS) == chunk
    except WireError as error:
        check_error(error)


def _check_operation(unpack, pack, fields):
    try:
        asked = unpack(SESSION, fields)
    except WireError as error:
        check_error(error)
    else:
        assert unpack(SESSION, pack(asked)) == asked


def _check_passed_on(error: MeshError) -> None:
    _, headers, _ = pack_problem(error)
    for name, value in headers:
        assert name.isascii()
        assert value.isascii()
        assert value.isprintable(), (name, value)
