"""The seeds that fuzzing begins with: the vectors and the cases of other tests, in each
target's own form.

``python -m tests.fuzz.seeds`` writes them to ``tests/fuzz/seeds/``; a test sees to it that what is
there is what this makes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Final

from tests.control.oracle.cases import CASES
from tests.fuzz.targets.fields import write_fields
from tests.vectors.load import (
    PARSER_ABILITIES,
    load_answers,
    load_caches,
    load_requests,
    load_sessions,
)

__all__ = ["FOLDER", "make_seeds"]

FOLDER: Final = Path(__file__).parent / "seeds"
_MAX_BYTES: Final = 1024
"""A seed that is longer only slows mutation."""

SESSION: Final = "8d7f2f0a-0000-4000-8000-000000000001"


def make_seeds() -> dict[str, dict[str, bytes]]:
    """Make all seeds: bytes by name by target."""
    return {
        target: {name: seed for name, seed in make() if 0 < len(seed) <= _MAX_BYTES}
        for target, make in _MAKERS.items()
    }


def _wire() -> Iterator[tuple[str, bytes]]:
    for vector in load_requests(PARSER_ABILITIES):
        yield f"chunk-{vector.name}", b"c" + write_fields(vector.headers)
    for vector in load_answers():
        fields = write_fields(vector.headers)
        if vector.status < 300:
            yield f"answer-{vector.name}", b"a" + fields
        else:
            yield f"problem-{vector.name}", b"p" + fields + b"\n\n" + vector.body
    for vector in load_sessions():
        yield f"operation-{vector.name}", b"o" + write_fields(vector.headers)


def _http1() -> Iterator[tuple[str, bytes]]:
    body = b"\x01\x3f\x02\x3f"
    host = b"Host: n\r\n"
    lines = b"POST /forward HTTP/1.1\r\n" + host
    requests = {
        "get": b"GET /healthz HTTP/1.1\r\n" + host + b"\r\n",
        "old": b"GET /healthz HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        "absolute": b"GET http://n/metrics?x=1 HTTP/1.1\r\n" + host + b"\r\n",
        "length": lines + b"Content-Length: 4\r\n\r\n" + body,
        "chunked": lines + b"Transfer-Encoding: chunked\r\n\r\n2;a=b\r\nab\r\n2\r\ncd\r\n0\r\n\r\n",
        "trailer": lines + b"Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX: y\r\n\r\n",
        "expect": lines + b"Expect: 100-continue\r\nContent-Length: 4\r\n\r\n" + body,
        "both": lines + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n",
        "folded": lines + b"X: a\r\n b\r\n\r\n",
        "bare": lines.replace(b"\r\n", b"\n") + b"\n",
        "two": b"GET / HTTP/1.1\r\n" + host + b"\r\nGET / HTTP/1.1\r\n" + host + b"\r\n",
        "tls": b"\x16\x03\x01\x02\x00\x01",
    }
    for name, data in requests.items():
        for step in (0, 3):
            yield f"request-{name}-{step}", bytes((1 | len(body) << 1, step)) + data
    ok = b"HTTP/1.1 200 OK\r\n"
    answers = {
        "length": ok + b"Content-Length: 4\r\n\r\n" + body,
        "chunked": ok + b"Transfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n0\r\n\r\n",
        "to-end": ok + b"Connection: close\r\n\r\n" + body,
        "interim": b"HTTP/1.1 100 Continue\r\n\r\n" + ok + b"Content-Length: 0\r\n\r\n",
        "none": b"HTTP/1.1 204 No Content\r\n\r\n",
        "problem": b"HTTP/1.1 400 Bad Request\r\nContent-Length: 2\r\n\r\n{}",
    }
    for name, data in answers.items():
        yield f"answer-{name}", bytes((0, 0)) + data


def _codec() -> Iterator[tuple[str, bytes]]:
    kinds = {"zstd": 0, "bf16p": 1}
    for vector in load_requests(PARSER_ABILITIES):
        fields = {name.lower(): value for name, value in vector.headers}
        kind = kinds.get(fields.get("x-meshnet-encoding", ""))
        sizes = fields.get("x-meshnet-shape", "").split(",")
        if kind is None or not all(map(str.isdigit, sizes)) or not 0 < int(sizes[-1]) <= 256:
            continue
        shape = [int(size) for size in sizes]
        rows = prod(shape[:-1])
        yield vector.name, struct.pack("<BBH", kind, shape[-1] - 1, rows & 0xFFFF) + vector.body


def _cache_wire() -> Iterator[tuple[str, bytes]]:
    for vector in load_caches():
        yield vector.name, write_fields(vector.headers)
    for vector in load_sessions():
        if vector.path.endswith("/move"):
            yield f"move-{vector.name}", write_fields(vector.headers)
    move = {
        "X-Meshnet-Wire": "2",
        "X-Meshnet-Route": "b@10.0.0.2:7080/0-4",
        "X-Meshnet-Position": "7",
    }
    yield "move", write_fields(move.items())


def _transcoder() -> Iterator[tuple[str, bytes]]:
    for index, (_, method, path, headers, body, _) in enumerate(CASES):
        yield f"oracle-{index}", b"o" + _request(method, path, headers, body or "")
    node = {
        "incarnation": "7",
        "shards": [{"model": "models/m", "layers": {"end": 4}, "layerCount": 4, "embedding": True}],
        "endpoints": [{"uri": "http://10.0.0.2:7080/forward"}],
        "labels": {"zone": "a"},
    }
    requests = [
        ("POST", "/v1/nodes?nodeId=n", node),
        ("PATCH", "/v1/nodes/n?updateMask=weight", {"weight": 2}),
        ("PATCH", "/v1/nodes/n", {"labels": {"a": "b"}, "cordoned": True}),
        ("POST", "/v1/nodes/n:drain", {"grace": "1.5s"}),
        ("POST", "/v1/nodes/n:heartbeat", {"leaseId": "1", "load": {"sessions": 1}}),
        ("POST", "/v1/routes:select", {"model": "models/m", "explain": True}),
        ("GET", "/v1/nodes?pageSize=5&filter=a", None),
        ("GET", "/v1/models/org/name", None),
        ("DELETE", "/v1/nodes/n", None),
    ]
    for index, (method, path, body) in enumerate(requests):
        text = "" if body is None else json.dumps(body)
        yield f"own-{index}", b"m" + _request(method, path, {}, text)


def _request(method: str, path: str, headers: dict[str, str], body: str) -> bytes:
    head = f"{method} {path}\n".encode() + write_fields(headers.items())
    return head.rstrip(b"\n") + b"\n\n" + body.encode()


def _gguf() -> Iterator[tuple[str, bytes]]:
    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def file(values: list[bytes], tensors: list[bytes], data: bytes, version: int = 3) -> bytes:
        head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(values))
        head += b"".join(values) + b"".join(tensors)
        return head + bytes(-len(head) % 32) + data

    name = text("general.architecture") + struct.pack("<I", 8) + text("llama")
    scalars = [
        text(f"s{kind}") + struct.pack(f"<I{form}", kind, 1) for kind, form in enumerate("BbHhIif?")
    ] + [
        text(f"s{kind}") + struct.pack(f"<I{form}", kind, 1)
        for kind, form in ((10, "Q"), (12, "d"))
    ]
    words = text("tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("bc")
    numbers = text("scores") + struct.pack("<IIQ", 9, 6, 2) + bytes(8)
    wide = text("general.alignment") + struct.pack("<II", 4, 64)
    f32 = text("output.weight") + struct.pack("<IQQIQ", 2, 4, 2, 0, 0)
    q8 = text("blk.0.attn_q.weight") + struct.pack("<IQIQ", 1, 32, 8, 32)
    yield "empty", file([name], [], b"")
    yield "scalars", file([name, *scalars], [], b"")
    yield "arrays", file([name, words, numbers], [], b"")
    yield "tensors", file([name], [f32, q8], bytes(66))
    yield "version-2", file([name], [f32], bytes(32), version=2)
    yield "aligned", file([name, wide], [f32], bytes(96))
    yield "twice", file([name], [f32, f32], bytes(32))
    yield "cut", file([name], [f32], bytes(8))
    yield "big-endian", b"GGUF" + struct.pack(">IQQ", 3, 0, 0)


def _model_files() -> Iterator[tuple[str, bytes]]:
    from tests.fuzz.targets import model_files as model

    def weights(header: object, data: bytes = bytes(80)) -> bytes:
        raw = json.dumps(header).encode()
        return b"w" + len(raw).to_bytes(8, "little") + raw + data

    one = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    yield "weights", b"w" + model.WEIGHTS
    yield "weights-one", weights({"a": one, "__metadata__": {"format": "pt"}}, bytes(8))
    yield "weights-overlap", weights({"a": one, "b": one}, bytes(8))
    yield "weights-gap", weights({"a": {**one, "data_offsets": [8, 16]}}, bytes(16))
    yield "weights-negative", weights({"a": {**one, "data_offsets": [-8, 0]}}, bytes(8))
    yield "weights-long", b"w" + bytes((255,)) * 8
    yield "index", b"i" + model.INDEX
    for name, file in (
        ("up", "../model.safetensors"),
        ("absolute", "/etc/passwd"),
        ("pickle", "pytorch_model.bin"),
        ("elsewhere", "other.safetensors"),
    ):
        yield f"index-{name}", b"i" + json.dumps({"weight_map": {"a": file}}).encode()
    yield "config", b"c" + model.GOOD["config.json"]
    nested = {"model_type": "x", "text_config": {"n_layer": 2, "n_embd": 4, "vocab_size": 8}}
    yield "config-nested", b"c" + json.dumps(nested).encode()
    kinds = {**model.CONFIG, "layer_types": ["a", "b"], "torch_dtype": "bfloat16"}
    yield "config-kinds", b"c" + json.dumps(kinds).encode()
    yield "note", b"n" + model.GOOD["meshnet.json"]


def _openai() -> Iterator[tuple[str, bytes]]:
    hello = [{"role": "user", "content": "hi"}]
    parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    chats = [
        {"messages": hello},
        {"messages": parts, "max_completion_tokens": 3, "stream": True},
        {"messages": hello, "stream": True, "stream_options": {"include_usage": True}},
        {"messages": hello, "logprobs": True, "top_logprobs": 2, "n": 2, "seed": -1},
        {"messages": hello, "stop": ["a", "b"], "temperature": 0, "top_p": 0.5, "top_k": -1},
        {
            "messages": hello,
            "logit_bias": {"5": -100},
            "tools": [],
            "response_format": {"type": "text"},
        },
        {"messages": [{"role": "system", "content": "s"}, {"role": "developer", "content": "d"}]},
        {"messages": [{"role": "tool", "content": "s"}]},
        {"messages": hello, "max_tokens": 9223372036854775807},
        {
            "messages": hello,
            "frequency_penalty": -2,
            "presence_penalty": 2,
            "repetition_penalty": 1.1,
        },
    ]
    texts = [
        {"prompt": "hi", "echo": True, "suffix": ""},
        {"prompt": ["a", "b"], "n": 2, "best_of": 2},
        {"prompt": [1, 2, 3], "logprobs": 0, "min_p": 0.1},
        {"prompt": [[1], [2, 3]], "max_tokens": 4, "stop": "x"},
    ]
    for index, body in enumerate(chats):
        yield f"chat-{index}", b"m" + json.dumps({"model": "m", **body}).encode()
    for index, body in enumerate(texts):
        yield f"text-{index}", b"t" + json.dumps({"model": "m", **body}).encode()
    yield "surrogate", rb'm{"model": "\ud83d", "messages": []}'
    yield "nan", b'm{"model": "m", "temperature": NaN}'
    yield "deep", b"m" + b'{"messages":' + b"[" * 500 + b"]" * 500 + b"}"


def _tokens() -> Iterator[tuple[str, bytes]]:
    from tests.fuzz.targets.tokens import TOKEN

    head, claims, signature = TOKEN.split(".")
    yield "grant", b"g" + TOKEN.encode()
    yield "grant-unsigned", f"g{head}.{claims}.".encode()
    yield "grant-other-claims", f"g{head}.{head}.{signature}".encode()
    yield "join", b"jmj1.0123456789.%b.%b@10.0.0.2:7070" % (b"s" * 22, b"p" * 42 + b"A")
    yield "join-two", b"jmj1.abcdefghij.%b.%b@a:1,[::1]:2" % (b"-" * 22, b"_" * 42 + b"8")


_MAKERS: Final[dict[str, Callable[[], Iterator[tuple[str, bytes]]]]] = {
    "wire": _wire,
    "http1": _http1,
    "codec": _codec,
    "cache_wire": _cache_wire,
    "transcoder": _transcoder,
    "gguf": _gguf,
    "model_files": _model_files,
    "openai": _openai,
    "tokens": _tokens,
}


def main() -> None:
    """Write what is not there, and remove what is no longer made."""
    for target, seeds in make_seeds().items():
        folder = FOLDER / target
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            if old.name not in seeds:
                old.unlink()
        for name, seed in seeds.items():
            (folder / name).write_bytes(seed)


if __name__ == "__main__":
    main()
