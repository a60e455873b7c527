"""Nodes kept in a SQLite file, so that they outlive a restart of the control plane."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final

from google.protobuf.message import DecodeError

from meshnet.control.sqlite_schema import OtherFileError, SqliteSchema
from meshnet.errors import Code, ConfigError, MeshError
from meshnet.internal.store.v1 import record_pb2
from meshnet.topology import NodeId

__all__ = ["SqliteJournal"]

_SCHEMA: Final = SqliteSchema(
    application_id=0x6D657368,  # "mesh"
    version=1,
    tables=(
        "CREATE TABLE nodes (id TEXT PRIMARY KEY, record BLOB NOT NULL) WITHOUT ROWID",
        "CREATE TABLE registry (revision INTEGER NOT NULL)",
        "INSERT INTO registry VALUES (0)",
    ),
)


class SqliteJournal:
    """A file of nodes, held by one control plane at a time.

    Writes are on the disk when they return; they are as rare as changes of a node's state.

    Args:
        path: the file; made if it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._database: sqlite3.Connection | None = None

    def open(self) -> tuple[dict[NodeId, record_pb2.NodeRecord], int]:
        """Open the file, alone; gives the nodes kept and the revision of the last change.

        Raises:
            ConfigError: it cannot be opened, is in use, or is no file of this kind.
        """
        try:
            database = sqlite3.connect(self._path, isolation_level=None, timeout=0.5)
        except sqlite3.Error as error:
            raise self._refused(str(error)) from None
        try:
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
            with database:
                database.execute("BEGIN")
                _SCHEMA.check(database)
            rows = database.execute("SELECT id, record FROM nodes").fetchall()
            (revision,) = database.execute("SELECT revision FROM registry").fetchone()
            nodes = {
                NodeId(node_id): record_pb2.NodeRecord.FromString(record)
                for node_id, record in rows
            }
        except (sqlite3.Error, OtherFileError, DecodeError, TypeError) as error:
            database.close()
            is_busy = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY
            raise self._refused(
                "another control plane uses it" if is_busy else str(error)
            ) from None
        self._database = database
        return nodes, int(revision)

    def put(self, node_id: NodeId, stored: record_pb2.NodeRecord, revision: int) -> None:
        """Keep a node.

        Raises:
            MeshError: UNAVAILABLE, the file cannot be written; the node is kept as before.
        """
        record = stored.SerializeToString()
        self._write("INSERT OR REPLACE INTO nodes VALUES (?, ?)", (node_id, record), revision)

    def delete(self, node_id: NodeId, revision: int) -> None:
        """Keep a node no more.

        Raises:
            MeshError: UNAVAILABLE, the file cannot be written; the node is kept still.
        """
        self._write("DELETE FROM nodes WHERE id = ?", (node_id,), revision)

    def close(self) -> None:
        """Close the file."""
        database, self._database = self._database, None
        if database is not None:
            database.close()

    def _write(self, statement: str, values: tuple[str | bytes, ...], revision: int) -> None:
        if self._database is None:
            raise self._unwritten("it is closed")
        try:
            with self._database:  # commits, or rolls back what was begun
                self._database.execute("BEGIN")
                self._database.execute(statement, values)
                self._database.execute("UPDATE registry SET revision = ?", (revision,))
        except sqlite3.Error as error:
            raise self._unwritten(str(error)) from None

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"cannot keep nodes in {str(self._path)!r}: {why}", field="--store")

    def _unwritten(self, why: str) -> MeshError:
        return MeshError(
            Code.UNAVAILABLE,
            f"cannot write to {str(self._path)!r}: {why}",
            reason="STORE_UNAVAILABLE",
            retry_after_s=1.0,
        )
