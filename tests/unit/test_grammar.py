"""Values of header fields: what is read, what is refused, and how it is written back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from meshnet import grammar
from meshnet.grammar import Phase, Want, format_route, parse_route
from meshnet.topology import Hop, LayerRange, NodeId

GOOD: list[tuple[Callable[[str], object], str, object]] = [
    (grammar.parse_shape, "8", (8,)),
    (grammar.parse_shape, "1,128,16384", (1, 128, 16384)),
    (grammar.parse_shape, ",".join("12345678"), (1, 2, 3, 4, 5, 6, 7, 8)),
    (grammar.parse_shape, "99999999999999999999,1", (99999999999999999999, 1)),
    (grammar.parse_dtype, "bfloat16", "bfloat16"),
    (grammar.parse_dtype, "int32", "int32"),
    (grammar.parse_dtype, "float32", "float32"),
    (
        grammar.parse_session,
        "8d7f2f0a-0000-4000-8000-00000000000f",
        "8d7f2f0a-0000-4000-8000-00000000000f",
    ),
    (grammar.parse_count, "0", 0),
    (grammar.parse_count, "007", 7),
    (grammar.parse_count, "9" * 20, 10**20 - 1),
    (grammar.parse_positive, "1", 1),
    (grammar.parse_wire_layers, "0-10", LayerRange(0, 10)),
    (grammar.parse_wire_layers, "999998-999999", LayerRange(999998, 999999)),
    (grammar.parse_phase, "prefill", Phase.PREFILL),
    (grammar.parse_phase, "decode", Phase.DECODE),
    (grammar.parse_want, "hidden", Want("hidden")),
    (grammar.parse_want, "logits", Want("logits")),
    (grammar.parse_want, "none", Want("none")),
    (grammar.parse_want, "top-1", Want("top", 1)),
    (grammar.parse_want, "top-99999", Want("top", 99999)),
    (grammar.parse_encoding, "zstd", "zstd"),
    (grammar.parse_encoding, "bf16p", "bf16p"),
    (grammar.parse_encodings, "zstd", ("zstd",)),
    (grammar.parse_encodings, "zstd , bf16p,\tbr", ("zstd", "bf16p", "br")),
]

BAD: dict[Callable[[str], object], list[str]] = {
    grammar.parse_shape: [
        *("", ",", "1,", ",1", "0", "1,0", "-1", "+1", "01", "1 ", " 1", "1, 2", "1.0", "1e3"),
        *("0x8", "1_0", "٣", "²", "1\n", "1,1,1,1,1,1,1,1,1", "9" * 21),
    ],
    grammar.parse_dtype: ["", "BFLOAT16", "float16", "bf16", " bfloat16", "bfloat16\n", "int64"],
    grammar.parse_session: [
        *("", "8D7F2F0A-0000-4000-8000-00000000000F", "8d7f2f0a000040008000000000000000"),
        *("8d7f2f0a-0000-4000-8000-00000000000", "8d7f2f0a-0000-4000-8000-00000000000g"),
        "8d7f2f0a-0000-4000-8000-00000000000f\n",
    ],
    grammar.parse_count: ["", "-1", "+1", " 1", "1 ", "1.0", "1e3", "1_0", "٣", "1\n", "9" * 21],
    grammar.parse_positive: ["", "0", "000", "-1", "9" * 21],
    grammar.parse_wire_layers: [
        *("", "1", "-", "1-", "-1", "1-1", "2-1", "0:10", "00-1", "0-01", "0 - 1", "1-1000000"),
        "0-1\n",
    ],
    grammar.parse_phase: ["", "PREFILL", "train", "decode "],
    grammar.parse_want: [
        *("", "Hidden", "top", "top-", "top-0", "top-01", "top--1", "top-1.5", "top-100000"),
        *("hidden,none", "none\n"),
    ],
    grammar.parse_encoding: ["", "identity", "ZSTD", "zstd,br", "zstd;q=1", "a" * 33, "1a", "z\n"],
    grammar.parse_encodings: ["", ",", "zstd,", "zstd;q=1", "*", ",".join(["a"] * 17)],
    grammar.parse_route: [
        *("", ",", "a", "a@h:1", "a@h/0-1", "@h:1/0-1", "a@:1/0-1", "a@h:0/0-1", "a@h:65536/0-1"),
        *("a@h:01/0-1", "A@h:1/0-1", "1@h:1/0-1", "a@h:1/1-1", "a@h:1/2-1", "a@h:1/0:1"),
        *("a@h:1/0-1,", "a@h:1/0-1;b@h:1/1-2", "a@u:p@h:1/0-1", "a@fd00::1:1/0-1", "a@h h:1/0-1"),
        *("a@[fd00::1:1/0-1", "a@[h]:1/0-1", "a@h:1/0-1\r\nX: y", f"{'a' * 64}@h:1/0-1"),
        ",".join(["a@h:1/0-1"] * 65),
    ],
    grammar.parse_traceparent: [
        *("", "00", f"00-{'a' * 32}-{'b' * 16}", f"00-{'A' * 32}-{'b' * 16}-01"),
        *(f"00-{'0' * 32}-{'b' * 16}-01", f"00-{'a' * 32}-{'0' * 16}-01"),
        *(f"ff-{'a' * 32}-{'b' * 16}-01", f"00-{'a' * 32}-{'b' * 16}-01-more"),
        *(f"01-{'a' * 32}-{'b' * 16}-01-a\rb", f"01-{'a' * 32}-{'b' * 16}-01-a b"),
        f"01-{'a' * 32}-{'b' * 16}-01{'c' * 3}",
    ],
}


@pytest.mark.parametrize(("parse", "text", "value"), GOOD)
def test_good(parse: Callable[[str], object], text: str, value: object) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "text"), [(parse, text) for parse, texts in BAD.items() for text in texts]
)
def test_bad_says_what_was_expected(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(ValueError, match=r"\w+ \w+|\w+, ") as caught:
        parse(text)

    assert type(caught.value) is ValueError


ROUTE = (
    Hop(NodeId("beta"), "10.0.0.2:7080", LayerRange(10, 20)),
    Hop(NodeId("gamma-2"), "[fd00::3]:65535", LayerRange(20, 30)),
    Hop(NodeId("d"), "node_4.example.org:1", LayerRange(30, 31)),
)


def test_route() -> None:
    text = "beta@10.0.0.2:7080/10-20,gamma-2@[fd00::3]:65535/20-30,d@node_4.example.org:1/30-31"

    assert parse_route(text) == ROUTE
    assert format_route(ROUTE) == text
    assert parse_route(text.replace(",", " ,\t")) == ROUTE
    assert len(parse_route(",".join(["a@h:1/0-1"] * 64))) == 64


@pytest.mark.parametrize("text", ["hidden", "logits", "none", "top-20"])
def test_want_is_written_as_it_was_read(text: str) -> None:
    assert str(grammar.parse_want(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        f"00-{'a' * 32}-{'b' * 16}-01",
        f"cc-{'a' * 32}-{'b' * 16}-00",
        f"01-{'a' * 32}-{'b' * 16}-01-x.y",
    ],
)
def test_traceparent_is_given_as_it_came(text: str) -> None:
    assert grammar.parse_traceparent(text) == text
