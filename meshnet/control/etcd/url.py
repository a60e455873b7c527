"""Where an etcd cluster is, as operators write it, and the files of TLS that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

import grpc

from meshnet.errors import ConfigError
from meshnet.listen import host_port
from meshnet.tls import TlsFiles, client_context, read_pem

__all__ = ["EtcdUrl", "read_etcd_url", "unreadable"]

_PLAIN: Final = "etcd://"
_TLS: Final = "etcds://"
_FILES: Final = ("ca", "cert", "key")


class EtcdUrl(NamedTuple):
    """A cluster.

    Attributes:
        addresses: ``host:port`` of members.
        tls: for TLS; None for none.
    """

    addresses: list[str]
    tls: grpc.ChannelCredentials | None


def read_etcd_url(text: str) -> EtcdUrl:
    """Read ``etcd://HOST:PORT[,HOST:PORT...]`` or ``etcds://...[?ca=FILE][&cert=FILE&key=FILE]``.

    Without ``ca`` the system's authorities count; ``cert`` and ``key`` are for clusters that
    want certificates of their clients.

    Raises:
        ConfigError: it is neither, or a file cannot be used.
    """
    if text.startswith(_PLAIN):
        return EtcdUrl(_addresses(text.removeprefix(_PLAIN), text), None)
    if not text.startswith(_TLS):
        raise unreadable(text)
    where, _, query = text.removeprefix(_TLS).partition("?")
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise unreadable(text) from None
    files = {name: Path(path).expanduser() for name, path in pairs}
    if len(files) < len(pairs) or not all(name in _FILES and path for name, path in pairs):
        raise unreadable(text)
    return EtcdUrl(_addresses(where, text), _credentials(files))


def unreadable(text: str) -> ConfigError:
    """Give the error for a text that names no store."""
    return ConfigError(
        f"store {text!r}: expected memory, sqlite:PATH or etcd://HOST:PORT[,HOST:PORT...];"
        " with TLS etcds://HOST:PORT[,HOST:PORT...][?ca=FILE][&cert=FILE&key=FILE]",
        field="--store",
    )


def _credentials(files: dict[str, Path]) -> grpc.ChannelCredentials:
    certificate, key = files.get("cert"), files.get("key")
    if certificate is not None or key is not None:
        client_context(TlsFiles(certificate, key, flags="etcds"))  # says what is wrong with them
    ca, chain, private = (read_pem(files.get(name), f"etcds-{name}") for name in _FILES)
    return grpc.ssl_channel_credentials(ca or None, private or None, chain or None)


def _addresses(where: str, text: str) -> list[str]:
    return [_address(part, text) for part in where.split(",")]


def _address(part: str, text: str) -> str:
    """Read one ``HOST:PORT``."""
    try:
        parts = urlsplit(f"//{part}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or parts.netloc != part or "@" in part:
        raise unreadable(text)
    return host_port(host, port)
