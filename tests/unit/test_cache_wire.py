"""Header fields of moved caches: what is read, what is refused, and how they are written."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshnet.cache_wire import (
    CacheHeader,
    MoveHeader,
    pack_cache,
    pack_move,
    unpack_cache,
    unpack_move,
)
from meshnet.errors import WireError
from meshnet.kv import KV_DTYPES, KvLayout, LayerKv
from meshnet.topology import Hop, LayerRange, NodeId, SessionId
from tests.vectors.load import check_fault, load_caches

SESSION = SessionId("8d7f2f0a-0000-4000-8000-00000000000f")
HOP = Hop(NodeId("beta"), "10.0.0.2:7080", LayerRange(10, 20))
CACHES = load_caches()
GOOD = [vector for vector in CACHES if vector.good]
BAD = [vector for vector in CACHES if not vector.good]


@pytest.mark.parametrize("vector", GOOD, ids=str)
def test_good_caches(vector):
    header = unpack_cache(SESSION, vector.headers)
    assert header.num_bytes == len(vector.body)
    for name, text in vector.expect["header"].items():
        assert str(getattr(header, name)) == text, name
    assert unpack_cache(SESSION, pack_cache(header)) == header


@pytest.mark.parametrize("vector", BAD, ids=str)
def test_bad_caches(vector):
    with pytest.raises(WireError) as caught:
        unpack_cache(SESSION, vector.headers)
    assert caught.value.code.http_status == vector.expect["status"]
    check_fault(vector.expect, caught.value.field, caught.value.message)


@given(
    layers=st.lists(
        st.sampled_from([None, LayerKv(3, 64, 64), LayerKv(1, 7, 2)]), min_size=1, max_size=9
    ),
    start=st.integers(0, 900_000),
    tokens=st.integers(1, 10**6),
    dtype=st.sampled_from(sorted(KV_DTYPES)),
    max_tokens=st.none() | st.integers(1, 10**9),
    digest=st.none() | st.from_regex(r"[0-9a-f]{64}", fullmatch=True),
    epoch=st.integers(0, 10**9),
    owner=st.none() | st.uuids().map(str),
)
def test_a_header_is_read_as_it_was_written(
    layers, start, tokens, dtype, max_tokens, digest, epoch, owner
):
    header = CacheHeader(
        SESSION,
        LayerRange(start, start + len(layers)),
        tokens,
        KvLayout.of(dtype, layers),
        max_tokens,
        digest,
        epoch,
        owner,
    )
    assert unpack_cache(SESSION, pack_cache(header)) == header


@given(st.lists(st.tuples(st.text(max_size=20), st.text(max_size=40)), max_size=12))
def test_any_fields_are_read_or_refused_as_bad(fields):
    for unpack in (unpack_cache, unpack_move):
        with pytest.raises(WireError):
            unpack(SESSION, fields)


@pytest.mark.parametrize("position", [None, 1, 4096])
def test_a_move_is_read_as_it_was_written(position):
    header = MoveHeader(SESSION, (HOP,), position)
    assert unpack_move(SESSION, pack_move(header)) == header


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"X-Meshnet-Route": None}, "X-Meshnet-Route"),
        ({"X-Meshnet-Route": ""}, "X-Meshnet-Route"),
        ({"X-Meshnet-Route": "beta@h:1"}, "X-Meshnet-Route"),
        ({"X-Meshnet-Position": "0"}, "X-Meshnet-Position"),
        ({"X-Meshnet-Position": "-1"}, "X-Meshnet-Position"),
        ({"X-Meshnet-Wire": "3"}, "X-Meshnet-Wire"),
    ],
)
def test_bad_moves_are_refused(change, field):
    fields = {**dict(pack_move(MoveHeader(SESSION, (HOP,), 7))), **change}
    with pytest.raises(WireError) as caught:
        unpack_move(SESSION, [(name, value) for name, value in fields.items() if value is not None])
    assert caught.value.field == field
