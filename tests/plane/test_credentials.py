"""Credentials: whom certificates name, and what a renewal changes for connections after it."""

from __future__ import annotations

import shutil
import socket
import ssl
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from meshnet.credentials import Credentials, identity_of, peer_identity
from meshnet.errors import ConfigError
from meshnet.identity import Identity, Role
from meshnet.tls import TlsFiles
from tests.plane.certificates import Authority, make_authority

ALPHA = Identity(Role.NODE, "alpha")
BETA = Identity(Role.NODE, "beta")
TIMEOUT_S = 10.0


def of_mesh(directory: Path, *identities: Identity) -> Authority:
    return make_authority(directory, uris=[identity.uri for identity in identities])


def files_of(made: Authority) -> TlsFiles:
    return TlsFiles(made.certificate, made.key, made.ca)


def meet(
    server: ssl.SSLContext,
    client: ssl.SSLContext,
    name: str | None = None,
    session: ssl.SSLSession | None = None,
) -> tuple[Any, Any]:
    """Shake hands over a real connection; gives what each side has or failed with."""
    ends: list[Any] = [None, None]

    def run(index: int, sock: ssl.SSLSocket, work: Callable[[], object]) -> None:
        ends[index] = sock
        try:
            sock.do_handshake()
            work()
        except OSError as error:
            ends[index] = error
            sock.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        there = socket.create_connection(listener.getsockname(), TIMEOUT_S)
        here = listener.accept()[0]
    here.settimeout(TIMEOUT_S)
    later: dict[str, Any] = {"do_handshake_on_connect": False}
    asked = client.wrap_socket(there, server_hostname=name, session=session, **later)
    served = server.wrap_socket(here, server_side=True, **later)
    thread = threading.Thread(
        target=run, args=(0, served, lambda: (served.send(b"a"), served.recv(1)))
    )
    thread.start()
    # A server that refuses says so after the client's handshake.
    run(1, asked, lambda: (asked.recv(1), asked.send(b"b")))
    thread.join(TIMEOUT_S)
    return ends[0], ends[1]


def close(*ends: Any) -> None:
    for end in ends:
        if isinstance(end, socket.socket):
            end.close()


def test_the_own_certificate_names_this_process(tmp_path):
    credentials = Credentials(files_of(of_mesh(tmp_path, ALPHA)))
    assert credentials.identity == ALPHA
    assert not credentials.client.check_hostname
    for context in (credentials.client, credentials.server):
        assert context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3


def test_without_a_spiffe_name_hosts_are_checked(tmp_path):
    credentials = Credentials(files_of(make_authority(tmp_path)))
    assert credentials.identity is None
    assert credentials.client.check_hostname
    only_client = Credentials(TlsFiles(ca=files_of(make_authority(tmp_path)).ca))
    assert only_client.identity is None
    for use in (lambda: only_client.server, only_client.listening):
        with pytest.raises(ConfigError, match="--tls-cert is missing"):
            use()


def test_a_name_of_the_mesh_needs_its_authorities(tmp_path):
    made = of_mesh(tmp_path, ALPHA)
    with pytest.raises(ConfigError, match=r"--tls-ca is missing; .*spiffe://mesh/node/alpha"):
        Credentials(TlsFiles(made.certificate, made.key))


def test_pem_gives_the_files_and_shows_no_key(tmp_path):
    made = of_mesh(tmp_path, ALPHA)
    pem = Credentials(files_of(made)).pem()
    assert pem.key == made.key.read_bytes()
    assert pem.chain == made.certificate.read_bytes()
    assert pem.ca == made.ca.read_bytes()
    assert "PRIVATE" not in repr(pem)
    assert Credentials(TlsFiles(ca=made.ca)).pem().key == b""


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["spiffe://mesh/node/alpha"], ALPHA),
        (["127.0.0.1", "spiffe://mesh/node/alpha", "control.mesh"], ALPHA),
        (["spiffe://mesh/node/alpha", "spiffe://mesh/node/beta"], None),
        (["spiffe://mesh/node/alpha", "SPIFFE://other/x"], None),
        (["spiffe://elsewhere/node/alpha"], None),
        (["spiffe://mesh/king/alpha"], None),
        (["https://mesh/node/alpha"], None),
        ([], None),
    ],
)
def test_exactly_one_spiffe_name_counts(names, found):
    assert identity_of(names) == found


@pytest.mark.parametrize("name", [None, "some.host"], ids=["without-sni", "with-sni"])
@pytest.mark.parametrize("kind", ["server", "listening"])
def test_each_end_sees_who_the_other_is(tmp_path, kind, name):
    alpha = Credentials(files_of(of_mesh(tmp_path, ALPHA)))
    server = alpha.server if kind == "server" else alpha.listening()
    here, there = meet(server, alpha.client, name)
    assert peer_identity(here) == peer_identity(there) == ALPHA
    close(here, there)


def test_a_certificate_that_was_not_verified_names_nobody(tmp_path):
    alpha = Credentials(files_of(of_mesh(tmp_path, ALPHA)))
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    here, there = meet(alpha.listening(optional=True), trusting)
    assert peer_identity(here) is peer_identity(there) is None
    close(here, there)


@pytest.mark.parametrize("name", [None, "some.host"], ids=["without-sni", "with-sni"])
@pytest.mark.parametrize("optional", [False, True], ids=["demanded", "optional"])
def test_a_listener_takes_the_files_of_now_and_forgets_the_old_authority(tmp_path, name, optional):
    """Also where the old certificate's session could be resumed."""
    old = Credentials(files_of(of_mesh(tmp_path / "old", ALPHA)))
    new = Credentials(files_of(of_mesh(tmp_path / "new", BETA)))
    live = Credentials(files_of(of_mesh(tmp_path / "live", ALPHA)))
    for file in ("ca.pem", "node.pem", "node.key"):
        shutil.copy(tmp_path / "old" / file, tmp_path / "live" / file)
    live.reload()
    listening = live.listening(optional=optional)

    here, there = meet(listening, old.client, name)
    assert peer_identity(here) == peer_identity(there) == ALPHA
    session = there.session
    assert not session.has_ticket
    close(here, there)
    here, there = meet(listening, new.client, name)
    assert isinstance(here, ssl.SSLError)
    close(here, there)

    for file in ("ca.pem", "node.pem", "node.key"):
        shutil.copy(tmp_path / "new" / file, tmp_path / "live" / file)
    live.reload()
    assert live.generation == 2
    assert live.identity == BETA
    here, there = meet(listening, new.client, name)
    assert peer_identity(here) == peer_identity(there) == BETA
    close(here, there)
    both = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # believes the server, so that it is refused
    both.check_hostname = False
    both.load_verify_locations(tmp_path / "new" / "ca.pem")
    both.load_cert_chain(tmp_path / "old" / "node.pem", tmp_path / "old" / "node.key")
    here, there = meet(listening, both, name)
    assert isinstance(here, ssl.SSLError)
    assert "CERTIFICATE_VERIFY_FAILED" in str(here)
    close(here, there)
    here, there = meet(listening, old.client, name, session)
    assert isinstance(here, OSError)
    assert isinstance(there, ssl.SSLCertVerificationError)
    close(here, there)


def test_an_optional_certificate_may_be_left_out(tmp_path):
    alpha = Credentials(files_of(of_mesh(tmp_path, ALPHA)))
    stranger = Credentials(TlsFiles(ca=tmp_path / "ca.pem"))
    stranger.client.check_hostname = False
    here, there = meet(alpha.listening(optional=True), stranger.client)
    assert peer_identity(here) is None
    assert peer_identity(there) == ALPHA
    close(here, there)
    here, there = meet(alpha.listening(), stranger.client)
    assert isinstance(here, ssl.SSLError)
    close(here, there)


def test_files_that_cannot_be_read_leave_the_old_ones_in_use(tmp_path):
    made = of_mesh(tmp_path, ALPHA)
    alpha = Credentials(files_of(made))
    before = (alpha.client, alpha.server, alpha.pem())
    made.certificate.write_text("hello")
    with pytest.raises(ConfigError, match="--tls-cert"):
        alpha.reload()
    assert (alpha.client, alpha.server, alpha.pem()) == before
    assert alpha.generation == 0
