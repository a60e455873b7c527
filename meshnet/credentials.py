"""Who this process is to the mesh, and whom it believes: TLS files that may be renewed.

Contexts are made anew at each renewal: one that merely loaded the new files would go on
to trust an authority that is no longer among them.
"""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from meshnet.certificates import spki_sha256
from meshnet.errors import ConfigError
from meshnet.identity import Identity, parse_identity
from meshnet.removals import Removals
from meshnet.tls import (
    TLS_CA,
    TLS_CERT,
    TLS_KEY,
    TlsFiles,
    client_context,
    read_pem,
    server_context,
)

__all__ = ["Credentials", "Pem", "identity_of", "peer_identity", "peer_key_sha256"]

_SPIFFE: Final = "spiffe:"


@dataclass(frozen=True, slots=True)
class Pem:
    """The files' contents; empty where there is no such file.

    Attributes:
        key: of the certificate.
        chain: the certificate, followed by those between it and the authority.
        ca: authorities.
    """

    key: bytes = field(repr=False)
    chain: bytes
    ca: bytes


@dataclass(frozen=True, slots=True)
class _Loaded:
    client: ssl.SSLContext
    server: ssl.SSLContext | None
    pem: Pem
    identity: Identity | None


class Credentials:
    """TLS files in use, which `reload` reads again; may be used from any thread.

    A certificate with a SPIFFE name is one of a mesh, where names count and not hosts. So
    `client` checks no host names then: whoever connects checks by `peer_identity` whom it
    reached. TLS is 1.3 then, where renewal leaves no session to resume.

    Attributes:
        removals: whose certificates count no more, although an authority signed them.

    Args:
        files: in PEM.

    Raises:
        ConfigError: a file is missing, unreadable or not what it is to be, naming its flag;
            or there are no authorities for a certificate with a SPIFFE name.
    """

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self.removals = Removals()
        self._lock = threading.Lock()
        self._generation = 0
        self._loaded = _load(files)

    @property
    def generation(self) -> int:
        """How many times the files were read again; what was made before is of the old ones."""
        return self._generation

    @property
    def identity(self) -> Identity | None:
        """Who this process is; None where its certificate has no SPIFFE name."""
        return self._loaded.identity

    @property
    def client(self) -> ssl.SSLContext:
        """For connections that are opened now."""
        return self._loaded.client

    @property
    def server(self) -> ssl.SSLContext:
        """For connections that are accepted now; demands certificates if there are authorities.

        Raises:
            ConfigError: there is no certificate.
        """
        context = self._loaded.server
        if context is None:
            raise ConfigError(f"{TLS_CERT} is missing; expected a file", field=TLS_CERT)
        return context

    def pem(self) -> Pem:
        """Give the contents, all of them of one reading."""
        return self._loaded.pem

    def reload(self) -> None:
        """Read the files again, for connections from now on; those that are open stay.

        Raises:
            ConfigError: as at the beginning; those read before are still in use.
        """
        with self._lock:
            self._loaded = _load(self.files)
            self._generation += 1

    def listening(self, *, optional: bool = False) -> ssl.SSLContext:
        """Make a server's context for a listener that keeps it: each handshake uses the last files.

        Args:
            optional: callers may have no certificate; one that they have must be good.

        Raises:
            ConfigError: there is no certificate.
        """
        self.server  # noqa: B018 - says what is missing
        context = server_context(self.files)
        # A resumed session would not be checked against the authorities of now, and belongs
        # to this context, not to the one that the callback puts in its place.
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.num_tickets = 0
        if optional and context.verify_mode is ssl.CERT_REQUIRED:
            context.verify_mode = ssl.CERT_OPTIONAL

        # OpenSSL calls it with or without a server name. Authorities and certificate are
        # those of the context that it sets, whether one is demanded stays as above.
        def use_current(
            connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext
        ) -> None:
            connection.context = self.server

        context.sni_callback = use_current
        return context


class _Certified(Protocol):
    def getpeercert(self) -> object: ...


def peer_identity(connection: _Certified) -> Identity | None:
    """Tell who is at the other end of an SSLSocket or SSLObject, its handshake done.

    None where the other end has no certificate, or one that was not verified.
    """
    certificate = connection.getpeercert()
    if not isinstance(certificate, dict):
        return None
    names = certificate.get("subjectAltName", ())
    return identity_of(value for kind, value in names if kind == "URI")


def peer_key_sha256(connection: ssl.SSLSocket | ssl.SSLObject) -> str:
    """Give SHA-256 of the key at the other end, in hexadecimal.

    Empty where there is no certificate, or one for a key of a kind that no member has.
    """
    certificate = connection.getpeercert(binary_form=True)
    try:
        return spki_sha256(x509.load_der_x509_certificate(certificate or b"").public_key())
    except (ValueError, UnsupportedAlgorithm):
        return ""


def identity_of(names: Iterable[str]) -> Identity | None:
    """Tell whom the alternative names of a certificate state, as gRPC gives them.

    None where there is no SPIFFE ID of this mesh, or, as SPIFFE has it, more than one.
    """
    uris = [name for name in names if name.lower().startswith(_SPIFFE)]
    if len(uris) != 1:
        return None
    try:
        return parse_identity(uris[0])
    except ValueError:
        return None


def _load(files: TlsFiles) -> _Loaded:
    client = client_context(files)
    pem = Pem(
        key=read_pem(files.key, TLS_KEY),
        chain=read_pem(files.certificate, TLS_CERT),
        ca=read_pem(files.ca, TLS_CA),
    )
    if files.certificate is None:
        return _Loaded(client, None, pem, None)
    server = server_context(files)
    identity = _own_identity(pem.chain)
    if identity is not None:
        if files.ca is None:
            raise ConfigError(
                f"{TLS_CA} is missing; {TLS_CERT} {files.certificate} is {identity.uri},"
                " which needs the authorities of its mesh",
                field=TLS_CA,
            )
        client.check_hostname = False
        client.minimum_version = server.minimum_version = ssl.TLSVersion.TLSv1_3
    return _Loaded(client, server, pem, identity)


def _own_identity(chain: bytes) -> Identity | None:
    certificate = x509.load_pem_x509_certificates(chain)[0]
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return None
    return identity_of(names.get_values_for_type(x509.UniformResourceIdentifier))
