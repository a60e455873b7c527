"""API keys as an operator and a client use them: commands, each a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest

from tests.e2e.commands import eventually, meshnet, meshnet_json, running
from tests.gateway.fakes import write_model


def test_a_key_from_its_making_to_its_end(tmp_path: Path) -> None:
    model = write_model(tmp_path / "tiny")
    settings = json.loads((model / "config.json").read_text())
    settings |= {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8}
    (model / "config.json").write_text(json.dumps(settings))
    store = f"sqlite:{tmp_path}/keys.db"
    key = meshnet_json("key", "create", "app", "--requests-per-minute", "100", "--store", store)
    gateway = (
        *("gateway", "--model", str(model), "--listen", "127.0.0.1:0", "--api-keys", store),
        *("--control-listen", "127.0.0.1:0", "--control-grpc-listen", "127.0.0.1:0"),
        *("--limit", "max_body_bytes=1000"),
    )
    with running(*gateway) as server:
        server.ready = server.event("listening")
        url, (name,) = server.ready["http"], server.ready["models"]
        with openai.OpenAI(base_url=f"{url}/v1", api_key=key["key"], max_retries=0) as client:
            assert [model.id for model in client.models.list()] == [name]
            with pytest.raises(openai.APIStatusError) as caught:
                client.completions.create(model=name, prompt="x" * 2000)
            assert caught.value.status_code == 413
            assert caught.value.response.headers["x-ratelimit-limit-requests"] == "100"
            other = meshnet_json("key", "create", "other", "--store", store)
            assert client.with_options(api_key=other["key"]).models.list().data
            assert meshnet("key", "revoke", "app", "--store", store).returncode == 0

            def is_refused() -> bool:
                try:
                    client.models.list()
                except openai.AuthenticationError:
                    return True
                return False

            eventually(is_refused)
            assert client.with_options(api_key=other["key"]).models.list().data
        # The command for conversations takes the key from its environment.
        asked = meshnet(
            "chat", "hi", "--gateway", url, "--model", "x", MESHNET_API_KEY=other["key"]
        )
        assert "404" in asked.stderr
        for secret in (key["key"][16:], other["key"][16:]):
            assert secret not in Path(f"/proc/{server.process.pid}/cmdline").read_text()
            assert secret not in "".join(server.errors) + json.dumps(server.ready)
            for file in tmp_path.glob("keys.db*"):
                assert secret.encode() not in file.read_bytes()
