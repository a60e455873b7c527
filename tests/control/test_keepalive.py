from __future__ import annotations

from pathlib import Path

import pytest
from grpc._cython import cygrpc

from meshnet.control import connection, rpc
from meshnet.control.keepalive import CLIENT_OPTIONS, SERVER_OPTIONS
from meshnet.control.limits import DEFAULT_LIMITS


@pytest.mark.parametrize(
    "options",
    [connection._OPTIONS, rpc._options(DEFAULT_LIMITS)],
    ids=["client", "server"],
)
def test_grpc_knows_every_option(options):
    """A name that gRPC does not know is ignored without a word."""
    library = Path(cygrpc.__file__).read_bytes()
    assert [name for name, _ in options if name.encode() + b"\0" not in library] == []


def test_the_server_takes_pings_more_often_than_the_client_sends_them():
    server, client = dict(SERVER_OPTIONS), dict(CLIENT_OPTIONS)
    least_ms = server["grpc.http2.min_ping_interval_without_data_ms"]
    assert 2 * least_ms <= 10_000 <= client["grpc.keepalive_time_ms"]
    assert server["grpc.keepalive_permit_without_calls"] == 1
