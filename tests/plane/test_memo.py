"""Heads read before: what is found equals what the parsers make, or nothing is found."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from meshnet.plane.memo import POSITION, SERVER_TIMING, HeadMemo
from meshnet.wire import ChunkHeader
from tests.plane.doubles import EchoHandler, calling, chunk_header, request, serving

HEAD = b"POST /forward HTTP/1.1\r\nX-Meshnet-Position: 7\r\nHost: n\r\n\r\n"


def test_a_head_is_found_by_all_but_one_value() -> None:
    memo: HeadMemo[str] = HeadMemo(POSITION)
    memo.keep(HEAD, "made")
    assert memo.find(HEAD) == ("made", b"7")
    assert memo.find(HEAD.replace(b": 7", b": 1234")) == ("made", b"1234")
    for other in (
        HEAD.replace(b"Host: n", b"Host: m"),
        HEAD.replace(b": 7", b": "),
        HEAD.replace(b": 7", b": -7"),
        HEAD.replace(b": 7", b": 7, 8"),
        HEAD.replace(b": 7", b":  7"),
        HEAD.replace(b": 7", b": " + b"7" * 21),
        HEAD.replace(b": 7\r\n", b": 7\r\nX-Meshnet-Position: 7\r\n"),
        HEAD.replace(b": 7\r\n", b": 7\n"),
        HEAD.replace(b"X-Meshnet-Position: 7\r\n", b""),
        b"=" + HEAD,
        b"+" + HEAD,
    ):
        assert memo.find(other) is None


def test_a_head_without_the_field_is_found_by_all_of_it() -> None:
    memo: HeadMemo[str] = HeadMemo(SERVER_TIMING)
    memo.keep(HEAD, "made")
    assert memo.find(HEAD) == ("made", None)
    assert memo.find(HEAD.replace(b": 7", b": 8")) is None
    assert memo.find(b"=" + HEAD) is None


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_only_the_value_may_differ(one: bytes, other: bytes) -> None:
    memo: HeadMemo[bytes] = HeadMemo(SERVER_TIMING)
    template = b"HTTP/1.1 200 OK\r\nServer-Timing: %b\r\nA: b\r\n\r\n"
    memo.keep(template % one, one)
    found = memo.find(template % other)
    if found is not None:
        made, value = found
        _, separator, rest = made.partition(b"\r\n")
        assert (made if value is None else value + separator + rest) == other


async def test_a_session_that_goes_on_is_read_as_if_for_the_first_time() -> None:
    handler = EchoHandler()
    base = chunk_header(max_tokens=90)
    sent: list[ChunkHeader] = [
        ChunkHeader(base.shape, base.dtype, session, position=position, max_tokens=90)
        for position in (None, 0, 1, 10**19, 1, None)
        for session in (base.session, chunk_header().session)
    ]
    async with serving(handler) as place, calling(place) as caller:
        for header in sent:
            await caller.send(request(header=header))
            assert (await caller.read()).headers["x-meshnet-session"] == header.session
            wrong = request(header=header).replace(b"X-Meshnet-Shape: 1", b"X-Meshnet-Shape: 0")
            await caller.send(wrong)
            assert (await caller.read()).status == 400
    assert [chunk.header for chunk in handler.chunks] == sent
