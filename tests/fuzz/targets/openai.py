"""Bodies of OpenAI requests (`meshnet_gateway.openai_*`), up to tokens of a stand-in model.

The first byte chooses the endpoint, the rest is the body.
"""

from __future__ import annotations

import json

from meshnet.errors import MeshError
from meshnet_gateway.openai_errors import error_body
from meshnet_gateway.openai_fields import parse_object
from meshnet_gateway.openai_requests import read_chat, read_completion
from tests.fuzz.targets.errors import check_error


class Text:
    """Stands for a model's text side: a token a character."""

    vocab_size = 300
    context_length = 256

    def encode(self, text):
        return list(text.encode())

    def encode_chat(self, messages):
        return [byte for message in messages for byte in message["content"].encode()]

    def decode(self, ids):
        return "".join(map(chr, ids))


def check(data: bytes) -> None:
    read = read_chat if data[:1] == b"m" else read_completion
    try:
        request = read(parse_object(data[1:]))
        prepared = request.prepare(Text())
    except MeshError as error:
        check_error(error)
        json.dumps(error_body(error)).encode()
    else:
        assert 0 < len(prepared.generations) <= 128
