"""Ids and layer ranges as they are written."""

from __future__ import annotations

import pytest

from meshnet.topology import LayerRange, parse_layers, parse_node_id


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("0:10", LayerRange(0, 10)),
        ("0-10", LayerRange(0, 10)),
        ("9-10", LayerRange(9, 10)),
        ("0-999999", LayerRange(0, 999999)),
    ],
)
def test_layers(text: str, layers: LayerRange) -> None:
    assert parse_layers(text) == layers
    assert parse_layers(str(layers)) == layers
    assert len(layers) == layers.end - layers.start


@pytest.mark.parametrize(
    "text",
    ["", "1", "1-1", "2-1", "-1-2", "01-2", "1-02", "1--2", "1..2", "a-b", "0-1000000", "1-2 "],
)
def test_bad_layers_are_shown(text: str) -> None:
    with pytest.raises(ValueError, match="START:END") as caught:
        parse_layers(text)
    assert repr(text) in str(caught.value)


def test_contains() -> None:
    assert LayerRange(2, 8).contains(LayerRange(2, 8))
    assert LayerRange(2, 8).contains(LayerRange(3, 4))
    assert not LayerRange(2, 8).contains(LayerRange(1, 3))
    assert not LayerRange(2, 8).contains(LayerRange(7, 9))


@pytest.mark.parametrize("text", ["a", "node-1", "a" * 63, "n0--", "x9"])
def test_node_id(text: str) -> None:
    assert parse_node_id(text) == text


@pytest.mark.parametrize(
    "text", ["", "A", "1a", "-a", "a_b", "a.b", "a/b", "rack/1 +é", "%23", "a" * 64, "a\n", "é"]
)
def test_bad_node_id_is_shown(text: str) -> None:
    with pytest.raises(ValueError, match="node id") as caught:
        parse_node_id(text)
    assert repr(text) in str(caught.value)
