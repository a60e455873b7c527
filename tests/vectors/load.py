"""Load the vectors of proto/WIRE.md, send them over a socket, and check what comes back.

Format: see README.md beside this file. Nothing here imports meshnet: the vectors judge it.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import socket
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent

PARSER_ABILITIES = frozenset(
    {"any-shape", "bf16p", "default-limits", "embedding", "head", "parser", "stateless", "zstd"}
)
"""What a function from header fields and body to a tensor can be asked."""


@dataclass(frozen=True)
class RequestVector:
    """One request, and what a node must make of it; attributes are the file's members."""

    name: str
    about: str
    needs: frozenset[str]
    hidden_size: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    expect: dict[str, Any]
    source: str = ""
    method: str = "POST"
    framing: str = "length"

    @property
    def statuses(self) -> tuple[int, ...]:
        """Statuses that are right; only the first is 2xx, if any."""
        status = self.expect["status"]
        return tuple(status) if isinstance(status, list) else (status,)

    @property
    def good(self) -> bool:
        return self.statuses[0] < 300

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class AnswerVector:
    """One answer, and what a caller must make of it; attributes are the file's members."""

    name: str
    about: str
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    expect: dict[str, Any]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class CacheVector:
    """One KV cache, and what a node must make of it; attributes are the file's members."""

    name: str
    about: str
    headers: tuple[tuple[str, str], ...]
    body: bytes
    expect: dict[str, Any]

    @property
    def good(self) -> bool:
        return bool(self.expect["status"] < 300)

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class SessionVector:
    """One request on a session; attributes are the file's members."""

    name: str
    about: str
    method: str
    path: str
    headers: tuple[tuple[str, str], ...]
    expect: dict[str, Any]

    @property
    def kind(self) -> str:
        """The first word of its name: ``reserve``, ``rebuild``, ``release`` or ``bad``."""
        return self.name.partition("-")[0]

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Reply:
    """What came back over a socket; names of headers are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes = field(repr=False)

    @property
    def closes(self) -> bool:
        return self.headers.get("connection", "").lower() == "close"


def load_requests(
    abilities: Collection[str], *, hidden_size: int | None = None
) -> list[RequestVector]:
    """Load the requests for a receiver that has `abilities`; `hidden_size` None takes all."""
    vectors = [
        RequestVector(
            name=name,
            about=case["about"],
            needs=frozenset(case["needs"]),
            hidden_size=case["hidden_size"],
            headers=tuple((name, value) for name, value in case["headers"]),
            body=_body(case),
            expect=case["expect"],
            source=case.get("source", ""),
            method=case.get("method", "POST"),
            framing=case.get("framing", "length"),
        )
        for name, case in _cases("requests")
    ]
    return [
        vector
        for vector in vectors
        if vector.needs <= set(abilities) and hidden_size in (None, vector.hidden_size)
    ]


def load_answers() -> list[AnswerVector]:
    """Load all answers."""
    return [
        AnswerVector(
            name=name,
            about=case["about"],
            status=case["status"],
            headers=tuple((name, value) for name, value in case["headers"]),
            body=_body(case),
            expect=case["expect"],
        )
        for name, case in _cases("answers")
    ]


def load_caches() -> list[CacheVector]:
    """Load all caches."""
    return [
        CacheVector(
            name=name,
            about=case["about"],
            headers=tuple((name, value) for name, value in case["headers"]),
            body=_body(case),
            expect=case["expect"],
        )
        for name, case in _cases("caches")
    ]


def load_sessions() -> list[SessionVector]:
    """Load all requests on sessions."""
    return [
        SessionVector(
            name=name,
            about=case["about"],
            method=case["method"],
            path=case["path"],
            headers=tuple((name, value) for name, value in case["headers"]),
            expect=case["expect"],
        )
        for name, case in _cases("sessions")
    ]


def load_activation(name: str) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Load a captured activation: bfloat16 bits as uint16, ``[tokens, hidden]``."""
    array = np.load(HERE / "activations" / name, allow_pickle=False)
    assert array.dtype == np.uint16
    return array


def exchange(connection: socket.socket, vector: RequestVector) -> Reply:
    """Send `vector` as HTTP/1.1 over an open connection and read the answer whole."""
    fields = [("Host", "vectors.invalid"), *vector.headers]
    body = vector.body
    if vector.framing == "chunked":
        fields.append(("Transfer-Encoding", "chunked"))
        middle = len(body) // 2
        body = b"".join(b"%x\r\n%b\r\n" % (len(p), p) for p in (body[:middle], body[middle:], b""))
    else:
        fields.append(("Content-Length", str(len(body))))
    if vector.framing == "expect-continue":
        fields.append(("Expect", "100-continue"))
    lines = [f"{vector.method} /forward HTTP/1.1", *(f"{n}: {v}" for n, v in fields), "", ""]
    head = "\r\n".join(lines).encode("latin-1")
    if vector.framing == "expect-continue":
        connection.sendall(head)
        interim = b""
        while not interim.endswith(b"\r\n\r\n"):
            byte = connection.recv(1)
            assert byte, f"closed after {interim!r}, before 100 Continue"
            interim += byte
        assert interim.startswith(b"HTTP/1.1 100 "), interim
        connection.sendall(body)
    else:
        connection.sendall(head + body)
    response = http.client.HTTPResponse(connection, method=vector.method)
    try:
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        return Reply(response.status, headers, response.read())
    finally:
        response.close()


def check_reply(vector: RequestVector, reply: Reply) -> None:
    """Assert that a node which passes tensors through answered `vector` rightly."""
    expect = vector.expect
    assert reply.status in vector.statuses, f"{vector.about}\n{reply.status} {reply.body[:500]!r}"
    for name, value in expect.get("answer_headers", []):
        assert reply.headers.get(name.lower()) == value, name
    if reply.status >= 300:
        assert reply.headers.get("x-meshnet-wire-version") == "2"
        if vector.method != "HEAD":
            check_problem(vector, reply)
        return
    sent = {name.lower(): value.strip() for name, value in vector.headers}
    for name in ("x-meshnet-session", "x-meshnet-chunk-index", "x-meshnet-chunk-total"):
        assert reply.headers.get(name) == sent[name], name
    if reply.status == 204:
        assert reply.body == b""
        assert "x-meshnet-shape" not in reply.headers
        assert "x-meshnet-dtype" not in reply.headers
        return
    assert "x-meshnet-encoding" not in reply.headers, "the caller listed no encoding"
    assert reply.headers.get("x-meshnet-shape") == sent["x-meshnet-shape"]
    assert reply.headers.get("x-meshnet-dtype") == sent["x-meshnet-dtype"]
    check_decoded(expect, reply.body)


def check_problem(vector: RequestVector, reply: Reply) -> None:
    """Assert that an error answer is problem details which name the fault."""
    assert reply.headers.get("content-type") == "application/problem+json"
    problem = json.loads(reply.body)
    assert problem["status"] == reply.status
    assert problem["code"].isupper()
    assert problem["detail"]
    check_fault(vector.expect, problem.get("field"), problem["detail"])


def check_fault(expect: dict[str, Any], fault: str | None, detail: str) -> None:
    """Assert that an error names the right header and the numbers it should."""
    assert fault == expect.get("field", fault), detail
    for text in expect.get("says", []):
        assert text in detail, f"{text!r} is not in {detail!r}"
    assert "Traceback" not in detail


def check_decoded(expect: dict[str, Any], data: bytes) -> None:
    """Assert that `data` is the tensor that the vector decodes to, bit for bit."""
    if "decoded_sha256" in expect:
        assert hashlib.sha256(data).hexdigest() == expect["decoded_sha256"]
    else:
        assert data.hex() == expect["decoded_hex"]


def _cases(folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    paths = sorted((HERE / folder).glob("*.json"))
    assert paths, f"no vectors in {HERE / folder}"
    for path in paths:
        yield path.stem, json.loads(path.read_text(encoding="utf-8"))


def _body(case: dict[str, Any]) -> bytes:
    if "body_hex" in case:
        return bytes.fromhex(case["body_hex"])
    path = HERE / case["body_file"]
    if path.suffix == ".npy":
        return load_activation(path.name).tobytes()
    return path.read_bytes()
