"""``meshnet operator`` against a control plane that knows its callers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from meshnet.cli.operator import app
from meshnet.errors import MeshError
from meshnet.identity import Role
from tests.control.secured import Secured, secured


async def command(mesh: Secured, folder: Path, *arguments: str) -> str:
    where = ["--control", f"grpcs://{mesh.addresses.grpc}", "--credentials", str(folder)]
    done = await asyncio.to_thread(CliRunner().invoke, app, [*arguments, *where])
    if done.exception is not None:
        raise done.exception
    return done.stdout


async def test_a_token_is_made_shown_once_and_revoked(tmp_path: Path) -> None:
    async with secured(tmp_path) as mesh:
        admin = tmp_path / "admin"
        token = (await command(mesh, admin, "create", "ann", "--role", "read")).strip()
        assert (await mesh.json("GET", "/v1/status", token=token))[0] == 200
        listed = await command(mesh, admin, "list", "--json")
        assert token.rpartition(".")[2] not in listed
        assert json.loads(listed)["operators"][0]["role"] == "ROLE_READ"
        await command(mesh, admin, "revoke", "ann")
        assert (await mesh.json("GET", "/v1/status", token=token))[0] == 401
        assert "revoked" in await command(mesh, admin, "list")


async def test_only_an_admin_makes_operators(tmp_path: Path) -> None:
    async with secured(tmp_path) as mesh:
        folder = mesh.credentials(Role.OPERATE).files.ca
        assert folder is not None
        for path in folder.parent.iterdir():
            path.chmod(0o600)
        with pytest.raises(MeshError, match="expected one of admin"):
            await command(mesh, folder.parent, "create", "eve", "--role", "admin")
