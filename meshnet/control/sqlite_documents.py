"""Documents in a SQLite file that several processes of one machine use at a time."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from meshnet.control.documents import Document, check_document, conflict
from meshnet.control.sqlite_schema import OtherFileError, SqliteSchema
from meshnet.errors import Code, ConfigError, MeshError

__all__ = ["SqliteDocuments"]

BUSY_S: Final = 5.0
"""How long a call waits for another process that writes."""

_SCHEMA: Final = SqliteSchema(
    application_id=0x6D657364,  # "mesd"
    version=1,
    tables=(
        """CREATE TABLE documents (
            kind TEXT NOT NULL, key TEXT NOT NULL, value BLOB NOT NULL, revision INTEGER NOT NULL,
            PRIMARY KEY (kind, key)
        ) WITHOUT ROWID""",
        "CREATE TABLE state (revision INTEGER NOT NULL)",
        "INSERT INTO state VALUES (0)",
    ),
)
_RETRY_S: Final = 0.02

_T = TypeVar("_T")


class SqliteDocuments:
    """Records in a file; only its owner may read it.

    A write is on the disk when its call returns. Calls run one after the other in a thread of
    this object, so that a disk or another process that is slow holds up nobody else.

    Args:
        path: the file; made if it is missing.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._database: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="documents")

    async def open(self) -> None:
        """Open the file.

        Raises:
            ConfigError: it cannot be opened, or is no file of this kind.
        """
        await self._run(self._open)

    async def close(self) -> None:
        """Close the file, after the calls under way."""
        await self._run(self._close)
        self._thread.shutdown(wait=False)

    async def get(self, kind: str, key: str) -> Document | None:
        """Give one record."""

        def read(database: sqlite3.Connection) -> Document | None:
            found = database.execute(
                "SELECT key, value, revision FROM documents WHERE kind = ? AND key = ?",
                (kind, key),
            ).fetchone()
            return None if found is None else Document(*found)

        return await self._call(read)

    async def list(self, kind: str) -> list[Document]:
        """Give all records of a kind, in order of key."""

        def read(database: sqlite3.Connection) -> list[Document]:
            rows = database.execute(
                "SELECT key, value, revision FROM documents WHERE kind = ? ORDER BY key", (kind,)
            )
            return [Document(*row) for row in rows]

        return await self._call(read)

    async def put(self, kind: str, key: str, value: bytes, *, expected: int | None = None) -> int:
        """Write a record; gives its new revision.

        Raises:
            MeshError: ABORTED, it is not as expected; INVALID_ARGUMENT; UNAVAILABLE.
        """
        check_document(kind, key, value)

        def write(database: sqlite3.Connection) -> int:
            if expected is not None:
                found = database.execute(
                    "SELECT revision FROM documents WHERE kind = ? AND key = ?", (kind, key)
                ).fetchone()
                if expected != (0 if found is None else found[0]):
                    raise conflict(kind, key)
            revision = _next_revision(database)
            database.execute(
                "INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?)",
                (kind, key, value, revision),
            )
            return revision

        return await self._call(lambda database: _in_transaction(database, write))

    async def delete(self, kind: str, key: str) -> bool:
        """Delete a record; tells whether there was one."""

        def write(database: sqlite3.Connection) -> bool:
            _next_revision(database)
            deleted = database.execute(
                "DELETE FROM documents WHERE kind = ? AND key = ?", (kind, key)
            )
            return deleted.rowcount > 0

        return await self._call(lambda database: _in_transaction(database, write))

    async def _call(self, use: Callable[[sqlite3.Connection], _T]) -> _T:
        def run() -> _T:
            if self._database is None:
                raise self._unavailable("it is closed")
            try:
                return use(self._database)
            except sqlite3.Error as error:
                raise self._unavailable(str(error)) from None

        return await self._run(run)

    async def _run(self, use: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, use)

    def _open(self) -> None:
        try:
            # Made here, not by SQLite: nobody else may read it, nor the files beside it, which
            # take its mode.
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            database = sqlite3.connect(self._path, isolation_level=None, timeout=BUSY_S)
        except (OSError, sqlite3.Error) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise self._refused(why) from None
        try:
            _in_transaction(database, _SCHEMA.check)
            _use_wal(database)
            database.execute("PRAGMA synchronous = FULL")
        except (sqlite3.Error, OtherFileError) as error:
            database.close()
            raise self._refused(str(error)) from None
        self._database = database

    def _close(self) -> None:
        database, self._database = self._database, None
        if database is not None:
            database.close()

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(f"cannot keep documents in {str(self._path)!r}: {why}", field="--store")

    def _unavailable(self, why: str) -> MeshError:
        return MeshError(
            Code.UNAVAILABLE,
            f"documents in {str(self._path)!r}: {why}",
            reason="STORE_UNAVAILABLE",
            retry_after_s=1.0,
        )


def _use_wal(database: sqlite3.Connection) -> None:
    """Change to a write-ahead log, for which SQLite does not wait by itself where it is in use."""
    give_up_s = time.monotonic() + BUSY_S
    while True:
        try:
            database.execute("PRAGMA journal_mode = WAL")
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > give_up_s:
                raise
            time.sleep(_RETRY_S)
        else:
            return


def _in_transaction(database: sqlite3.Connection, write: Callable[[sqlite3.Connection], _T]) -> _T:
    with database:  # commits, or rolls back what was begun
        database.execute("BEGIN IMMEDIATE")
        return write(database)


def _next_revision(database: sqlite3.Connection) -> int:
    database.execute("UPDATE state SET revision = revision + 1")
    return int(database.execute("SELECT revision FROM state").fetchone()[0])
