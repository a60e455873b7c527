"""Removed members' keys in a process: until when they are known, and how many."""

from __future__ import annotations

from meshnet import removals as module
from meshnet.removals import Removals


def test_a_key_is_known_until_its_certificates_have_ended_whatever_is_said_later():
    removals = Removals()
    assert removals.learn({"k1": 10, "k2": 20}, 5.0)
    assert not removals.learn({}, 10.0)
    assert "k1" in removals
    assert not removals.learn({"k2": 20}, 11.0)
    assert ("k1" in removals, "k2" in removals, "k3" in removals) == (False, True, False)


def test_the_generation_counts_what_is_new_alone():
    removals = Removals()
    for keys, generation in (({}, 0), ({"k1": 10}, 1), ({"k1": 10}, 1), ({"k2": 10}, 2), ({}, 2)):
        removals.learn(keys, 5.0)
        assert removals.generation == generation


def test_of_too_many_keys_those_stay_that_end_last(monkeypatch):
    monkeypatch.setattr(module, "_MAX_KEYS", 3)
    removals = Removals()
    removals.learn({f"k{until_s}": until_s for until_s in range(10, 15)}, 5.0)
    removals.learn({"k11": 11}, 5.0)
    assert [f"k{number}" in removals for number in range(10, 15)] == [
        False,
        False,
        True,
        True,
        True,
    ]
