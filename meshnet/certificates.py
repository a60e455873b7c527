"""Keys, requests and certificates of the mesh: ECDSA on P-256, names as SPIFFE has them.

P-256 and not Ed25519: what speaks gRPC here, by BoringSSL, offers no Ed25519 in a handshake.
Source: RFC 5280; the X.509-SVID specification of SPIFFE.
"""

from __future__ import annotations

import hashlib
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.types import CertificatePublicKeyTypes
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from meshnet.identity import Identity

__all__ = [
    "CLOCK_SKEW_S",
    "MAX_CSR_CHARS",
    "Period",
    "cross_certificate",
    "leaf_certificate",
    "make_csr",
    "make_key",
    "pem_of",
    "pem_of_key",
    "read_csr",
    "read_key",
    "root_certificate",
    "spki_sha256",
]

CLOCK_SKEW_S: Final = 300.0
"""How long before it is made a certificate begins: clocks of a mesh may differ by as much."""

MAX_CSR_CHARS: Final = 8192

PrivateKey = ec.EllipticCurvePrivateKey
PublicKey = ec.EllipticCurvePublicKey


@dataclass(frozen=True, slots=True)
class Period:
    """When a certificate is good; seconds since 1970, the fractions cut off."""

    start_s: float
    end_s: float


def make_key() -> PrivateKey:
    """Make a key."""
    return ec.generate_private_key(ec.SECP256R1())


def pem_of_key(key: PrivateKey) -> bytes:
    """Write a key in PEM (PKCS #8), without a passphrase."""
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


def read_key(pem: bytes) -> PrivateKey:
    """Read what `pem_of_key` wrote.

    Raises:
        ValueError: it is something else.
    """
    try:
        key = serialization.load_pem_private_key(pem, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ValueError("expected a private key in PEM, without a passphrase") from None
    if not isinstance(key, PrivateKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("expected an ECDSA key on P-256")
    return key


def spki_sha256(key: CertificatePublicKeyTypes) -> str:
    """Give SHA-256 of a SubjectPublicKeyInfo in DER, in hexadecimal."""
    spki = key.public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(spki).hexdigest()


def make_csr(key: PrivateKey) -> str:
    """Make a request in PEM for the certification of a key; it states no names."""
    request = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return request.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM).decode()


def read_csr(pem: str) -> PublicKey:
    """Give the key that a request asks to certify, which its sender holds.

    Raises:
        ValueError: it is no such request, is signed by another key, or has a key of another kind.
    """
    if len(pem) > MAX_CSR_CHARS or not pem.isascii():
        raise ValueError(f"expected at most {MAX_CSR_CHARS} characters of PEM")
    try:
        request = x509.load_pem_x509_csr(pem.encode())
        key = request.public_key()
        is_signed = request.is_signature_valid
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ValueError("expected a PKCS #10 request in PEM") from None
    if not isinstance(key, PublicKey) or not isinstance(key.curve, ec.SECP256R1):
        raise ValueError("expected an ECDSA key on P-256")
    if not is_signed:
        raise ValueError("expected a request that its own key signed")
    return key


def pem_of(*certificates: x509.Certificate) -> str:
    """Write certificates in PEM, one after the other."""
    return "".join(
        certificate.public_bytes(serialization.Encoding.PEM).decode()
        for certificate in certificates
    )


def root_certificate(key: PrivateKey, period: Period) -> x509.Certificate:
    """Make the certificate of an authority, signed by itself."""
    name = _authority_name(key.public_key())
    return _authority(name, key.public_key(), name, key, period)


def cross_certificate(
    root: x509.Certificate, key: PublicKey, older: x509.Certificate, older_key: PrivateKey
) -> x509.Certificate:
    """Certify the key of `root` by an older authority, for those who know only that one."""
    period = Period(
        root.not_valid_before_utc.timestamp(),
        min(root.not_valid_after_utc, older.not_valid_after_utc).timestamp(),
    )
    return _authority(root.subject, key, older.subject, older_key, period)


def leaf_certificate(
    identity: Identity,
    key: PublicKey,
    root: x509.Certificate,
    root_key: PrivateKey,
    period: Period,
    hosts: Iterable[str] = (),
) -> x509.Certificate:
    """Certify that `key` is of `identity`, which serves and calls by it.

    Args:
        identity: stated as a SPIFFE ID.
        key: certified.
        root: of the authority.
        root_key: its key.
        period: when it is good.
        hosts: DNS names and addresses that it is good for too.
    """
    names = [x509.UniformResourceIdentifier(identity.uri), *map(_general_name, hosts)]
    builder = _builder(_name(identity.name), key, root.subject, root_key.public_key(), period)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), True)
    builder = builder.add_extension(_usage(is_authority=False), critical=True)
    usages = (ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH)
    builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    return builder.sign(root_key, hashes.SHA256())


def _authority(
    subject: x509.Name, key: PublicKey, issuer: x509.Name, issuer_key: PrivateKey, period: Period
) -> x509.Certificate:
    builder = _builder(subject, key, issuer, issuer_key.public_key(), period)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
    builder = builder.add_extension(_usage(is_authority=True), critical=True)
    return builder.sign(issuer_key, hashes.SHA256())


def _builder(
    subject: x509.Name, key: PublicKey, issuer: x509.Name, issuer_key: PublicKey, period: Period
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.fromtimestamp(int(period.start_s), UTC))
        .not_valid_after(datetime.fromtimestamp(int(period.end_s), UTC))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), False)
    )


def _usage(*, is_authority: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _authority_name(key: PublicKey) -> x509.Name:
    """Name an authority by its key: verifiers look issuers up by name."""
    return _name(f"meshnet authority {spki_sha256(key)[:16]}")


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
