"""Settings from the environment: every variable, its default, and what garbage does."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from meshnet import config
from meshnet.errors import ConfigError


def test_an_empty_environment_gives_the_defaults():
    settings = config.load({"HOME": "/home/someone"})
    assert settings.chunk_tokens == 128
    assert settings.control_url is None
    assert settings.gateway_url == "http://127.0.0.1:8080"
    assert settings.cache_dir == Path("/home/someone/.cache/meshnet")
    assert settings.hub_endpoint is None
    assert settings.log_level == "warning"
    assert settings.compression.for_condition("lan", "prefill").min_input_bytes == 64 * 1024


def test_every_variable_is_read():
    settings = config.load(
        {
            "MESHNET_CHUNK_TOKENS": "64",
            "MESHNET_CONTROL": "grpc://10.0.0.1:7071",
            "MESHNET_GATEWAY": "http://10.0.0.1:8080",
            "MESHNET_CACHE_DIR": "/var/cache/meshnet",
            "HF_ENDPOINT": "http://127.0.0.1:9",
            "MESHNET_LOG": "INFO",
            "MESHNET_COMPRESSION_RELAY_DECODE_MIN_INPUT_BYTES": "7",
        }
    )
    assert settings.chunk_tokens == 64
    assert settings.control_url == "grpc://10.0.0.1:7071"
    assert settings.gateway_url == "http://10.0.0.1:8080"
    assert settings.cache_dir == Path("/var/cache/meshnet")
    assert settings.hub_endpoint == "http://127.0.0.1:9"
    assert settings.log_level == "info"
    assert settings.compression.for_condition("relay", "decode").min_input_bytes == 7
    assert settings.compression.for_condition("lan", "decode").min_input_bytes == 128 * 1024


def test_the_cache_follows_the_desktop_convention():
    assert config.load({"XDG_CACHE_HOME": "/x"}).cache_dir == Path("/x/meshnet")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MESHNET_CHUNK_TOKENS", "0"),
        ("MESHNET_CHUNK_TOKENS", "-1"),
        ("MESHNET_CHUNK_TOKENS", "many"),
        ("MESHNET_CHUNK_TOKENS", "1" * 30),
        ("MESHNET_LOG", "loud"),
    ],
)
def test_garbage_is_named(variable, value):
    with pytest.raises(ConfigError) as caught:
        config.load({variable: value})
    assert caught.value.field == variable
    assert repr(value.lower()) in caught.value.message


@pytest.mark.parametrize("variable", config._VARIABLES)
@pytest.mark.parametrize("value", ["", " "])
def test_a_variable_that_is_set_to_nothing_is_no_default(variable, value):
    with pytest.raises(ConfigError, match=f"{variable}: the value is empty") as caught:
        config.load({variable: value})
    assert caught.value.field == variable


def test_every_variable_of_ours_may_not_be_empty():
    read = set(re.findall(r"MESHNET_[A-Z_]+[A-Z]\b", str(config.Config.__doc__)))
    assert {name for name in read if "COMPRESSION" not in name} == set(config._VARIABLES)


def test_a_garbage_policy_falls_back_with_one_warning(caplog):
    caplog.set_level(logging.WARNING)
    settings = config.load({"MESHNET_COMPRESSION_LAN_PREFILL_MIN_INPUT_BYTES": "lots"})
    for _ in range(3):
        policy = settings.compression.for_condition("lan", "prefill")
    assert policy.min_input_bytes == 64 * 1024
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "MESHNET_COMPRESSION_LAN_PREFILL_MIN_INPUT_BYTES" in message
    assert "lots" in message
