"""The parts of an HTTP request as a message: any input gives a message or a MeshError."""

from __future__ import annotations

import json
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st

from meshnet.control.binding import bind_body, bind_query, parse_json
from meshnet.control.httprules import HttpRules
from meshnet.control.status import to_status
from meshnet.control.stubs import SERVICES
from meshnet.control.template import parse_template, split_path
from meshnet.errors import Code, MeshError
from meshnet.v1 import node_service_pb2 as pb


def names(descriptor: Any, seen: frozenset[str] = frozenset()) -> set[str]:
    found = set()
    for field in descriptor.fields:
        found |= {field.name, field.json_name}
        inner = field.message_type
        if inner is not None and inner.full_name not in seen:
            found |= names(inner, seen | {inner.full_name})
    return found


NAMES = sorted(names(pb.RegisterNodeRequest.DESCRIPTOR))
KEYS = st.one_of(st.sampled_from(NAMES), st.text(max_size=3))
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-2, 2**32 + 1),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(), max_size=4),
    st.sampled_from(["\ud800", "1", "1s", "-1.5s", "1e9", "2026-01-02T03:04:05Z", "NaN", "a,b"]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=4)),
    max_leaves=12,
)


def told(error: MeshError) -> None:
    assert error.code in (Code.INVALID_ARGUMENT, Code.NOT_FOUND)
    to_status(error).SerializeToString()


@settings(max_examples=200, deadline=None)
@given(body=st.dictionaries(KEYS, JSON, max_size=4))
def test_any_json_gives_a_message_that_means_the_same_or_an_error(body):
    message = pb.RegisterNodeRequest()
    try:
        bind_body(message, parse_json(json.dumps(body).encode(), "body"), "*")
    except MeshError as error:
        told(error)
        return
    again = pb.RegisterNodeRequest()
    bind_body(again, json_format.MessageToDict(message), "*")
    assert again == message


@settings(max_examples=300, deadline=None)
@given(body=st.binary(max_size=40))
def test_any_bytes_are_json_or_an_error(body):
    try:
        parse_json(body, "body")
    except MeshError as error:
        told(error)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b'{"name": "nodes/a", "name": "nodes/b"}', "name"),
        (rb'{"name": "nodes/a", "nam\u0065": "nodes/a"}', "name"),
        (b'{"shards": [{"layers": {"start": 0, "start": 1}}]}', "start"),
        (b'{"labels": {"rack": "1", "rack": "2"}}', "rack"),
        (b'{"shards": [{"modelDigest": "a", "model_digest": "b"}]}', "model_digest"),
    ],
)
def test_a_field_that_comes_twice_is_refused(body, field):
    with pytest.raises(MeshError, match="twice") as caught:
        bind_body(pb.RegisterNodeRequest(), {"node": parse_json(body, "body")}, "*")
    assert caught.value.code is Code.INVALID_ARGUMENT
    assert caught.value.field.rpartition(".")[2] == field


@settings(max_examples=400, deadline=None)
@given(
    query=st.lists(
        st.tuples(
            st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map(".".join) | st.text(),
            st.text(max_size=5) | st.sampled_from(["1", "true", "1s", "%", "%ff", "%ED%A0%80"]),
        ).map("=".join),
        max_size=4,
    ).map("&".join)
)
def test_any_query_gives_a_message_or_an_error(query):
    message = pb.RegisterNodeRequest()
    try:
        bind_query(message, query, body="", bound=set())
    except MeshError as error:
        told(error)


@settings(max_examples=400, deadline=None)
@given(path=st.text(st.sampled_from("/:%25fF*nodes\udcff é"), max_size=20))
def test_any_path_is_found_or_not_or_an_error(path):
    try:
        HttpRules(SERVICES).find(f"/v1/nodes/{path}")
    except MeshError as error:
        told(error)


@pytest.mark.parametrize(
    "text",
    ["v1/x", "", "/", "/v1/{", "/v1/{}", "/v1/{a=**}/{b=**}", "/v1/{a}/{a}", "/v1/x:", "/a//b",
     "/{A=x}", "/{a={b}}", "/v1/x:y/z{", "/{a.=x}", "/v1/{a=x/}"],
)  # fmt: skip
def test_a_malformed_template_is_refused(text):
    with pytest.raises(ValueError, match="path template"):
        parse_template(text)


def test_a_template_with_a_verb_needs_it():
    template = parse_template("/v1/{name=nodes/*}:drain")
    assert template.match(split_path("/v1/nodes/a:drain")) == {"name": "nodes/a"}
    for path in ("/v1/nodes/a", "/v1/nodes/a%3Adrain", "/v1/nodes/:drain", "/v1/nodes/a:drain/"):
        assert template.match(split_path(path)) is None


def test_two_methods_on_one_path_are_refused():
    with pytest.raises(ValueError, match="same paths"):
        HttpRules([*SERVICES, SERVICES[0]])
