"""A whole gateway that wants keys, over HTTPS: what is open, what is not, and to whom."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import openai
import pytest

from meshnet.compression import CompressionPolicies
from meshnet.control.api_keys import create_api_key
from meshnet.control.store_url import make_documents
from meshnet.errors import ConfigError
from meshnet.tls import TlsFiles
from meshnet_gateway import admission, https
from meshnet_gateway.app import Gateway, GatewaySettings
from meshnet_gateway.model_text import ModelText
from tests.gateway.mesh import NUM_LAYERS, Mesh, stub_mesh
from tests.plane.certificates import Authority, make_authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("https"))


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:{tmp_path}/keys.db"


@pytest.fixture
async def key(store: str) -> str:
    documents = make_documents(store)
    await documents.open()
    _, text = await create_api_key(documents, "app", now_s=time.time(), streams=2)
    await documents.close()
    return text


@pytest.fixture
async def mesh(text: ModelText, store: str, authority: Authority) -> AsyncIterator[Mesh]:
    files = TlsFiles(authority.certificate, authority.key, flags="--https")
    async with stub_mesh(text, api_keys=store, https=files) as mesh:
        mesh.url = mesh.url.replace("http://", "https://")
        await mesh.join("all", 0, NUM_LAYERS)
        yield mesh


@pytest.fixture
def trust(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.ca))


async def get(mesh: Mesh, trust: ssl.SSLContext, path: str, **headers: str) -> tuple[int, str]:
    async with mesh.http.get(mesh.url + path, ssl=trust, headers=headers) as response:
        return response.status, await response.text()


async def test_openais_client_over_https(mesh: Mesh, trust: ssl.SSLContext, key: str) -> None:
    client = openai.AsyncOpenAI(
        base_url=f"{mesh.url}/v1",
        api_key=key,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=trust),
    )
    async with client:
        wanted: dict[str, Any] = mesh.request()
        bias = {str(token): value for token, value in wanted.pop("logit_bias").items()}
        answer = await client.completions.create(**wanted, logit_bias=bias)
        assert answer.choices[0].text == "hhh"
        stream = await client.completions.create(**wanted, logit_bias=bias, stream=True)
        assert "".join([piece.choices[0].text async for piece in stream]) == "hhh"
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key=key[:-1]).completions.create(**wanted)


async def test_health_is_open_and_metrics_are_for_this_machine_and_keys(
    mesh: Mesh, trust: ssl.SSLContext, key: str
) -> None:
    assert (await get(mesh, trust, "/healthz"))[0] == 200
    assert (await get(mesh, trust, "/metrics"))[0] == 200
    forwarded = {"X-Forwarded-For": "203.0.113.9"}
    status, body = await get(mesh, trust, "/metrics", **forwarded)
    assert (status, "invalid_api_key" in body) == (401, True)
    allowed = {**forwarded, "Authorization": f"Bearer {key}"}
    status, body = await get(mesh, trust, "/metrics", **allowed)
    assert (status, "meshnet_sessions_opened_total" in body) == (200, True)
    assert (await get(mesh, trust, "/v1/models", **forwarded))[0] == 401


@pytest.mark.parametrize(
    ("peer", "is_here"),
    [
        (("127.0.0.1", 5), True),
        (("127.8.8.8", 5), True),
        (("::1", 5, 0, 0), True),
        (("192.0.2.1", 5), False),
        (("fe80::1%eth0", 5, 0, 2), False),
        (("2001:db8::1", 5, 0, 0), False),
        (None, False),
        ("", False),
    ],
)
def test_who_is_here(peer: Any, is_here: bool) -> None:
    transport = SimpleNamespace(get_extra_info=lambda name: peer)
    request: Any = SimpleNamespace(transport=transport, headers={})
    assert admission._is_from_here(request) is is_here
    request.headers = {"Forwarded": "for=127.0.0.1"}
    assert not admission._is_from_here(request)


async def test_those_who_ask_for_health_at_a_time_share_one_look(
    mesh: Mesh, trust: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = mesh.gateway._control
    assert control is not None
    looks = 0
    go_on = asyncio.Event()
    get_model = control.get_model

    async def counted(name: str) -> Any:
        nonlocal looks
        looks += 1
        await go_on.wait()
        return await get_model(name)

    monkeypatch.setattr(control, "get_model", counted)
    asking = [asyncio.create_task(get(mesh, trust, "/healthz")) for _ in range(8)]
    async with asyncio.timeout(20):
        while len(mesh.gateway._runner.server.connections) < 8:
            await asyncio.sleep(0.01)
    for _ in range(20):
        await asyncio.sleep(0)
    go_on.set()
    assert {status for status, _ in await asyncio.gather(*asking)} == {200}
    assert looks < 8
    assert (await get(mesh, trust, "/healthz"))[0] == 200  # and a later one looks anew
    assert looks >= 2


async def test_plain_http_gets_nothing_of_a_port_with_https(mesh: Mesh) -> None:
    url = mesh.url.replace("https://", "http://")
    with pytest.raises(aiohttp.ClientError):
        await mesh.http.get(f"{url}/healthz")


async def test_a_handshake_that_does_not_go_on_keeps_nobody_waiting(
    mesh: Mesh, trust: ssl.SSLContext
) -> None:
    host, port = mesh.url.removeprefix("https://").split(":")
    writers = []
    for _ in range(50):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"\x16\x03\x01")
        writers.append(writer)
    async with asyncio.timeout(20):
        assert (await get(mesh, trust, "/healthz"))[0] == 200
    for writer in writers:
        writer.close()


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
@pytest.mark.parametrize("has_https", [False, True])
async def test_a_port_that_others_reach_wants_keys(
    text: ModelText, authority: Authority, host: str, has_https: bool
) -> None:
    files = TlsFiles(authority.certificate, authority.key) if has_https else None
    with pytest.raises(ConfigError) as caught:
        async with stub_mesh(text, host=host, https=files, behind_tls_proxy=True):
            raise AssertionError("it listens")
    assert caught.value.field == "--listen"
    assert "meshnet key create" in caught.value.message
    assert "--insecure" in caught.value.message


async def test_keys_do_not_cross_the_network_in_the_clear(text: ModelText, store: str) -> None:
    with pytest.raises(ConfigError, match="in the clear") as caught:
        async with stub_mesh(text, host="0.0.0.0", api_keys=store):
            raise AssertionError("it listens")
    assert caught.value.field == "--listen"
    assert "\n" not in caught.value.message
    for flag in ("--https-cert", "--https-key", "--behind-tls-proxy", "--insecure"):
        assert flag in caught.value.message


@pytest.mark.parametrize("allowed", ["https", "behind_tls_proxy", "insecure", "nothing"])
async def test_a_port_that_others_may_reach(
    text: ModelText, store: str, authority: Authority, trust: ssl.SSLContext, allowed: str
) -> None:
    settings: dict[str, Any] = {
        "https": {
            "api_keys": store,
            "https": TlsFiles(authority.certificate, authority.key, flags="--https"),
        },
        "behind_tls_proxy": {"api_keys": store, "behind_tls_proxy": True},
        "insecure": {"api_keys": store, "insecure": True},
        "nothing": {"insecure": True},
    }[allowed]
    async with stub_mesh(text, host="0.0.0.0", **settings) as mesh:
        url = mesh.url.replace("0.0.0.0", "127.0.0.1")
        if allowed == "https":
            url = url.replace("http://", "https://")
        expected = 200 if allowed == "nothing" else 401
        async with mesh.http.get(f"{url}/v1/models", ssl=trust) as response:
            assert response.status == expected
        # Behind a proxy the address from which it comes says nothing of who asks.
        expected = 401 if allowed == "behind_tls_proxy" else 200
        async with mesh.http.get(f"{url}/metrics", ssl=trust) as response:
            assert response.status == expected


def test_https_files_that_cannot_be_used(text: ModelText, authority: Authority) -> None:
    for files, said in (
        (TlsFiles(certificate=authority.certificate), "--https-key is missing"),
        (TlsFiles(key=authority.key), "--https-cert is missing"),
        (TlsFiles(authority.key, authority.key), "--https-cert: .* holds no certificate"),
        (TlsFiles(authority.ca, authority.key), "is not the key of --https-cert"),
    ):
        named = TlsFiles(files.certificate, files.key, flags="--https")
        with pytest.raises(ConfigError, match=said):
            Gateway(GatewaySettings(https=named), {}, CompressionPolicies())


def put(made: Authority, certificate: Path, key: Path) -> None:
    """Replace both files, as whoever renews a certificate does."""
    for source, path in ((made.certificate, certificate), (made.key, key)):
        new = path.with_suffix(".new")
        new.write_bytes(source.read_bytes())
        new.replace(path)


async def connected(url: str, trust: ssl.SSLContext) -> tuple[Any, Any, bytes]:
    """Open a connection; gives its ends and the certificate that it was shown."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=trust)
    return reader, writer, writer.get_extra_info("ssl_object").getpeercert(binary_form=True)


async def served_by(url: str, trust: ssl.SSLContext) -> bytes:
    """Give the certificate that a new connection is shown."""
    _, writer, certificate = await connected(url, trust)
    writer.close()
    return certificate


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_renewed_files_are_in_use_without_a_restart(
    text: ModelText,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    version: ssl.TLSVersion,
) -> None:
    monkeypatch.setattr(https, "_LOOK_S", 0.01)
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    first, second = make_authority(tmp_path / "first"), make_authority(tmp_path / "second")
    trust = ssl.create_default_context(cafile=str(first.ca))
    trust.load_verify_locations(second.ca)
    trust.maximum_version = version
    put(first, certificate, key)
    files = TlsFiles(certificate, key, flags="--https")
    async with stub_mesh(text, https=files) as mesh:
        reader, writer, before = await connected(mesh.url, trust)
        certificate.write_bytes(second.certificate.read_bytes())
        async with asyncio.timeout(60):
            while not any("is not the key" in text for text in caplog.messages):
                await asyncio.sleep(0.01)
            assert await served_by(mesh.url, trust) == before
            certificate.unlink()
            while not any("No such file" in text for text in caplog.messages):
                await asyncio.sleep(0.01)
            put(second, certificate, key)
            while (after := await served_by(mesh.url, trust)) == before:
                await asyncio.sleep(0.01)
            # What was open goes on.
            writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readline()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        assert ssl.DER_cert_to_PEM_cert(after) == second.certificate.read_text()


def test_a_pair_that_cannot_be_used_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    first, second = make_authority(tmp_path / "first"), make_authority(tmp_path / "second")
    put(first, certificate, key)
    used = https.Https(TlsFiles(certificate, key, flags="--https"))
    assert not used.look()
    key.unlink()
    assert [used.look() for _ in range(3)] == [False] * 3
    put(second, certificate, tmp_path / "other")
    key.write_bytes(first.key.read_bytes())
    assert [used.look() for _ in range(3)] == [False] * 3
    assert len(caplog.messages) == 2
    assert f"--https-key: {key}: No such file" in caplog.messages[0]
    assert f"--https-key: {key} is not the key of --https-cert" in caplog.messages[1]
    key.write_bytes(second.key.read_bytes())
    assert [used.look() for _ in range(2)] == [True, False]
