"""The vectors against a node that the standard library alone runs."""

from __future__ import annotations

import ast
import socket
import sys
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer

import pytest

from tests.vectors import stdlib_node
from tests.vectors.load import PARSER_ABILITIES, check_reply, exchange, load_requests

APPLICABLE = load_requests(stdlib_node.ABILITIES)
ENCODED = [
    vector
    for vector in load_requests(PARSER_ABILITIES)
    if "zstd" in vector.needs and not vector.name.startswith("encoding-bad")
]
GOOD = next(vector for vector in APPLICABLE if vector.name == "wire-absent")


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    with ThreadingHTTPServer(("127.0.0.1", 0), stdlib_node.Node) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield "127.0.0.1", server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("vector", APPLICABLE, ids=str)
def test_vector(address: tuple[str, int], vector) -> None:
    with socket.create_connection(address, timeout=10) as connection:
        reply = exchange(connection, vector)
        check_reply(vector, reply)
        if not reply.closes:
            check_reply(GOOD, exchange(connection, GOOD))


@pytest.mark.parametrize("vector", ENCODED, ids=str)
def test_encoding_that_it_did_not_list_is_refused(address: tuple[str, int], vector) -> None:
    with socket.create_connection(address, timeout=10) as connection:
        reply = exchange(connection, vector)
    assert reply.status == 400
    assert b"X-Meshnet-Encoding" in reply.body


def test_most_vectors_apply() -> None:
    assert len(APPLICABLE) > 100


def test_it_imports_the_standard_library_alone() -> None:
    with open(stdlib_node.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [alias.name for alias in node.names]
        )
    }
    assert imported <= sys.stdlib_module_names
