"""A throwaway authority and certificates for 127.0.0.1."""

from __future__ import annotations

import datetime as dt
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from meshnet.credentials import Credentials
from meshnet.tls import TlsFiles

_DAY = dt.timedelta(days=1)


@dataclass(frozen=True)
class Authority:
    """Files of an authority and of one certificate that it signed.

    Attributes:
        ca: the authority's certificate.
        certificate: signed by it, for 127.0.0.1.
        key: of the certificate.
    """

    ca: Path
    certificate: Path
    key: Path

    @property
    def files(self) -> TlsFiles:
        """All of them."""
        return TlsFiles(self.certificate, self.key, self.ca)

    def server(self, *, ask_callers: bool = False) -> Credentials:
        """Give a server's credentials, which may demand certificates of its callers."""
        ca = self.ca if ask_callers else None
        return Credentials(TlsFiles(self.certificate, self.key, ca))

    def client(self, *, own: bool = False) -> Credentials:
        """Give a client's credentials, with the certificate as its own where asked."""
        return Credentials(self.files if own else TlsFiles(ca=self.ca))


def make_authority(directory: Path, *, uris: Sequence[str] = ()) -> Authority:
    """Write a new authority and certificate, with `uris` as further names."""
    directory.mkdir(parents=True, exist_ok=True)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "throwaway authority")])
    authority = _sign(name, name, authority_key, authority_key, is_authority=True)
    key = ec.generate_private_key(ec.SECP256R1())
    own = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "node")])
    certificate = _sign(own, name, key, authority_key, is_authority=False, uris=uris)
    made = Authority(directory / "ca.pem", directory / "node.pem", directory / "node.key")
    made.ca.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
    made.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    made.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return made


def _sign(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    issuer_key: ec.EllipticCurvePrivateKey,
    *,
    is_authority: bool,
    uris: Sequence[str] = (),
) -> x509.Certificate:
    now = dt.datetime.now(dt.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    names = [address, *map(x509.UniformResourceIdentifier, uris)]
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    of_issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key())
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _DAY)
        .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(of_issuer, critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(issuer_key, hashes.SHA256())
    )
