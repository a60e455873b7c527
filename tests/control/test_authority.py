"""What the authority certifies is accepted by whoever trusts it, through a rotation too."""

from __future__ import annotations

import socket
import ssl
import stat
import threading

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from meshnet.authority import Authority
from meshnet.certificates import make_csr, make_key, pem_of_key, read_csr, read_key, spki_sha256
from meshnet.credentials import Credentials, peer_identity
from meshnet.errors import ConfigError
from meshnet.identity import CONTROL_DNS_NAME, Identity, Role
from meshnet.tls import TlsFiles

DAY_S = 24 * 3600.0
NODE = Identity(Role.NODE, "gpu-1")
CONTROL = Identity(Role.CONTROL, "replica-1")


class Clock:
    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock():
    import time

    return Clock(time.time())


@pytest.fixture
def authority(tmp_path, clock):
    return Authority(tmp_path / "state", wall_clock=clock)


def certified(folder, authority, identity, *, bundle=None, hosts=()):
    """Certify a new key; gives the credentials, of which the authorities may be others."""
    folder.mkdir()
    key = make_key()
    issued = authority.issue(identity, read_csr(make_csr(key)), hosts)
    (folder / "key.pem").write_bytes(pem_of_key(key))
    (folder / "cert.pem").write_text(issued.chain_pem)
    (folder / "ca.pem").write_text(bundle or issued.bundle_pem)
    return Credentials(TlsFiles(folder / "cert.pem", folder / "key.pem", folder / "ca.pem"))


def handshake(server, client, *, host=None):
    """Shake hands over real sockets; gives whom each sees, or raises what the client got."""
    ours, theirs = socket.socketpair()
    seen = {}

    def serve():
        try:
            with server.server.wrap_socket(ours, server_side=True) as wrapped:
                seen["client"] = peer_identity(wrapped)
                wrapped.sendall(b"x")
        except (ssl.SSLError, OSError) as error:
            seen["refused"] = error

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        context = client.client
        if host is not None:
            context.check_hostname = True
        with context.wrap_socket(theirs, server_hostname=host or "any") as wrapped:
            if wrapped.recv(1) != b"x":
                raise ssl.SSLError("refused")
            seen["server"] = peer_identity(wrapped)
    finally:
        theirs.close()
        thread.join(10)
        ours.close()
    return seen["server"], seen["client"]


def test_members_see_who_the_other_one_is(tmp_path, authority):
    control = certified(tmp_path / "control", authority, CONTROL, hosts=("10.0.0.5", "m.example"))
    node = certified(tmp_path / "node", authority, NODE)
    assert handshake(control, node) == (CONTROL, NODE)
    for host in (CONTROL_DNS_NAME, "10.0.0.5", "m.example"):
        assert handshake(control, node, host=host) == (CONTROL, NODE)


def test_nobody_but_a_control_plane_has_its_name(tmp_path, authority):
    node = certified(tmp_path / "node", authority, NODE)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(node, certified(tmp_path / "other", authority, NODE), host=CONTROL_DNS_NAME)


def test_another_authority_is_not_believed(tmp_path, authority):
    other = Authority(tmp_path / "other-state")
    with pytest.raises((ssl.SSLError, OSError)):
        handshake(
            certified(tmp_path / "control", authority, CONTROL),
            certified(tmp_path / "intruder", other, NODE),
        )


def test_through_a_rotation_old_and_new_believe_each_other(tmp_path, authority, clock):
    old_bundle, old_pin = authority.bundle_pem, authority.spki_sha256
    old = certified(tmp_path / "old", authority, NODE)
    authority.rotate()
    assert authority.spki_sha256 != old_pin
    assert len(x509.load_pem_x509_certificates(authority.bundle_pem.encode())) == 2
    new = certified(tmp_path / "new", authority, CONTROL)
    assert handshake(new, old) == (CONTROL, NODE)
    assert handshake(old, new) == (NODE, CONTROL)
    authority.rotate()  # once more while both are trusted
    newest = certified(tmp_path / "newest", authority, CONTROL)
    assert handshake(newest, old) == (CONTROL, NODE)
    assert handshake(old, newest) == (NODE, CONTROL)
    clock.now_s += 8 * DAY_S
    assert len(x509.load_pem_x509_certificates(authority.bundle_pem.encode())) == 1
    late = certified(tmp_path / "late", authority, CONTROL)
    assert x509.load_pem_x509_certificates(late.pem().chain)[1:] == []
    stays = certified(tmp_path / "stays", authority, NODE, bundle=old_bundle)
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(late, stays)


def test_a_rotation_by_another_process_is_noticed(tmp_path, authority):
    Authority(tmp_path / "state").rotate()
    assert authority.spki_sha256 == Authority(tmp_path / "state").spki_sha256
    assert len(x509.load_pem_x509_certificates(authority.bundle_pem.encode())) == 2


def test_it_outlives_the_process_and_is_for_its_owner_alone(tmp_path, authority):
    assert Authority(tmp_path / "state").spki_sha256 == authority.spki_sha256
    (path,) = (tmp_path / "state").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_certificate_states_names_and_times(authority, clock):
    issued = authority.issue(NODE, make_key().public_key())
    (leaf,) = x509.load_pem_x509_certificates(issued.chain_pem.encode())
    (root,) = x509.load_pem_x509_certificates(issued.bundle_pem.encode())
    leaf.verify_directly_issued_by(root)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == ["spiffe://mesh/node/gpu-1"]
    assert leaf.not_valid_before_utc.timestamp() <= clock.now_s - 299
    assert leaf.not_valid_after_utc.timestamp() == int(clock.now_s + DAY_S)
    assert issued.renew_s == clock.now_s + DAY_S / 2
    assert spki_sha256(root.public_key()) == authority.spki_sha256


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b'{"version": 2}', b"\xff", b"null"])
def test_a_file_that_is_no_authoritys_is_named(tmp_path, authority, content):
    path = tmp_path / "state" / "authority.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"authority\.json is no authority's file"):
        Authority(tmp_path / "state")


def test_a_file_that_others_may_read_is_refused(tmp_path, authority):
    (tmp_path / "state" / "authority.json").chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        Authority(tmp_path / "state")


def test_only_keys_on_p256_are_certified_and_only_for_who_holds_them():
    key = make_key()
    assert read_csr(make_csr(key)) == key.public_key()
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    forged = bytearray(builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER))
    forged[-1] ^= 1
    pem = x509.load_der_x509_csr(bytes(forged)).public_bytes(serialization.Encoding.PEM)
    for csr, expected in (
        (pem.decode(), "its own key signed"),
        (builder.sign(ec.generate_private_key(ec.SECP384R1()), hashes.SHA256()), "P-256"),
        (builder.sign(ed25519.Ed25519PrivateKey.generate(), None), "P-256"),
        ("-----BEGIN CERTIFICATE REQUEST-----\nAAAA\n-----END CERTIFICATE REQUEST-----", "PKCS"),
        ("x" * 9000, "at most 8192"),
        ("é", "at most 8192"),
        ("", "PKCS"),
    ):
        text = (
            csr if isinstance(csr, str) else csr.public_bytes(serialization.Encoding.PEM).decode()
        )
        with pytest.raises(ValueError, match=expected):
            read_csr(text)


def test_a_key_is_read_as_written_and_others_are_refused():
    key = make_key()
    assert read_key(pem_of_key(key)).private_numbers() == key.private_numbers()
    for pem in (b"", b"x", pem_of_key(ec.generate_private_key(ec.SECP384R1()))):
        with pytest.raises(ValueError, match="expected"):
            read_key(pem)
