"""The flags of TLS on the activation plane, for the commands that have them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from meshnet.credentials import Credentials
from meshnet.tls import TLS_CA, TLS_CERT, TLS_KEY, TlsFiles

__all__ = ["TlsCa", "TlsCert", "TlsKey", "tls_credentials"]

TlsCert = Annotated[
    Path | None,
    typer.Option(TLS_CERT, help="Own certificate in PEM, for TLS between gateway and nodes."),
]
TlsKey = Annotated[Path | None, typer.Option(TLS_KEY, help="Its key in PEM, no passphrase.")]
TlsCa = Annotated[
    Path | None,
    typer.Option(
        TLS_CA,
        help="Authorities in PEM that certify the others.",
        show_default="those of the system",
    ),
]


def tls_credentials(
    cert: Path | None, key: Path | None, ca: Path | None, *, serves: bool = False
) -> Credentials | None:
    """Read the files that the flags name, before anything is started with them.

    Gives None where there are no flags. `serves` is for a process that others connect to.

    Raises:
        ConfigError: a file is missing or cannot be used, naming flag and file.
    """
    if cert is key is ca is None:
        return None
    credentials = Credentials(TlsFiles(cert, key, ca))
    if serves:
        credentials.server  # noqa: B018 - says what is missing
    return credentials
