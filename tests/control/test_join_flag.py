"""``--join`` reads a token from where it is said to be, and shows no secret when it cannot."""

from __future__ import annotations

import io
import sys
import time

import pytest

from meshnet import config
from meshnet.authority import Authority
from meshnet.cli.join import join_mesh, read_join_text
from meshnet.control.joining import renew_if_due
from meshnet.errors import ConfigError, MeshError
from meshnet.identity import Identity, Role
from meshnet.join import JoinText
from meshnet.membership import Membership, MembershipFolder

TOKEN = JoinText("abcdef0123", "A" * 22, "ab" * 32, ("10.0.0.5:7070",))


def test_a_token_is_read_from_the_flag_a_file_and_standard_input(tmp_path, monkeypatch):
    assert read_join_text(TOKEN.text()) == TOKEN
    (tmp_path / "token").write_text(f"{TOKEN.text()}\n")
    assert read_join_text(f"@{tmp_path / 'token'}") == TOKEN
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{TOKEN.text()}\n"))
    assert read_join_text("-") == TOKEN


def test_what_cannot_be_read_is_named_without_the_secret(tmp_path):
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 100)
    for text, said in (
        (TOKEN.text().replace("@", ""), "not a join token"),
        (TOKEN.text().replace("AA", "A", 1), "secret of 21 characters"),
        (f"@{tmp_path / 'none'}", "No such file"),
        (f"@{tmp_path / 'binary'}", "--join"),
    ):
        with pytest.raises(ConfigError) as caught:
            read_join_text(text)
        assert said in caught.value.message
        assert caught.value.field == "--join"
        assert "AAAAAAAA" not in caught.value.message


def test_a_token_brings_its_own_certificate_and_none_joins_nothing():
    settings = config.load({})
    assert join_mesh(None, Role.NODE, "gpu-1", settings, has_tls=True) is None
    with pytest.raises(ConfigError, match="leave out --tls"):
        join_mesh(TOKEN.text(), Role.NODE, "gpu-1", settings, has_tls=True)


def test_the_environment_has_a_token_that_is_neither_shown_nor_passed_on(monkeypatch):
    settings = config.load({"MESHNET_JOIN": TOKEN.text()})
    assert settings.join == TOKEN.text()
    assert TOKEN.secret not in repr(settings)
    monkeypatch.setenv("MESHNET_JOIN", TOKEN.text())
    assert "MESHNET_JOIN" not in config.child_environment()
    assert config.child_environment(MESHNET_JOIN="own")["MESHNET_JOIN"] == "own"


async def test_an_operator_whose_certificate_has_ended_is_told_to_log_in(tmp_path):
    folder = MembershipFolder(tmp_path / "operator")
    assert await renew_if_due(folder) is None
    now_s = time.time()
    issued = Authority(tmp_path / "state").issue(
        Identity(Role.READ, "ann"), folder.key().public_key()
    )
    membership = Membership(("127.0.0.1:1",), (), issued.renew_s)
    folder.keep(membership, issued.chain_pem, issued.bundle_pem)
    assert await renew_if_due(folder) == membership
    # Due, but nobody answers: it is good for a while yet.
    assert await renew_if_due(folder, wall_clock=lambda: now_s + 13 * 3600) == membership
    with pytest.raises(MeshError, match="meshnet login with a new token"):
        await renew_if_due(folder, wall_clock=lambda: now_s + 25 * 3600)
