"""The flags of a control plane that knows its callers, alone or inside a gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "AdvertiseControl",
    "CertificateLife",
    "Insecure",
    "RequireProbe",
    "State",
]

State = Annotated[
    Path | None,
    typer.Option(
        file_okay=False,
        help="Directory of the mesh's authority, made at the first start: with it the mesh speaks "
        "mutual TLS and admits members by tokens (meshnet token create).",
        show_default="none: an open mesh",
    ),
]

AdvertiseControl = Annotated[
    str,
    typer.Option(
        "--advertise-control",
        metavar="HOST",
        help="Name or address at which others reach the control plane, for join tokens.",
        show_default="the host of --listen",
    ),
]

CertificateLife = Annotated[
    float,
    typer.Option(
        "--certificate-life",
        min=2.0,
        max=90 * 86400.0,
        help="Seconds for which certificates are good; they are renewed at half of it.",
    ),
]

Insecure = Annotated[
    bool,
    typer.Option(
        "--insecure", help="Listen where other machines can reach it although nobody is checked."
    ),
]

RequireProbe = Annotated[
    bool | None,
    typer.Option(
        "--require-probe/--no-require-probe",
        help="Keep nodes out of routes whose model has no reference to compare their numbers with.",
        show_default="with --state alone",
    ),
]
