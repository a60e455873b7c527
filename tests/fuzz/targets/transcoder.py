"""HTTP requests to the control plane's messages (`meshnet.control`: template, binding, JSON).

The first byte chooses the schema: meshnet's own, or one that uses every rule of
google.api.http. The first line is ``METHOD TARGET``, then header fields up to an empty line,
then the body.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from google.protobuf.message import Message

from meshnet.control.binding import bind_body, bind_path, bind_query, mask_of, parse_json
from meshnet.control.httpmeta import (
    check_origin,
    mesh_error_answer,
    metadata_in,
    timeout_in,
    to_json,
)
from meshnet.control.httprules import HttpRules
from meshnet.control.stubs import SERVICES
from meshnet.control.validate import check_required
from meshnet.errors import MeshError
from tests.control.oracle.server import load_service
from tests.fuzz.targets.errors import check_error
from tests.fuzz.targets.fields import read_fields

with tempfile.TemporaryDirectory() as _folder:
    RULES = {b"m": HttpRules(SERVICES), b"o": HttpRules([load_service(Path(_folder))])}
MAX_ERROR = 16 * 1024


def check(data: bytes) -> None:
    rules = RULES.get(data[:1], RULES[b"m"])
    head, _, body = data[1:].partition(b"\n\n")
    line, _, rest = head.partition(b"\n")
    method, _, target = line.decode("utf-8", "surrogateescape").partition(" ")
    path, _, query = target.partition("?")
    fields = read_fields(rest)
    try:
        check_origin(method, dict(fields))
        metadata_in(fields)
        timeout_in(dict(fields).get("Grpc-Timeout"), 1.0)
        for binding, values in rules.find(path):
            if binding.http_method == method:
                _check_message(binding, values, query, body)
    except MeshError as error:
        check_error(error)
        _, _, answer = mesh_error_answer(error)
        assert len(answer) <= MAX_ERROR, len(answer)


def _check_message(binding, values, query, body):
    message: Message = binding.request_type()
    if body:
        parsed = parse_json(body, "body")
        bind_body(message, parsed, binding.body or "*")
        if binding.body in message.DESCRIPTOR.fields_by_name:
            mask_of(parsed, message.DESCRIPTOR.fields_by_name[binding.body].message_type, set())
    bind_path(message, values)
    bind_query(message, query, body=binding.body, bound=set(values))
    same = binding.request_type.FromString(message.SerializeToString())
    assert to_json(same) == to_json(message)
    check_required(message)
