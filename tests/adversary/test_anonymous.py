"""Who reaches the ports of a mesh and has no certificate of it."""

from __future__ import annotations

import asyncio
import ssl
import time
from contextlib import suppress
from pathlib import Path

import pytest

from meshnet.authority import Authority
from meshnet.certificates import Period, make_key, pem_of, pem_of_key, root_certificate
from meshnet.credentials import Credentials
from meshnet.identity import Identity, Role
from meshnet.tls import files_in
from tests.adversary.calls import CALLS
from tests.adversary.mesh import BOUND_S, FACES, UNHEARD, Mesh, Said
from tests.control.secured import make_credentials

GARBAGE = {
    "plain HTTP": b"GET /v1/nodes HTTP/1.1\r\nHost: mesh\r\n\r\n",
    "plain HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(64),
    "zeros": bytes(4096),
    "half a handshake": b"\x16\x03\x01\x40\x00\x01\x00\x3f\xfc\x03\x03" + b"\xff" * 400,
}


@pytest.fixture
def foreign(mesh: Mesh, tmp_path: Path) -> Credentials:
    """An administrator of another mesh, who believes this one."""
    other = Authority(tmp_path / "other")
    own = make_credentials(other, Identity(Role.ADMIN, "mallory"), tmp_path / "own")
    (tmp_path / "own" / "ca.pem").write_text(mesh.authority.bundle_pem)
    own.reload()
    return own


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("what", ["register", "drain", "make a join token", "select a route"])
async def test_without_a_certificate_nothing_is_answered(mesh: Mesh, what: str, face: str) -> None:
    expected = UNHEARD if face == "grpc" else Said(401, "CREDENTIALS_MISSING")
    async with mesh.unharmed():
        assert await CALLS[what].on(face, mesh, None) == expected


@pytest.fixture
def self_signed(mesh: Mesh, tmp_path: Path) -> Credentials:
    """A certificate that its own key signed."""
    key, now = make_key(), time.time()
    (tmp_path / "key.pem").write_bytes(pem_of_key(key))
    certificate = root_certificate(key, Period(now - 60, now + 3600))
    (tmp_path / "cert.pem").write_text(pem_of(certificate))
    (tmp_path / "ca.pem").write_text(mesh.authority.bundle_pem)
    return Credentials(files_in(tmp_path))


@pytest.mark.parametrize("whose", ["foreign", "self_signed"])
async def test_a_certificate_that_is_not_of_the_mesh_opens_nothing(
    mesh: Mesh, whose: str, request: pytest.FixtureRequest
) -> None:
    own: Credentials = request.getfixturevalue(whose)
    async with mesh.unharmed():
        for face in FACES:
            assert await CALLS["drain"].on(face, mesh, own) == UNHEARD
        with pytest.raises(OSError, match=r"SSL|reset|disconnected|alert"):
            await mesh.ask_plane("beta", "POST", "/forward", own)


async def test_at_nodes_nobody_is_heard_without_a_certificate(mesh: Mesh) -> None:
    async with mesh.unharmed():
        for method, path in (("POST", "/forward"), ("GET", "/healthz"), ("GET", "/metrics")):
            with pytest.raises(OSError, match=r"SSL|reset|disconnected|alert"):
                await mesh.ask_plane("beta", method, path, None)


@pytest.mark.parametrize("sent", GARBAGE)
@pytest.mark.parametrize("face", ["grpc", "json", "plane"])
async def test_what_is_no_tls_is_not_heard(mesh: Mesh, face: str, sent: str) -> None:
    async with mesh.unharmed():
        answer = await exchange(mesh.port(face), GARBAGE[sent])
        assert b" 200 " not in answer
        if face == "plane":
            assert b'"TLS_REQUIRED"' in answer or answer[:1] in (b"", b"\x15"), answer


async def exchange(address: str, sent: bytes) -> bytes:
    """Send bytes over TCP alone; gives what comes until the other end closes."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    received = b""
    with suppress(ConnectionError):
        writer.write(sent)
        writer.write_eof()
        async with asyncio.timeout(BOUND_S):
            received = await reader.read(1 << 16)
    writer.close()
    with suppress(ConnectionError, ssl.SSLError):
        await writer.wait_closed()
    return received
