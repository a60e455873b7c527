"""Clients that go away, and servers that are told to end."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import urllib.request

import openai
import pytest

from tests.e2e.commands import Running, eventually
from tests.e2e.sessions import MAX_TOKENS, QUESTION, Mesh, mesh

FREED_WITHIN_S = 5.0


@pytest.fixture(scope="module")
def made(smollm2):
    with mesh(smollm2) as started:
        started.ask()  # every node is warm
        yield started


def held(made: Mesh) -> list[tuple[float, float]]:
    """Give sessions and reserved cache tokens of every node."""
    return [figures(node) for node in made.nodes.values()]


def figures(node: Running) -> tuple[float, float]:
    with urllib.request.urlopen(f"http://{node.ready['address']}/metrics") as answer:
        lines = dict(
            line.split(" ") for line in answer.read().decode().splitlines() if line[0] != "#"
        )
    return float(lines["meshnet_sessions"]), float(lines["meshnet_cache_tokens_reserved"])


def test_s2_a_client_that_leaves_in_decode_frees_every_node(made):
    stream = made.ask(stream=True)
    for _ in range(3):
        next(stream)
    assert all(sessions == 1 for sessions, _ in held(made))
    stream.close()
    eventually(lambda: held(made) == [(0.0, 0.0)] * 3, timeout_s=FREED_WITHIN_S)


def test_s2_a_client_that_leaves_in_prefill_frees_every_node(made):
    host, _, port = made.facts["http"].removeprefix("http://").partition(":")
    request = {
        "model": made.facts["models"][0],
        "messages": [{"role": "user", "content": "river " * 1200}],
        "max_tokens": 4,
    }
    connection = http.client.HTTPConnection(host, int(port))
    connection.request(
        "POST",
        "/v1/chat/completions",
        json.dumps(request),
        {"Content-Type": "application/json"},
    )
    eventually(lambda: any(sessions for sessions, _ in held(made)))
    connection.sock.shutdown(socket.SHUT_RDWR)
    connection.close()
    eventually(lambda: held(made) == [(0.0, 0.0)] * 3, timeout_s=FREED_WITHIN_S)
    assert not any("Traceback" in line for line in made.gateway.errors)


def test_a_client_that_leaves_between_steps_frees_every_node(made):
    """It reads nothing, so that the gateway waits with the next step; then it is gone."""
    host, _, port = made.facts["http"].removeprefix("http://").partition(":")
    reader = socket.socket()
    reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    reader.connect((host, int(port)))
    body = json.dumps(
        {
            "model": made.facts["models"][0],
            "messages": QUESTION,
            "max_tokens": 400,
            "stream": True,
            "logprobs": True,
            "top_logprobs": 20,  # long events, which fill what the system buffers
        }
    ).encode()
    reader.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: n\r\nContent-Type: application/json\r\n"
        b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
    )
    eventually(lambda: all(sessions == 1 for sessions, _ in held(made)))
    reader.close()
    eventually(lambda: held(made) == [(0.0, 0.0)] * 3, timeout_s=FREED_WITHIN_S)


def test_a_gateway_that_is_killed_breaks_its_streams_off_and_frees_every_node(smollm2):
    with mesh(smollm2) as other:
        host, _, port = other.facts["http"].removeprefix("http://").partition(":")
        connection = http.client.HTTPConnection(host, int(port))
        request = {"model": other.facts["models"][0], "messages": QUESTION, "stream": True}
        connection.request(
            "POST",
            "/v1/chat/completions",
            json.dumps(request),
            {"Content-Type": "application/json"},
        )
        response = connection.getresponse()
        assert response.status == 200
        assert all(sessions == 1 for sessions, _ in held(other))
        other.gateway.process.kill()
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            response.read()
        connection.close()
        eventually(lambda: held(other) == [(0.0, 0.0)] * 3, timeout_s=FREED_WITHIN_S)


def test_p1_sigterm_lets_a_stream_end_and_is_not_held_up_by_an_idle_connection(made):
    """Last in this module: it ends the gateway."""
    host, _, port = made.facts["http"].removeprefix("http://").partition(":")
    idle = socket.create_connection((host, int(port)))
    stream = made.ask(stream=True)
    next(stream)
    made.gateway.process.send_signal(signal.SIGTERM)
    pieces = [chunk for chunk in stream if chunk.choices]
    assert pieces[-1].choices[0].finish_reason in ("stop", "length")
    with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
        made.ask()
    assert made.gateway.process.wait(20) == 0
    idle.close()
    assert not any("Traceback" in line for line in made.gateway.errors)


def test_p1_a_second_interrupt_ends_at_once(smollm2):
    with mesh(smollm2) as other:
        stream = other.client().chat.completions.create(
            model=other.facts["models"][0],
            messages=QUESTION,
            max_tokens=MAX_TOKENS * 20,
            stream=True,
        )
        next(stream)
        other.gateway.process.send_signal(signal.SIGINT)
        with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
            eventually(lambda: other.ask() is None)  # until new work is refused
        other.gateway.process.send_signal(signal.SIGINT)
        assert other.gateway.process.wait(2.0) == 130
        assert not any("Traceback" in line for line in other.gateway.errors)
