"""A mesh that stays up: OpenAI clients, operators' commands, Ctrl-C."""

from __future__ import annotations

import json
import signal
import urllib.request
from collections.abc import Iterator

import openai
import pytest

from tests.e2e.commands import Running, eventually, is_alive, meshnet, meshnet_json, running

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def up(smollm2) -> Iterator[tuple[Running, dict]]:
    ports = ("--listen", "127.0.0.1:0", "--control-listen", "127.0.0.1:0")
    more = ("--control-grpc-listen", "127.0.0.1:0")
    with running("up", "--model", str(smollm2), *ports, *more) as server:
        yield server, server.event("ready", timeout_s=240.0)


@pytest.fixture(scope="module")
def client(up) -> Iterator[openai.OpenAI]:
    url = up[1]["http"] + "/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_a_chat_completion(client):
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(model=model, messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content == "The capital of France is Paris."
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_the_stream_is_the_answer_in_pieces(client):
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=0, stream=True
    )
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == "The capital of France is Paris."
    assert len([piece for piece in pieces if piece]) > 1


def test_logprobs_and_n_and_stop_and_seed(client):
    model = client.models.list().data[0].id
    answer = client.chat.completions.create(
        model=model,
        messages=QUESTION,
        temperature=1.0,
        seed=7,
        n=2,
        max_tokens=6,
        logprobs=True,
        top_logprobs=3,
        stop=["\n"],
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)
        assert all(token.logprob <= 0 for token in choice.logprobs.content)
    again = client.chat.completions.create(
        model=model, messages=QUESTION, temperature=1.0, seed=7, n=2, max_tokens=6, stop=["\n"]
    )
    assert [c.message.content for c in again.choices] == [c.message.content for c in answer.choices]


def test_a_plain_completion(client):
    model = client.models.list().data[0].id
    answer = client.completions.create(
        model=model, prompt="The capital of France is", max_tokens=1, temperature=0
    )
    assert answer.choices[0].text.strip() == "Paris"
    assert answer.choices[0].finish_reason == "length"


def test_operators_see_the_mesh(up):
    facts = up[1]
    where = ("--control", facts["control"])
    nodes = meshnet_json("nodes", "list", *where)["nodes"]
    assert [node["name"] for node in nodes] == ["nodes/node-1", "nodes/node-2", "nodes/node-3"]
    assert {node["state"] for node in nodes} == {"NODE_STATE_READY"}
    one = meshnet_json("nodes", "get", "node-2", *where)
    assert one["node"]["shards"][0]["layers"] == {"start": 10, "end": 20}
    route = meshnet_json("route", facts["model"], *where)
    assert [hop["node"] for hop in route["routes"][0]["hops"]] == [node["name"] for node in nodes]
    status = meshnet_json("status", *where)
    assert status["serving"] is True
    models = meshnet_json("models", *where)["models"]
    assert models[0]["layerCount"] == 30
    assert meshnet_json("models", "--control", facts["control_http"])["models"] == models


def test_the_gateway_is_healthy_when_every_layer_is_covered(up):
    with urllib.request.urlopen(up[1]["http"] + "/healthz") as answer:
        health = json.load(answer)
    assert health == {"status": "ready", "models": [up[1]["model"]], "uncovered": {}}


def test_tables_are_for_people(up):
    where = ("--control", up[1]["control"])
    listed = meshnet("nodes", "list", *where, COLUMNS="200")
    assert "node-2" in listed.stdout
    assert "10-20" in listed.stdout
    assert meshnet("status", *where, COLUMNS="200").returncode == 0
    assert "20-30" in meshnet("route", up[1]["model"], *where, COLUMNS="200").stdout


def test_chat_asks_one_thing(up):
    done = meshnet("chat", QUESTION[0]["content"], "--gateway", up[1]["http"], "--temperature", "0")
    assert (done.returncode, done.stdout.strip()) == (0, "The capital of France is Paris.")


def test_unknown_names_are_one_clear_line(up):
    where = ("--control", up[1]["control"])
    for arguments, says in [
        (("nodes", "get", "nobody", *where), "nobody"),
        (("nodes", "drain", "nobody", *where), "nobody"),
        (("route", "no-such-model", *where), "no-such-model"),
        (("nodes", "get", "NOT AN ID", *where), "NOT AN ID"),
        (("chat", "hi", "--gateway", up[1]["http"], "--model", "no-such"), "no-such"),
    ]:
        done = meshnet(*arguments)
        assert done.returncode in (1, 2)
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert done.stderr.startswith("meshnet: error: ")
        assert says in done.stderr


def test_ctrl_c_ends_every_process(up):
    """Last in this module: it ends the mesh."""
    server, facts = up
    assert all(is_alive(pid) for pid in facts["pids"].values())
    assert server.interrupt() == 0
    eventually(lambda: not any(is_alive(pid) for pid in facts["pids"].values()), timeout_s=5.0)
    assert not any("Traceback" in line for line in server.errors), server.errors


def test_children_end_when_up_is_killed(smollm2):
    ports = ("--listen", "127.0.0.1:0", "--control-listen", "127.0.0.1:0")
    more = ("--control-grpc-listen", "127.0.0.1:0", "--nodes", "1")
    with running("up", "--model", str(smollm2), *ports, *more) as server:
        pids = server.event("ready", timeout_s=240.0)["pids"].values()
        server.process.send_signal(signal.SIGKILL)
        eventually(lambda: not any(is_alive(pid) for pid in pids), timeout_s=20.0)
