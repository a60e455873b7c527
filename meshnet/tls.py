"""Files of TLS, and the contexts made of them, for every connection of the mesh."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn, overload

from meshnet.errors import ConfigError

__all__ = [
    "TLS_CA",
    "TLS_CERT",
    "TLS_KEY",
    "TlsFiles",
    "client_context",
    "files_in",
    "read_pem",
    "server_context",
]

TLS_CERT: Final = "--tls-cert"
TLS_KEY: Final = "--tls-key"
TLS_CA: Final = "--tls-ca"
"""Flags of the commands that take the files, named in every error."""

_PEM_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files in PEM; of certificate and key, both or none.

    Attributes:
        certificate: of this process, followed by those between it and the authority.
        key: of the certificate, without a passphrase.
        ca: authorities. A server with them demands a certificate that one of them signed; a
            client accepts servers that one of them certified, and without them those that
            the system accepts.
        flags: what the flags begin with that name the files, for errors.
    """

    certificate: Path | None = None
    key: Path | None = None
    ca: Path | None = None
    flags: str = "--tls"


def files_in(folder: Path) -> TlsFiles:
    """Name the files of a directory of credentials, as every part of meshnet keeps them."""
    return TlsFiles(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")


@overload
def server_context(files: TlsFiles) -> ssl.SSLContext: ...
@overload
def server_context(files: TlsFiles | None) -> ssl.SSLContext | None: ...
def server_context(files: TlsFiles | None) -> ssl.SSLContext | None:
    """Read the files for a server; none give no context.

    Raises:
        ConfigError: one is missing, unreadable or not what it is to be, naming flag and file.
    """
    if files is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load_own(context, files)
    if files.ca is not None:
        _load_ca(context, files.ca, TLS_CA)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


@overload
def client_context(files: TlsFiles) -> ssl.SSLContext: ...
@overload
def client_context(files: TlsFiles | None) -> ssl.SSLContext | None: ...
def client_context(files: TlsFiles | None) -> ssl.SSLContext | None:
    """Read the files for a client, which presents its certificate; none give no context.

    Raises:
        ConfigError: one is missing, unreadable or not what it is to be, naming flag and file.
    """
    if files is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if files.ca is None:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    else:
        _load_ca(context, files.ca, TLS_CA)
    if files.certificate is not None or files.key is not None:
        _load_own(context, files)
    return context


def read_pem(path: Path | None, flag: str) -> bytes:
    """Read a file as `TlsFiles` has them; empty where there is none.

    Raises:
        ConfigError: it is unreadable or no PEM file, naming flag and file.
    """
    return b"" if path is None else _read(path, flag).encode("ascii")


def _load_ca(context: ssl.SSLContext, path: Path, flag: str) -> None:
    text = _read(path, flag)
    try:
        context.load_verify_locations(cadata=text)
    except (ssl.SSLError, ValueError):
        raise ConfigError(f"{flag}: {path} holds no certificate in PEM", field=flag) from None


def _load_own(context: ssl.SSLContext, files: TlsFiles) -> None:
    certificate, key = files.certificate, files.key
    cert_flag, key_flag = f"{files.flags}-cert", f"{files.flags}-key"
    if certificate is None:
        raise ConfigError(f"{cert_flag} is missing; expected a file", field=cert_flag)
    if key is None:
        raise ConfigError(f"{key_flag} is missing; {cert_flag} needs it", field=key_flag)
    _read(key, key_flag)
    _load_ca(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), certificate, cert_flag)
    try:
        context.load_cert_chain(certificate, key, password=_no_passphrase)
    except _PassphraseError:
        raise ConfigError(
            f"{key_flag}: {key} has a passphrase; expected a key without one", field=key_flag
        ) from None
    except (ssl.SSLError, ValueError) as error:
        what = (
            f"is not the key of {cert_flag} {certificate}"
            if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH"
            else "holds no private key in PEM"
        )
        raise ConfigError(f"{key_flag}: {key} {what}", field=key_flag) from None


class _PassphraseError(Exception):
    """A key asks for a passphrase, which OpenSSL would otherwise ask the terminal for."""


def _no_passphrase() -> NoReturn:
    raise _PassphraseError


def _read(path: Path, flag: str) -> str:
    try:
        with path.open("rb") as file:
            text = file.read(_PEM_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{flag}: {path}: {error.strerror}", field=flag) from None
    if len(text) > _PEM_BYTES or not text.isascii():
        raise ConfigError(f"{flag}: {path} is no PEM file of at most 1 MiB", field=flag)
    return text.decode("ascii")
