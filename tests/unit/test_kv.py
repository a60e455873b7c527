"""The layout of KV caches: its grammar, its sizes, its parts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.kv import KV_DTYPES, KvLayout, LayerKv, format_kv, parse_kv, parse_kv_dtype

SMOLLM = LayerKv(3, 64, 64)
dimensions = st.integers(1, 999_999)
layer_kvs = st.none() | st.builds(LayerKv, dimensions, dimensions, dimensions)
few_layers = st.lists(st.sampled_from([None, SMOLLM, LayerKv(8, 192, 128)]), min_size=1)
dtypes = st.sampled_from(sorted(KV_DTYPES))


@pytest.mark.parametrize(
    ("text", "runs"),
    [
        ("3x64x64", ((1, SMOLLM),)),
        ("10*3x64x64", ((10, SMOLLM),)),
        ("1*3x64x64", ((1, SMOLLM),)),
        ("3x64x64,3x64x64,8*3x64x64", ((10, SMOLLM),)),
        ("none", ((1, None),)),
        ("2*none,3x64x64,4*none", ((2, None), (1, SMOLLM), (4, None))),
        ("61*128x192x128", ((61, LayerKv(128, 192, 128)),)),
        ("999999*999999x999999x999999", ((999_999, LayerKv(999_999, 999_999, 999_999)),)),
    ],
)
def test_good_layouts_are_read(text, runs):
    assert parse_kv(text, "bfloat16") == KvLayout("bfloat16", runs)


@pytest.mark.parametrize(
    "text",
    [
        *("", ",", "3x64x64,", ",3x64x64", "3x64", "3x64x64x64", "0x64x64", "3x0x64", "3x64x0"),
        *("03x64x64", "+3x64x64", "-3x64x64", "3X64X64", "3 x64x64", " 3x64x64", "3x64x64\n"),
        *("0*3x64x64", "*3x64x64", "01*3x64x64", "1000000*3x64x64", "1000000x1x1", "2**3x64x64"),
        *("None", "NONE", "2none", "2*", "٣x64x64", "3x64x64;3x64x64", "1e3x64x64", "3x6_4x64"),
    ],
)
def test_others_are_refused(text):
    with pytest.raises(ValueError, match="HEADSxKEYxVALUE"):
        parse_kv(text, "bfloat16")


@pytest.mark.parametrize("text", ["", "int32", "BFLOAT16", "float64", "bf16", "float32 "])
def test_other_types_are_refused(text):
    with pytest.raises(ValueError, match="float32"):
        parse_kv_dtype(text)


@given(st.lists(layer_kvs, min_size=1, max_size=50), dtypes)
def test_a_layout_is_read_as_it_was_written(layers, dtype):
    layout = KvLayout.of(dtype, layers)
    assert parse_kv(format_kv(layout), dtype) == layout
    assert list(layout.layers()) == layers
    assert layout.num_layers == len(layers)


@given(few_layers, dtypes)
def test_bytes_are_those_of_every_element(layers, dtype):
    layout = KvLayout.of(dtype, layers)
    elements = [kv.heads * kv.key_width + kv.heads * kv.value_width for kv in layers if kv]
    assert layout.bytes_per_token == sum(elements) * KV_DTYPES[dtype]


@given(few_layers, dtypes, st.data())
def test_parts_hold_the_bytes_of_the_whole(layers, dtype, data):
    layout = KvLayout.of(dtype, layers)
    if len(layers) == 1:
        assert layout.cut(0, 1) == layout
        return
    at = data.draw(st.integers(1, len(layers) - 1))
    first, second = layout.cut(0, at), layout.cut(at, len(layers))
    assert [*first.layers(), *second.layers()] == layers
    assert first.bytes_per_token + second.bytes_per_token == layout.bytes_per_token


@pytest.mark.parametrize(("start", "end"), [(0, 0), (1, 1), (-1, 1), (0, 4), (2, 1)])
def test_layers_that_are_not_there_cannot_be_cut_out(start, end):
    with pytest.raises(ValueError, match="of 3"):
        KvLayout("bfloat16", ((3, SMOLLM),)).cut(start, end)


def test_a_million_layers_are_not_written_out():
    """What a header claims costs nothing until it is found good."""
    layout = parse_kv(",".join(["999999*1x1x1", "999999*none"] * 500), "float32")
    assert layout.num_layers == 999_999_000
    assert len(layout.runs) == 1000
