"""``--join``: how commands that serve become members of a mesh that knows its members."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
from pathlib import Path
from typing import Annotated, Final

import typer
from setproctitle import setproctitle

from meshnet import config
from meshnet.control.enrolled import Enrolled
from meshnet.errors import ConfigError
from meshnet.identity import Role
from meshnet.join import JoinText, parse_join_text
from meshnet.membership import MembershipFolder

__all__ = ["Join", "default_name", "join_mesh", "read_join_text"]

JOIN: Final = "--join"
_MAX_CHARS: Final = 4096

Join = Annotated[
    str | None,
    typer.Option(
        JOIN,
        metavar="TOKEN",
        help="Join a mesh by a token of `meshnet token create`; @FILE reads it from a file, - "
        "from standard input, which keeps it out of the shell's history; else MESHNET_JOIN.",
        show_default=False,
    ),
]


def join_mesh(
    join: str | None, role: Role, name: str, settings: config.Config, *, has_tls: bool
) -> Enrolled | None:
    """Join where a token says so; None where there is none.

    What joining gives is kept in the user's state directory, for restarts with this token.

    Args:
        join: of the flag.
        role: that the token is to be for.
        name: wished; of a node its id.
        settings: of the environment.
        has_tls: flags name TLS files too.

    Raises:
        ConfigError: the token cannot be read, or its authority be kept beside other files.
        MeshError: the mesh was not joined.
    """
    text = join or settings.join
    if text is None:
        return None
    if has_tls:
        raise ConfigError(f"{JOIN} brings its own certificate; leave out --tls-*", field=JOIN)
    token = read_join_text(text)
    folder = MembershipFolder(
        settings.state_dir / "members" / f"{token.public}.{role.value}.{name}"
    )
    return asyncio.run(Enrolled.enroll(token, name, folder, role))


def default_name(kind: str, port: int) -> str:
    """Make a name of host name and port, so that several processes of a machine differ."""
    host = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().lower()).strip("-")
    return f"{kind}-{host}-{port}"[:63]


def read_join_text(text: str, field: str = JOIN) -> JoinText:
    """Read a join token, from a file for ``@FILE`` and from standard input for ``-``.

    Raises:
        ConfigError: there is none; never with the secret.
    """
    if text in sys.argv:
        _hide(text)
    if text == "-":
        text = sys.stdin.readline(_MAX_CHARS)
    elif text.startswith("@"):
        path = Path(text[1:]).expanduser()
        try:
            with path.open(encoding="ascii", errors="replace") as file:
                text = file.read(_MAX_CHARS)
        except OSError as error:
            raise ConfigError(f"{field}: {path}: {error.strerror}", field=field) from None
    try:
        return parse_join_text(text)
    except ValueError as error:
        raise ConfigError(f"{field}: {error}", field=field) from None


def _hide(argument: str) -> None:
    """Show an argument in lists of processes no longer than the time until here."""
    if argument == "-" or argument.startswith("@"):
        return
    shown = ["TOKEN" if argument == one else one for one in sys.orig_argv]
    setproctitle(" ".join(shown))
