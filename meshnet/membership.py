"""What a member keeps: its key, its certificate, the roots to trust, and where the mesh is.

The key stays the same for as long as the member is one, so that a renewal replaces files
one at a time and whoever reads between two of them reads files that fit.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec

from meshnet.certificates import make_key, pem_of_key, read_key
from meshnet.errors import ConfigError
from meshnet.private_files import make_private_dir, read_private, write_private
from meshnet.tls import TlsFiles
from meshnet.topology import LayerRange

__all__ = ["OPERATOR_FOLDER", "Membership", "MembershipFolder"]

OPERATOR_FOLDER: Final = "operator"
"""Where `meshnet login` keeps an operator's credentials, in the user's state directory."""

_MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Membership:
    """What the control plane told somebody who joined.

    Attributes:
        http_addresses: ``host:port`` of the JSON face of each replica.
        grpc_addresses: ``host:port`` of the gRPC face of each; may be empty.
        renew_s: when to renew the certificate, seconds since 1970 by the control plane's clock.
        model: that the token gives a node to serve; empty for none.
        layers: that it gives.
    """

    http_addresses: tuple[str, ...]
    grpc_addresses: tuple[str, ...]
    renew_s: float
    model: str = ""
    layers: LayerRange | None = None

    @property
    def control_url(self) -> str:
        """Where the control plane is, as clients of it take it."""
        if self.grpc_addresses:
            return ",".join(f"grpcs://{address}" for address in self.grpc_addresses)
        return ",".join(f"https://{address}" for address in self.http_addresses)


class MembershipFolder:
    """The directory of a member, for its owner alone.

    Args:
        path: of it; made when something is written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def files(self) -> TlsFiles:
        """The files of TLS."""
        return TlsFiles(self.path / "cert.pem", self.path / "key.pem", self.path / "ca.pem")

    def key(self) -> ec.EllipticCurvePrivateKey:
        """Give the key, made and kept before anybody is told of it.

        Raises:
            ConfigError: the file cannot be used, naming it.
        """
        path = self.path / "key.pem"
        pem = read_private(path, _MAX_BYTES)
        if pem is None:
            make_private_dir(self.path)
            write_private(path, pem_of_key(make_key()), keep=True)
            pem = read_private(path, _MAX_BYTES) or b""
        try:
            return read_key(pem)
        except ValueError as error:
            raise ConfigError(f"{path}: {error}", field=str(path)) from None

    def load(self) -> Membership | None:
        """Give what was kept; None where nobody joined.

        Raises:
            ConfigError: a file cannot be used, naming it.
        """
        path = self.path / "member.json"
        data = read_private(path, _MAX_BYTES)
        if data is None:
            return None
        try:
            kept: Any = json.loads(data)
            layers = kept["layers"]
            return Membership(
                tuple(map(str, kept["http_addresses"])),
                tuple(map(str, kept["grpc_addresses"])),
                float(kept["renew_s"]),
                str(kept["model"]),
                None if layers is None else LayerRange(int(layers[0]), int(layers[1])),
            )
        except (ValueError, TypeError, KeyError, IndexError):
            raise ConfigError(
                f"{path} cannot be read; remove {self.path} and join by a new token",
                field=str(path),
            ) from None

    def expire_s(self) -> float:
        """Give when the certificate ends, seconds since 1970; 0 where there is none.

        Raises:
            ConfigError: the file cannot be used, naming it.
        """
        path = self.path / "cert.pem"
        pem = read_private(path, _MAX_BYTES)
        if pem is None:
            return 0.0
        try:
            return x509.load_pem_x509_certificate(pem).not_valid_after_utc.timestamp()
        except ValueError:
            raise ConfigError(f"{path} holds no certificate in PEM", field=str(path)) from None

    def keep(self, membership: Membership, chain_pem: str, bundle_pem: str) -> None:
        """Keep what joining or a renewal gave.

        Raises:
            ConfigError: a file cannot be written, naming it.
        """
        layers = membership.layers
        kept = {
            "http_addresses": membership.http_addresses,
            "grpc_addresses": membership.grpc_addresses,
            "renew_s": membership.renew_s,
            "model": membership.model,
            "layers": None if layers is None else [layers.start, layers.end],
        }
        self.keep_certificate(chain_pem, bundle_pem)
        write_private(self.path / "member.json", json.dumps(kept).encode())

    def keep_certificate(self, chain_pem: str, bundle_pem: str) -> None:
        """Keep a certificate and the roots to trust; the roots first, among which the old ones are.

        Raises:
            ConfigError: a file cannot be written, naming it.
        """
        write_private(self.path / "ca.pem", bundle_pem.encode())
        write_private(self.path / "cert.pem", chain_pem.encode())
