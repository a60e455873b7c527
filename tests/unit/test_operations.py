"""Header fields of what is asked of a session: there and back, and what is refused."""

from __future__ import annotations

import uuid

import pytest

from meshnet.errors import WireError
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
from meshnet.topology import Hop, LayerRange, NodeId, SessionId
from tests.vectors.load import SessionVector, check_fault, load_sessions

SESSION = SessionId(str(uuid.uuid4()))
HOPS = (
    Hop(NodeId("beta"), "10.0.0.2:7080", LayerRange(10, 20)),
    Hop(NodeId("gamma"), "[fd00::3]:7080", LayerRange(20, 30)),
)
UNPACK = {"reserve": unpack_reservation, "rebuild": unpack_rebuild, "release": unpack_release}
VECTORS = [
    vector
    for vector in load_sessions()
    if vector.kind in UNPACK and vector.expect.get("field") != "session"
    if vector.expect["status"] in (204, 400)
]


@pytest.mark.parametrize(
    ("asked", "pack", "unpack"),
    [
        (Reservation(SESSION, 1), pack_reservation, unpack_reservation),
        (
            Reservation(SESSION, 10**19, LayerRange(0, 10), HOPS),
            pack_reservation,
            unpack_reservation,
        ),
        (Rebuild(SESSION, 1, HOPS[:1]), pack_rebuild, unpack_rebuild),
        (Rebuild(SESSION, 9, HOPS, RebuildMode.EXACT, 7, 3), pack_rebuild, unpack_rebuild),
        (Release(SESSION), pack_release, unpack_release),
        (Release(SESSION, alone=True), pack_release, unpack_release),
    ],
)
def test_there_and_back(asked, pack, unpack):
    assert unpack(SESSION, pack(asked)) == asked


def test_the_next_hop_is_asked_for_its_own_layers():
    onward = Reservation(SESSION, 7, LayerRange(0, 10), HOPS).onward()
    assert onward == Reservation(SESSION, 7, LayerRange(10, 20), HOPS[1:])
    assert onward.onward() == Reservation(SESSION, 7, LayerRange(20, 30))


@pytest.mark.parametrize("vector", VECTORS, ids=str)
def test_vectors(vector: SessionVector):
    unpack, expect = UNPACK[vector.kind], vector.expect
    if expect["status"] == 204:
        asked = unpack(SESSION, vector.headers)
        for name, text in expect["header"].items():
            assert str(getattr(asked, name)) == text, name
        return
    with pytest.raises(WireError) as caught:
        unpack(SESSION, vector.headers)
    assert caught.value.field == expect["field"]
    check_fault(expect, caught.value.field, caught.value.message)
