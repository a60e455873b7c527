"""Where a registry and its documents are kept, as operators write it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from meshnet.control.documents import Documents, MemoryDocuments
from meshnet.control.etcd.documents import EtcdDocuments
from meshnet.control.etcd.store import EtcdStore
from meshnet.control.etcd.url import read_etcd_url, unreadable
from meshnet.control.registry import Store
from meshnet.control.sqlite_documents import SqliteDocuments
from meshnet.control.sqlite_journal import SqliteJournal
from meshnet.control.store import MemoryStore

__all__ = ["make_documents", "make_store"]

_SQLITE: Final = "sqlite:"


def make_store(text: str, clock: Callable[[], float], forget_after_s: float) -> Store:
    """Make the store that `text` names; it is not opened yet.

    Args:
        text: ``memory``, ``sqlite:PATH``, ``etcd://HOST:PORT[,HOST:PORT...]``, or with TLS
            ``etcds://HOST:PORT[,HOST:PORT...][?ca=FILE][&cert=FILE&key=FILE]``.
        clock: monotonic seconds.
        forget_after_s: seconds for which a LOST node is still listed.

    Raises:
        ConfigError: `text` is none of these.
    """
    if text == "memory":
        return MemoryStore(clock, time.time, forget_after_s=forget_after_s)
    if path := _sqlite_path(text):
        return MemoryStore(
            clock, time.time, forget_after_s=forget_after_s, journal=SqliteJournal(path)
        )
    etcd = read_etcd_url(text)
    return EtcdStore(etcd.addresses, time.time, forget_after_s=forget_after_s, tls=etcd.tls)


def make_documents(text: str) -> Documents:
    """Make the documents beside the registry that `text` names; they are not opened yet.

    Documents of ``sqlite:PATH`` are in a file of their own, ``PATH-documents``: a control
    plane holds the registry's file alone, while documents are for other processes too.

    Args:
        text: as of `make_store`.

    Raises:
        ConfigError: `text` is no store.
    """
    if text == "memory":
        return MemoryDocuments()
    if path := _sqlite_path(text):
        return SqliteDocuments(path.with_name(f"{path.name}-documents"))
    return EtcdDocuments(*read_etcd_url(text))


def _sqlite_path(text: str) -> Path | None:
    """Read ``sqlite:PATH``; None for another store."""
    if not text.startswith(_SQLITE) or text == _SQLITE:
        return None
    path = Path(text.removeprefix(_SQLITE)).expanduser()
    if not path.name:
        raise unreadable(text)
    return path
