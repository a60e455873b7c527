"""Where a registry is kept, as operators write it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from meshnet.control.etcd.store import EtcdStore
from meshnet.control.registry import Store
from meshnet.control.sqlite_journal import SqliteJournal
from meshnet.control.store import MemoryStore
from meshnet.errors import ConfigError
from meshnet.listen import host_port

__all__ = ["make_store"]


def make_store(text: str, clock: Callable[[], float], forget_after_s: float) -> Store:
    """Make the store that `text` names; it is not opened yet.

    Args:
        text: ``memory``, ``sqlite:PATH`` or ``etcd://HOST:PORT[,HOST:PORT...]``.
        clock: monotonic seconds.
        forget_after_s: seconds for which a LOST node is still listed.

    Raises:
        ConfigError: `text` is none of these.
    """
    if text == "memory":
        return MemoryStore(clock, time.time, forget_after_s=forget_after_s)
    if text.startswith("sqlite:") and len(text) > len("sqlite:"):
        journal = SqliteJournal(Path(text.removeprefix("sqlite:")).expanduser())
        return MemoryStore(clock, time.time, forget_after_s=forget_after_s, journal=journal)
    if text.startswith("etcd://"):
        addresses = [_address(part, text) for part in text.removeprefix("etcd://").split(",")]
        return EtcdStore(addresses, time.time, forget_after_s=forget_after_s)
    raise _unreadable(text)


def _address(part: str, text: str) -> str:
    """Read one ``HOST:PORT``."""
    try:
        parts = urlsplit(f"//{part}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port or parts.netloc != part or "@" in part:
        raise _unreadable(text)
    return host_port(host, port)


def _unreadable(text: str) -> ConfigError:
    return ConfigError(
        f"store {text!r}: expected memory, sqlite:PATH or etcd://HOST:PORT[,HOST:PORT...]",
        field="--store",
    )
