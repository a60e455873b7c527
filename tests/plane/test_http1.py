"""Framing without sockets: heads, chunked coding, and that any bytes at all are judged."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.errors import MeshError, WireError
from meshnet.plane.chunked import ChunkedDecoder
from meshnet.plane.http1 import (
    build_answer,
    build_request,
    find_head_end,
    parse_answer,
    parse_request,
)

GOOD_REQUESTS = [
    (
        b"POST /forward HTTP/1.1\r\nHost: n\r\nContent-Length: 16\r\n\r\n",
        {"method": "POST", "target": "/forward", "content_length": 16, "keep_alive": True},
    ),
    (
        b"GET http://node:7080/healthz?x=1 HTTP/1.1\r\nHost: n\r\n\r\n",
        {"target": "/healthz?x=1", "content_length": None, "chunked": False},
    ),
    (b"GET HTTP://node HTTP/1.1\r\nHost: n\r\n\r\n", {"target": "/"}),
    (b"GET http://node?x HTTP/1.1\r\nHost: n\r\n\r\n", {"target": "/?x"}),
    (b"OPTIONS * HTTP/1.1\r\nHost: n\r\n\r\n", {"target": "*"}),
    (
        b"POST / HTTP/1.1\r\nhost:n\r\nTRANSFER-ENCODING:\t Chunked \t\r\n\r\n",
        {"chunked": True, "content_length": None},
    ),
    (
        b"POST / HTTP/1.1\r\nHost: n\r\nExpect: 100-Continue\r\nContent-Length: 1\r\n\r\n",
        {"expects_continue": True},
    ),
    (b"GET / HTTP/1.1\r\nHost: n\r\nConnection: te, Close\r\n\r\n", {"keep_alive": False}),
    (b"GET / HTTP/1.0\r\n\r\n", {"keep_alive": False}),
    (b"GET / HTTP/1.0\r\nConnection: Keep-Alive\r\n\r\n", {"keep_alive": True}),
    (
        b"POST / HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 1\r\n\r\n",
        {"expects_continue": False},
    ),
    (b"GET / HTTP/1.1\r\nHost:\r\nX: a b\tc\r\n\r\n", {"fields": [("Host", ""), ("X", "a b\tc")]}),
    (b"GET / HTTP/1.1\r\nHost: n\r\nX: \xe9\r\n\r\n", {"fields": [("Host", "n"), ("X", "é")]}),
]

HOST = b"POST /forward HTTP/1.1\r\nHost: n\r\n"
BAD_REQUESTS = [
    (b"POST /forward\r\n\r\n", 400, None, "request line"),
    (b"POST  /forward HTTP/1.1\r\nHost: n\r\n\r\n", 400, None, "request line"),
    (b"PO(ST /forward HTTP/1.1\r\nHost: n\r\n\r\n", 400, None, "request line"),
    (b"POST /forward HTTP/2.0\r\nHost: n\r\n\r\n", 400, None, "HTTP/2.0"),
    (b"POST forward HTTP/1.1\r\nHost: n\r\n\r\n", 400, None, "request target"),
    (b"POST /forward#x HTTP/1.1\r\nHost: n\r\n\r\n", 400, None, "request target"),
    (b"POST /forward HTTP/1.1\r\n\r\n", 400, "Host", "expected once"),
    (HOST + b"Host: m\r\n\r\n", 400, "Host", "2 times"),
    (HOST + b"X: 1\r\n folded\r\n\r\n", 400, None, "' folded"),
    (HOST + b" X: 1\r\n\r\n", 400, None, "header line"),
    (HOST + b"X : 1\r\n\r\n", 400, None, "'X : 1"),
    (HOST + b": 1\r\n\r\n", 400, None, "header line"),
    (HOST + b"no colon\r\n\r\n", 400, None, "no colon"),
    (HOST + b"X: a\x00b\r\n\r\n", 400, None, "header line"),
    (HOST + b"X: a\rb\r\n\r\n", 400, None, "header line"),
    (HOST + b"X: 1\nY: 2\r\n\r\n", 400, None, "header line"),
    (b"POST /forward HTTP/1.1\nHost: n\n\n", 400, None, "bare LF"),
    (HOST + b"Content-Length: 1\r\nContent-Length: 1\r\n\r\n", 400, "Content-Length", "once"),
    (HOST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400, "Content-Length", "once"),
    (HOST + b"Content-Length: 1, 1\r\n\r\n", 400, "Content-Length", "digits"),
    (HOST + b"Content-Length: +1\r\n\r\n", 400, "Content-Length", "digits"),
    (HOST + b"Content-Length: -1\r\n\r\n", 400, "Content-Length", "digits"),
    (HOST + b"Content-Length: 0x10\r\n\r\n", 400, "Content-Length", "digits"),
    (HOST + b"Content-Length: \xb2\r\n\r\n", 400, "Content-Length", "digits"),
    (HOST + b"Content-Length: 1_0\r\n\r\n", 400, "Content-Length", "digits"),
    (HOST + b"Content-Length:\r\n\r\n", 400, "Content-Length", "digits"),
    (HOST + b"Content-Length: 99999999999999999999\r\n\r\n", 400, "Content-Length", "digits"),
    (
        HOST + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
        400,
        "Content-Length",
        "beside",
    ),
    (HOST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501, "Transfer-Encoding", "gzip"),
    (HOST + b"Transfer-Encoding: chunked, gzip\r\n\r\n", 400, "Transfer-Encoding", "gzip"),
    (HOST + b"Transfer-Encoding: identity\r\n\r\n", 400, "Transfer-Encoding", "identity"),
    (HOST + b"Transfer-Encoding: chunked, chunked\r\n\r\n", 400, "Transfer-Encoding", "chunked"),
    (HOST + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n", 400, "Transfer-Encoding", "once"),
    (b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400, "Transfer-Encoding", "1.0"),
    (HOST + b"".join(b"X-%d: 1\r\n" % i for i in range(64)) + b"\r\n", 431, None, "65"),
]


@pytest.mark.parametrize(("head", "expected"), GOOD_REQUESTS)
def test_request_heads_are_read(head: bytes, expected: dict[str, object]) -> None:
    assert find_head_end(bytearray(head + b"body"), 0, len(head) + 4) == len(head)
    request = parse_request(head, max_fields=64)
    assert {name: getattr(request, name) for name in expected} == expected


@pytest.mark.parametrize(("head", "status", "field", "words"), BAD_REQUESTS)
def test_request_heads_are_refused(head: bytes, status: int, field: str | None, words: str) -> None:
    assert find_head_end(bytearray(head), 0, len(head)) == len(head)
    with pytest.raises(WireError) as caught:
        parse_request(head, max_fields=64)
    assert caught.value.code.http_status == status
    assert caught.value.field == field
    assert words in caught.value.message


@pytest.mark.parametrize("end", range(len(GOOD_REQUESTS[0][0])))
def test_an_incomplete_head_has_no_end(end: int) -> None:
    assert find_head_end(bytearray(GOOD_REQUESTS[0][0][:end]), 0, end) == -1


def test_answer_heads_are_read() -> None:
    head = parse_answer(
        b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\nX-Meshnet-Shape: 1,1\r\n\r\n", max_fields=8
    )
    assert (head.status, head.content_length, head.chunked, head.keep_alive) == (
        200,
        4,
        False,
        True,
    )
    assert head.fields == [("Content-Length", "4"), ("X-Meshnet-Shape", "1,1")]
    assert parse_answer(b"HTTP/1.1 200\r\n\r\n", max_fields=8).content_length is None
    assert not parse_answer(b"HTTP/1.0 200 OK\r\n\r\n", max_fields=8).keep_alive


@pytest.mark.parametrize(
    "head",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 20 OK\r\n\r\n",
        b"HTTP/1.1 999 Odd\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"\x16\x03\x01\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
    ],
)
def test_answer_heads_are_refused(head: bytes) -> None:
    with pytest.raises(WireError):
        parse_answer(head, max_fields=8)


def test_heads_are_written_as_they_are_read() -> None:
    head = build_request("POST", "/forward", "n:7080", [("X-Meshnet-Shape", "1,1,8")], 16)
    request = parse_request(head, max_fields=8)
    assert request.fields == [
        ("Host", "n:7080"),
        ("X-Meshnet-Shape", "1,1,8"),
        ("Content-Length", "16"),
    ]
    answer = parse_answer(build_answer(204, [("A", "b")], None, close=True), max_fields=8)
    assert (answer.status, answer.content_length, answer.keep_alive) == (204, None, False)
    assert answer.fields == [("A", "b"), ("Connection", "close")]


@pytest.mark.parametrize("value", ["a\r\nX: b", "a\nb", "a\rb", "snow\u2603"])
def test_a_value_cannot_break_a_head(value: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        build_answer(200, [("X", value)], 0, close=False)


@given(st.binary(max_size=300))
def test_any_bytes_are_a_head_or_an_error(noise: bytes) -> None:
    for parse in (parse_request, parse_answer):
        for head in (noise, noise + b"\r\n\r\n", HOST + noise + b"\r\n\r\n"):
            status = 400
            try:
                parse(head, max_fields=8)
            except MeshError as error:
                status = error.code.http_status
            assert status in (400, 431, 501)


CHUNKED = [
    (b"0\r\n\r\n", b""),
    (b"4\r\nabcd\r\n0\r\n\r\n", b"abcd"),
    (b"1\r\na\r\n03 \t;name=value;q\r\nbcd\r\n000\r\nTrailer: x\r\nT2: y\r\n\r\n", b"abcd"),
    (b"A\r\n0123456789\r\na\r\nabcdefghij\r\n0\r\n\r\n", b"0123456789abcdefghij"),
]


@pytest.mark.parametrize(("coded", "body"), CHUNKED)
@pytest.mark.parametrize("step", [1, 2, 3, 7, 1000])
def test_chunked_bodies_are_read_in_any_pieces(coded: bytes, body: bytes, step: int) -> None:
    out = bytearray(32)
    decoder = ChunkedDecoder(memoryview(out))
    data, pending = coded + b"GET /next", b""
    while not decoder.done:
        pending, data = pending + data[:step], data[step:]
        pending = pending[decoder.feed(memoryview(pending)) :]
    assert bytes(out[: decoder.size]) == body
    assert pending + data == b"GET /next"


@pytest.mark.parametrize(
    ("coded", "words"),
    [
        (b"g\r\n", "size line"),
        (b"-1\r\n", "size line"),
        (b"0x4\r\nabcd\r\n", "size line"),
        (b"4 abcd\r\n", "size line"),
        (b"\r\n", "size line"),
        (b"4\nabcd", "size line"),
        (b"4;\x00\r\n", "size line"),
        (b"11111111111111111\r\n", "size line"),
        (b"4\r\nabcdef\r\n", "longer"),
        (b"9\r\n", "expected at most 8"),
        (b"4\r\nabcd\r\n5\r\n", "at least 9 bytes, expected at most 8"),
        (b"ffffffffffffffff\r\n", "expected at most 8"),
        (b"4;" + b"x" * 1100, "line of more"),
        (b"0\r\n" + b"X: " + b"y" * 900 + b"\r\n", None),
        (b"0\r\n" + (b"X: " + b"y" * 900 + b"\r\n") * 10, "trailer of more"),
    ],
)
def test_chunked_bodies_are_refused(coded: bytes, words: str | None) -> None:
    decoder = ChunkedDecoder(memoryview(bytearray(8)))
    if words is None:
        assert decoder.feed(memoryview(coded)) == len(coded)
        assert not decoder.done
        return
    with pytest.raises(WireError, match=words) as caught:
        decoder.feed(memoryview(coded))
    field = "Content-Length" if "expected at most" in words else "Transfer-Encoding"
    assert caught.value.field == field


@given(st.binary(max_size=200))
def test_any_bytes_are_chunked_or_an_error(noise: bytes) -> None:
    out = bytearray(16)
    decoder = ChunkedDecoder(memoryview(out))
    try:
        used = decoder.feed(memoryview(noise))
    except WireError:
        return
    assert used <= len(noise)
    assert decoder.size <= len(out)
