"""Files of TLS that cannot be used, and what OpenSSL's errors are turned into."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from meshnet.errors import ConfigError
from meshnet.plane.tls import explain
from meshnet.tls import TlsFiles, client_context, server_context
from tests.plane.certificates import Authority, make_authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("tls"))


def test_none_give_no_context():
    assert client_context(None) is None
    assert server_context(None) is None


def test_a_server_with_authorities_demands_certificates(authority):
    files = TlsFiles(authority.certificate, authority.key, authority.ca)
    assert server_context(files).verify_mode is ssl.CERT_REQUIRED
    assert client_context(files).verify_mode is ssl.CERT_REQUIRED
    assert client_context(files).check_hostname
    alone = TlsFiles(authority.certificate, authority.key)
    assert server_context(alone).verify_mode is ssl.CERT_NONE
    assert client_context(alone).verify_mode is ssl.CERT_REQUIRED


@pytest.mark.parametrize(
    ("changed", "content", "said"),
    [
        ("certificate", None, "--tls-cert: FILE: No such file"),
        ("key", None, "--tls-key: FILE: No such file"),
        ("ca", None, "--tls-ca: FILE: No such file"),
        ("certificate", b"hello\n", "--tls-cert: FILE holds no certificate in PEM"),
        ("key", b"hello\n", "--tls-key: FILE holds no private key in PEM"),
        ("ca", b"hello\n", "--tls-ca: FILE holds no certificate in PEM"),
        ("ca", b"", "--tls-ca: FILE holds no certificate in PEM"),
        ("key", b"", "--tls-key: FILE holds no private key in PEM"),
        ("certificate", b"\x30\x82\xff", "--tls-cert: FILE is no PEM file"),
        ("ca", b"a" * ((1 << 20) + 1), "--tls-ca: FILE is no PEM file of at most 1 MiB"),
    ],
)
@pytest.mark.parametrize("make", [client_context, server_context], ids=["client", "server"])
def test_a_file_that_cannot_be_used_is_named_with_its_flag(
    tmp_path, authority, make, changed, content, said
):
    path = tmp_path / "file.pem"
    if content is not None:
        path.write_bytes(content)
    paths = {"certificate": authority.certificate, "key": authority.key, "ca": authority.ca}
    with pytest.raises(ConfigError) as caught:
        make(TlsFiles(**{**paths, changed: path}))
    assert caught.value.message.startswith(said.replace("FILE", str(path)))
    assert caught.value.field == said.partition(":")[0]


def test_another_certificates_key_is_named(tmp_path, authority):
    other = make_authority(tmp_path)
    with pytest.raises(ConfigError) as caught:
        server_context(TlsFiles(authority.certificate, other.key))
    assert caught.value.message == (
        f"--tls-key: {other.key} is not the key of --tls-cert {authority.certificate}"
    )


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(tmp_path, authority):
    key = serialization.load_pem_private_key(authority.key.read_bytes(), None)
    path = tmp_path / "locked.key"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match=f"--tls-key: {path} has a passphrase"):
        server_context(TlsFiles(authority.certificate, path))


@pytest.mark.parametrize("make", [client_context, server_context], ids=["client", "server"])
@pytest.mark.parametrize(
    ("files", "missing"),
    [(TlsFiles(Path("a")), "--tls-key"), (TlsFiles(key=Path("a")), "--tls-cert")],
)
def test_half_a_pair_is_refused(make, files, missing):
    with pytest.raises(ConfigError, match=f"{missing} is missing"):
        make(files)


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("WRONG_VERSION_NUMBER", "it does not speak TLS"),
        ("TLSV13_ALERT_CERTIFICATE_REQUIRED", "refused this side's certificate (certificate requ"),
        ("TLSV1_ALERT_UNKNOWN_CA", "it refused this side's certificate (unknown ca)"),
        ("NO_SHARED_CIPHER", "TLS failed: [SSL: NO_SHARED_CIPHER]"),
    ],
)
def test_errors_of_openssl_are_said_in_one_line(reason, said):
    error = ssl.SSLError(1, f"[SSL: {reason}] some words (_ssl.c:1006)")
    error.reason = reason
    wrapped = ConnectionError("the connection was closed before an answer")
    wrapped.__cause__ = error
    for found in (explain(error), explain(wrapped)):
        assert said in found
        assert "_ssl.c" not in found


def test_other_errors_stay_as_they_are():
    assert explain(ConnectionRefusedError(111, "Connection refused")) == (
        "[Errno 111] Connection refused"
    )
