"""Neither secrets nor prompts are in logs at debug level, in errors, in `ps` or in URLs."""

from __future__ import annotations

import base64
import json
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from meshnet_gateway.model_text import ModelText
from tests.e2e.commands import Running, eventually, meshnet_json, running
from tests.gateway.fakes import write_model

PARTS = ("7319-5528", "4460=9182")
MARK = "/".join(PARTS)
"""Of characters that are tokens below 32, all that the stub backend knows."""
ANSWER_TOKENS = 4


def serve(stack: ExitStack, event: str, *arguments: str, **env: str) -> Running:
    server = stack.enter_context(running(*arguments, MESHNET_LOG="debug", **env))
    server.ready = server.event(event)
    return server


def write_text(directory: Path) -> Path:
    """Write a text side whose name and shape are those of the stub backend."""
    model = write_model(directory)
    settings = json.loads((model / "config.json").read_text())
    settings |= {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8}
    (model / "config.json").write_text(json.dumps(settings))
    return model


def ask(url: str, key: str, model: str) -> None:
    """Send the mark in every way in which a request may go well or fail."""
    messages = [{"role": "user", "content": MARK}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as client:
        chats, texts = client.chat.completions, client.completions

        def is_served() -> bool:
            try:
                texts.create(model=model, prompt=MARK, max_tokens=ANSWER_TOKENS)
            except openai.InternalServerError:
                return False
            return True

        eventually(is_served, 60)
        with texts.create(
            model=model, prompt=MARK, max_tokens=ANSWER_TOKENS, stream=True
        ) as stream:
            assert list(stream)
        for fault in (
            {},  # the template's own tokens are none of the stub's: the node refuses them
            {"model": "other"},
            {"messages": messages * 100},
            {"stop": [MARK] * 9},
            {"temperature": MARK},
            {"extra_body": {"unknown": MARK}},
            {"messages": [{"role": "tool", "content": MARK}]},
        ):
            with pytest.raises(openai.APIStatusError):
                chats.create(**{"model": model, "messages": messages, **fault})
        with pytest.raises(openai.AuthenticationError) as caught:
            client.with_options(api_key=f"{key}x").models.list()
        assert key[16:] not in str(caught.value)


def test_logs_hold_no_prompt_and_no_secret(tmp_path: Path) -> None:
    model = write_text(tmp_path / "stub")
    ids = ModelText.load(model).encode(MARK)
    admin = str(tmp_path / "mesh" / "admin")
    home = {"XDG_STATE_HOME": str(tmp_path / "state"), "HOME": str(tmp_path)}
    store = f"sqlite:{tmp_path}/keys.db"
    key = meshnet_json("key", "create", "app", "--store", store)["key"]
    anywhere = ("--listen", "127.0.0.1:0")
    with ExitStack() as stack:
        control = serve(
            stack,
            "listening",
            *("control", *anywhere, "--grpc-listen", "127.0.0.1:0", "--require-grants"),
            *("--state", str(tmp_path / "mesh"), "--no-require-probe"),
        )
        where = ("--control", control.ready["grpc"], "--credentials", admin)
        tokens = [
            meshnet_json("token", "create", "--role", role, *of, *where)["token"]
            for role, of in (
                ("node", ("--model", "stub", "--layers", "0:1")),
                ("gateway", ()),
            )
        ]
        node = serve(
            stack,
            "ready",
            *("node", "--backend", "stub", "--layers", "0:1", *anywhere, "--id", "alpha"),
            MESHNET_JOIN=tokens[0],
            **home,
        )
        gateway = serve(
            stack,
            "listening",
            *("gateway", "--model", str(model), *anywhere, "--api-keys", store),
            MESHNET_JOIN=tokens[1],
            **home,
        )
        ask(gateway.ready["http"], key, "stub")
        servers = {"control": control, "node": node, "gateway": gateway}
        lines = {
            name: Path(f"/proc/{server.process.pid}/cmdline").read_text()
            for name, server in servers.items()
        }
    keys = [
        "".join(path.read_text().split("\n")[1:-2])
        for path in tmp_path.rglob("*.pem")
        if "PRIVATE KEY" in path.read_text()
    ]
    assert len(keys) >= 3
    forbidden = [
        *PARTS,
        base64.b64encode(MARK.encode()).decode(),
        ", ".join(map(str, ids[:6])),
        key[16:],
        *(token[-16:] for token in tokens),
        *(text[:32] for text in keys),
    ]
    for name, server in servers.items():
        output = "".join(server.errors) + json.dumps(server.ready) + lines[name]
        assert len(server.errors) > 3, f"{name} logs nothing at debug level"
        for secret in forbidden:
            assert secret not in output, f"{name} tells {secret!r}"
