"""A client of the gateway, with a good API key, who wants more than answers."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from tests.adversary.calls import CALLS
from tests.adversary.mesh import UNHEARD, Mesh, Said, reason_of
from tests.plane.doubles import new_session

DEEP = b'{"model": "stub", "prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}"
ODD: dict[str, tuple[bytes | dict[str, Any], int]] = {
    "over the size of a body": (b'{"prompt": "' + b"x" * (9 << 20) + b'"}', 413),
    "deep": (DEEP, 400),
    "many arrays": (b'{"model": "stub", "prompt": [' + b"[]," * 200_000 + b"[]]}", 400),
    "no JSON": (b"\xff\xfe\x00", 400),
    "a number without end": (b'{"model": "stub", "max_tokens": ' + b"9" * 100_000 + b"}", 400),
    "tokens without end": ({"prompt": "1", "max_tokens": 1 << 62}, 400),
    "many choices": ({"prompt": "1", "n": 10_000}, 400),
    "tokens that the model has not": ({"prompt": [1 << 40]}, 400),
    "not a number": (b'{"model": "stub", "prompt": "1", "temperature": NaN}', 400),
    "a long prompt": ({"prompt": "1" * 2_000_000}, 400),
    "a model by its path": ({"model": "../../etc/passwd", "prompt": "1"}, 404),
}


@pytest.mark.parametrize("what", ODD)
async def test_odd_requests_are_answered_and_cost_nothing(mesh: Mesh, what: str) -> None:
    body, status = ODD[what]
    async with mesh.unharmed():
        found, answer = await mesh.ask_gateway(body)
        assert found == status, answer
        assert answer["error"]["message"]
        assert "Traceback" not in json.dumps(answer)


@pytest.mark.parametrize(
    ("key", "path"),
    [
        ("", "/v1/completions"),
        ("mk-abcdefghijkl-" + "A" * 43, "/v1/completions"),
        ("mk-", "/v1/completions"),
        ("x" * 4000, "/v1/completions"),
    ],
)
async def test_who_has_no_key_is_not_served(mesh: Mesh, key: str, path: str) -> None:
    async with mesh.unharmed():
        status, answer = await mesh.ask_gateway({"prompt": "1"}, path=path, key=key)
        assert Said(status, reason_of(answer)) == Said(401, "invalid_api_key")


async def test_a_key_of_a_client_opens_nothing_in_the_mesh(mesh: Mesh) -> None:
    async with mesh.unharmed():
        bearer = {"Authorization": f"Bearer {mesh.key}"}
        for call in CALLS.values():
            status, answer = await mesh.ask_json(*call.http, None, call.body, bearer)
            assert Said(status, reason_of(answer)) == Said(401, "TOKEN_INVALID"), call.method
        assert await CALLS["list members"].on("grpc", mesh, None, bearer) == UNHEARD
        for path in ("/forward", f"/sessions/{new_session()}"):
            with pytest.raises(OSError, match=r"SSL|reset|disconnected|alert"):
                await mesh.ask_plane("alpha", "POST", path, None, bearer)


async def test_fields_of_the_mesh_do_not_pass_the_gateway(mesh: Mesh) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        target = f"127.0.0.1:{listener.getsockname()[1]}"
        fields = {
            "X-Meshnet-Route": f"beta@{target}/1-2",
            "X-Meshnet-Session": new_session(),
            "X-Meshnet-Layers": "0-2",
            "X-Meshnet-Grant": "a.b.c",
            "X-Meshnet-Owner": new_session(),
            "X-Meshnet-Max-Tokens": "1048576",
            "X-Forwarded-For": "127.0.0.1",
            "Meshnet-Internal-Caller": '["spiffe://mesh/admin/ann", null]',
        }
        before = await mesh.state()
        body = {"prompt": "123", "max_tokens": 2, "temperature": 0}
        plain = await mesh.ask_gateway(body)
        told = await mesh.ask_gateway(body, headers=fields)
        assert (told[0], told[1]["choices"]) == (200, plain[1]["choices"])
        after = await mesh.state()
        for node in mesh.nodes:
            # Two requests of two steps each, and nothing else.
            assert after[node].pop("meshnet_chunks_total") == (
                before[node].pop("meshnet_chunks_total") + 4
            )
        assert after == before
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.mark.parametrize(
    "path", ["/sessions/8d7f2f0a-5c1e-4b7a-9a53-0d7c6f1e2b34", "/forward", "/v1/nodes", "/v1/keys"]
)
async def test_a_gateway_serves_clients_nothing_of_the_mesh(mesh: Mesh, path: str) -> None:
    async with mesh.unharmed():
        status, _ = await mesh.ask_gateway({"prompt": "1"}, path=path)
        assert status in (404, 405)
