"""``meshnet login``: an operator's credentials for this user's commands."""

from __future__ import annotations

import asyncio
import os
import pwd
import re
import shutil
from typing import Annotated

import typer

from meshnet import config
from meshnet.cli.join import read_join_text
from meshnet.cli.output import console
from meshnet.control.enrolled import Enrolled
from meshnet.errors import ConfigError
from meshnet.membership import OPERATOR_FOLDER, MembershipFolder

__all__ = ["login"]


def login(
    token: Annotated[
        str,
        typer.Argument(
            help="From `meshnet token create --role read|operate|admin`; @FILE reads it from a "
            "file, - from standard input.",
            metavar="TOKEN",
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="Who you are to the mesh.", show_default="the user's name")
    ] = None,
) -> None:
    """Trade a token for credentials that the other commands use from now on.

    They are renewed whenever a command is used in the second half of their life.
    """
    settings = config.load()
    text = read_join_text(token, "TOKEN")
    folder = settings.state_dir / OPERATOR_FOLDER
    fresh = MembershipFolder(folder.with_suffix(".new"))
    shutil.rmtree(fresh.path, ignore_errors=True)
    enrolled = asyncio.run(Enrolled.enroll(text, name or _user_name(), fresh))
    identity = enrolled.credentials.identity
    if identity is None or not identity.role.is_operator:
        shutil.rmtree(fresh.path, ignore_errors=True)
        raise ConfigError(
            "TOKEN: it is for a node or a gateway; expected one of role read, operate or admin",
            field="TOKEN",
        )
    shutil.rmtree(folder, ignore_errors=True)
    fresh.path.rename(folder)
    console.print(
        f"logged in as {identity.name}, who may {identity.role.value}; credentials are in {folder}",
        highlight=False,
        soft_wrap=True,
    )


def _user_name() -> str:
    """Give the user's name in the letters that a member's name may have."""
    name = re.sub(r"[^a-z0-9-]+", "-", pwd.getpwuid(os.getuid()).pw_name.lower()).strip("-")
    return name[:63] or "operator"
