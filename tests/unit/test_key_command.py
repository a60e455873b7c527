"""``meshnet key`` as operators type it."""

from __future__ import annotations

import json
import re
import stat
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from meshnet.cli.key import app
from meshnet.errors import ConfigError, MeshError


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHNET_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("MESHNET_API_KEYS", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path / "state"


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None:
        raise result.exception
    return result


def test_create_list_revoke(state: Path) -> None:
    created = run("create", "my-app", "--requests-per-minute", "60", "--streams", "4")
    (key,) = created.stdout.split()
    assert re.fullmatch(r"mk-[a-z0-9]{12}-[A-Za-z0-9_-]{43}", key)
    assert f"sqlite:{state}/keys.db" in created.stderr.replace("\n", "")
    assert "mk-" not in created.stderr
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    listed = run("list").stdout
    assert ("my-app" in listed, "60" in listed, key[3:15] in listed) == (True, True, True)
    assert key[16:] not in listed
    assert "my-app is revoked" in run("revoke", "my-app").stdout
    assert "There is no key" in run("list").stdout


def test_json(tmp_path: Path) -> None:
    store = ("--store", f"sqlite:{tmp_path}/own.db")
    made = json.loads(run("create", "b", "--json", *store).stdout)
    run("create", "a", "--streams", "1", *store)
    keys = json.loads(run("list", "--json", *store).stdout)["keys"]
    assert [key["name"] for key in keys] == ["a", "b"]
    assert keys[0]["streams"] == 1
    assert keys[1] == {
        name: made[name] for name in ("name", "id", "requests_per_minute", "streams", "create_time")
    }
    assert "key" not in keys[1]
    assert json.loads(run("revoke", "b", "--json", *store).stdout) == {
        "name": "b",
        "revoked": True,
    }
    assert json.loads(run("list", "--json").stdout) == {"keys": []}  # the user's own file


def test_the_store_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHNET_API_KEYS", f"sqlite:{tmp_path}/env.db")
    run("create", "a")
    assert (tmp_path / "env.db-documents").is_file()


def test_a_name_is_taken_until_its_key_is_revoked() -> None:
    first = run("create", "a").stdout
    with pytest.raises(MeshError, match="there is a key named 'a'"):
        run("create", "a")
    run("revoke", "a")
    assert run("create", "a").stdout != first


@pytest.mark.parametrize("name", ["", "A", "a b", "-a", "a-", "a/b", "é", "a" * 64])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(ConfigError, match="expected 1 to 63"):
        run("create", "--", name)
    with pytest.raises(MeshError, match="no key named"):
        run("revoke", "--", name)


def test_a_store_that_ends_with_the_command_is_refused() -> None:
    with pytest.raises(ConfigError, match="would end with this command"):
        run("create", "a", "--store", "memory")
