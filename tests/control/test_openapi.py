"""The description of the JSON face is valid, complete, and what a live one does."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from openapi_spec_validator import validate
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)
from schemathesis.generation import GenerationMode
from typer.testing import CliRunner

from meshnet.cli import control
from meshnet.control.app import ControlServer
from meshnet.control.client import ControlClient
from meshnet.control.httprules import HttpRules
from meshnet.control.openapi import openapi
from meshnet.control.settings import ControlSettings
from meshnet.control.stubs import SERVICES
from meshnet.v1 import node_service_pb2 as pb
from meshnet.v1 import types_pb2

NODE = pb.Node(
    incarnation=1,
    endpoints=[types_pb2.Endpoint(uri="http://127.0.0.1:7080/forward")],
    shards=[
        types_pb2.Shard(
            model="models/m", model_digest="d", layers=types_pb2.LayerRange(end=2), layer_count=2
        )
    ],
)
DOCUMENT = openapi(SERVICES, title="t", version="1")


def test_the_description_is_valid_openapi():
    validate(DOCUMENT)


def test_every_binding_is_described_once():
    operations = [
        (method.upper(), operation["operationId"])
        for path in DOCUMENT["paths"].values()
        for method, operation in path.items()
    ]
    bound = [(b.http_method, b.rpc.rpartition("/")[2]) for b in HttpRules(SERVICES).bindings]
    assert sorted(operations) == sorted(bound)


def test_the_command_prints_what_a_live_face_answers(api_url):
    printed = json.loads(CliRunner().invoke(control.app, ["openapi"]).stdout)
    assert printed["paths"] == DOCUMENT["paths"]
    assert printed == schemathesis.openapi.from_url(f"{api_url}/openapi.json").raw_schema


@pytest.fixture(scope="module")
def api_url() -> Iterator[str]:
    """Run a control plane with a node in a thread of its own; gives its URL."""
    started: list[str] = []
    ready, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        server = ControlServer(
            ControlSettings(http_port=0, grpc_port=0, lease_ttl_s=60, bookmark_interval_s=0.1)
        )
        addresses = await server.start()
        async with ControlClient(f"grpc://{addresses.grpc}") as client:
            await client.register("a", NODE)
        started.append(f"http://{addresses.http}")
        ready.set()
        await stop.wait()
        await server.close()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(20)
    yield started[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(20)
    loop.close()


OPERATIONS = [
    found.ok()
    for found in schemathesis.openapi.from_dict(DOCUMENT).get_all_operations()
    if not found.ok().path.endswith(":watch")  # a stream has no end to wait for
]


@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.label)
def test_a_live_face_keeps_to_its_description(operation, mode, api_url):
    """Requests made from the description, and such as it forbids."""

    @settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=HealthCheck)
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case):
        case.call_and_validate(
            base_url=api_url,
            checks=[
                not_a_server_error,
                status_code_conformance,
                content_type_conformance,
                response_schema_conformance,
            ],
        )

    try:
        check()
    except Unsatisfiable:  # nothing can be wrong with a request that has no parts
        assert mode is GenerationMode.NEGATIVE
