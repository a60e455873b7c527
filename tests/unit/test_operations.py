"""Header fields of what is asked of a session: there and back, and what is refused."""

from __future__ import annotations

import uuid

import pytest

from meshnet.errors import WireError
from meshnet.operations import Reservation, pack_reservation, unpack_reservation
from meshnet.topology import Hop, LayerRange, NodeId, SessionId

SESSION = SessionId(str(uuid.uuid4()))
HOPS = (
    Hop(NodeId("beta"), "10.0.0.2:7080", LayerRange(10, 20)),
    Hop(NodeId("gamma"), "[fd00::3]:7080", LayerRange(20, 30)),
)


@pytest.mark.parametrize(
    "asked",
    [
        Reservation(SESSION, 1),
        Reservation(SESSION, 10**19, LayerRange(0, 10), HOPS),
    ],
)
def test_a_reservation_there_and_back(asked):
    assert unpack_reservation(SESSION, pack_reservation(asked)) == asked


def test_the_next_hop_is_asked_for_its_own_layers():
    onward = Reservation(SESSION, 7, LayerRange(0, 10), HOPS).onward()
    assert onward == Reservation(SESSION, 7, LayerRange(10, 20), HOPS[1:])
    assert onward.onward() == Reservation(SESSION, 7, LayerRange(20, 30))


@pytest.mark.parametrize(
    ("fields", "field", "says"),
    [
        ([], "X-Meshnet-Max-Tokens", "missing"),
        ([("X-Meshnet-Max-Tokens", "0")], "X-Meshnet-Max-Tokens", "at least 1"),
        ([("X-Meshnet-Max-Tokens", "+5")], "X-Meshnet-Max-Tokens", "'+5'"),
        ([("X-Meshnet-Max-Tokens", "9" * 21)], "X-Meshnet-Max-Tokens", "20 digits"),
        ([("x-meshnet-max-tokens", "5")] * 2, "X-Meshnet-Max-Tokens", "more than once"),
        (
            [("X-Meshnet-Max-Tokens", "5"), ("X-Meshnet-Layers", "3-3")],
            "X-Meshnet-Layers",
            "START < END",
        ),
        (
            [("X-Meshnet-Max-Tokens", "5"), ("X-Meshnet-Route", "beta")],
            "X-Meshnet-Route",
            "NODE@HOST:PORT",
        ),
        ([("X-Meshnet-Max-Tokens", "5"), ("X-Meshnet-Wire", "1")], "X-Meshnet-Wire", "2"),
    ],
)
def test_a_bad_reservation_names_its_field(fields, field, says):
    with pytest.raises(WireError) as caught:
        unpack_reservation(SESSION, fields)
    assert caught.value.field == field
    assert says in caught.value.message
