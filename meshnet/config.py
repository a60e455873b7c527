"""The only reader of the environment: settings for every process, frozen."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from meshnet.compression import CompressionPolicies
from meshnet.errors import ConfigError

__all__ = ["Config", "child_environment", "load"]

_VARIABLES: Final = (
    "MESHNET_API_KEY",
    "MESHNET_API_KEYS",
    "MESHNET_CACHE_DIR",
    "MESHNET_CHUNK_TOKENS",
    "MESHNET_CONTROL",
    "MESHNET_CREDENTIALS",
    "MESHNET_GATEWAY",
    "MESHNET_JOIN",
    "MESHNET_LOG",
    "MESHNET_STATE_DIR",
)
"""What may not be set to nothing: a variable of a deployment that is not filled in would start
a gateway without keys, or a node of an open mesh, where it was to be closed."""


@dataclass(frozen=True, slots=True)
class Config:
    """What the environment says; flags of the command line come before it.

    Attributes:
        chunk_tokens: MESHNET_CHUNK_TOKENS, token positions of a prompt per chunk.
        control_url: MESHNET_CONTROL, where the control plane is; several replicas with commas;
            None for where the operator logged in, or this machine.
        gateway_url: MESHNET_GATEWAY, where clients find the OpenAI endpoint.
        credentials: MESHNET_CREDENTIALS, the directory of an operator's credentials.
        join: MESHNET_JOIN, a join token as ``--join`` takes it.
        api_key: MESHNET_API_KEY, what clients of this process show a gateway.
        api_keys: MESHNET_API_KEYS, the store of the keys that a gateway accepts.
        cache_dir: MESHNET_CACHE_DIR, else ``meshnet`` in the user's cache directory.
        state_dir: MESHNET_STATE_DIR, else ``meshnet`` in the user's state directory.
        hub_endpoint: HF_ENDPOINT, None for the hub's own address.
        log_level: MESHNET_LOG, a level of `logging` in lower case.
        compression: MESHNET_COMPRESSION_<ROUTE>_<PHASE>_<NAME>.
    """

    chunk_tokens: int
    control_url: str | None
    gateway_url: str
    credentials: Path | None
    join: str | None = field(repr=False)
    api_key: str | None = field(repr=False)
    api_keys: str | None
    cache_dir: Path
    state_dir: Path
    hub_endpoint: str | None
    log_level: str
    compression: CompressionPolicies


def load(environ: Mapping[str, str] | None = None) -> Config:
    """Read the settings.

    Raises:
        ConfigError: naming the variable, its value and what was expected.
    """
    env = os.environ if environ is None else environ
    for name in _VARIABLES:
        if name in env and not env[name].strip():
            raise ConfigError(
                f"{name}: the value is empty; expected one, or no {name} at all", field=name
            )
    log_level = env.get("MESHNET_LOG", "warning").lower()
    if log_level not in ("debug", "info", "warning", "error"):
        raise ConfigError(
            f"MESHNET_LOG: {log_level!r}; expected debug, info, warning or error",
            field="MESHNET_LOG",
        )
    return Config(
        chunk_tokens=_positive(env, "MESHNET_CHUNK_TOKENS", 128),
        control_url=env.get("MESHNET_CONTROL"),
        gateway_url=env.get("MESHNET_GATEWAY", "http://127.0.0.1:8080"),
        credentials=Path(text).expanduser() if (text := env.get("MESHNET_CREDENTIALS")) else None,
        join=env.get("MESHNET_JOIN"),
        api_key=env.get("MESHNET_API_KEY"),
        api_keys=env.get("MESHNET_API_KEYS"),
        cache_dir=_user_dir(env, "MESHNET_CACHE_DIR", "XDG_CACHE_HOME", ".cache"),
        state_dir=_user_dir(env, "MESHNET_STATE_DIR", "XDG_STATE_HOME", ".local/state"),
        hub_endpoint=env.get("HF_ENDPOINT") or None,
        log_level=log_level,
        compression=CompressionPolicies(overrides=env),
    )


def child_environment(**variables: str) -> dict[str, str]:
    """Give this process's environment with `variables` set, for a process to start.

    A join token is not passed on: it is for the process that it was given to.
    """
    inherited = {name: value for name, value in os.environ.items() if name != "MESHNET_JOIN"}
    return {**inherited, **variables}


def _positive(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text) > 0):
        raise ConfigError(f"{name}: {text!r}; expected a whole number of at least 1", field=name)
    return int(text)


def _user_dir(env: Mapping[str, str], own_name: str, xdg_name: str, in_home: str) -> Path:
    """Give the directory for one kind of a user's files.

    Source: XDG Base Directory Specification.
    """
    if own := env.get(own_name):
        return Path(own)
    if xdg := env.get(xdg_name):
        return Path(xdg) / "meshnet"
    return Path(env.get("HOME") or "~").expanduser() / in_home / "meshnet"
