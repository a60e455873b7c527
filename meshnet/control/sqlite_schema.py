"""How a SQLite file says what it holds: by an application id and a version."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

__all__ = ["OtherFileError", "SqliteSchema"]


class OtherFileError(Exception):
    """A file holds something else."""


@dataclass(frozen=True, slots=True)
class SqliteSchema:
    """What files of one kind hold.

    Attributes:
        application_id: of the kind; 32 bits.
        version: of the tables.
        tables: statements that make them.
    """

    application_id: int
    version: int
    tables: tuple[str, ...]

    def check(self, database: sqlite3.Connection) -> None:
        """Make the tables in a file that is empty, and look whether another one has them.

        Call it inside a transaction.

        Raises:
            OtherFileError: it has not.
        """

        def ask(statement: str) -> int:
            return int(database.execute(statement).fetchone()[0])

        application, version = ask("PRAGMA application_id"), ask("PRAGMA user_version")
        if ask("SELECT count(*) FROM sqlite_master") == 0 and application == 0:
            for statement in self.tables:
                database.execute(statement)
            database.execute(f"PRAGMA application_id = {self.application_id}")
            database.execute(f"PRAGMA user_version = {self.version}")
        elif (application, version) != (self.application_id, self.version):
            raise OtherFileError(
                f"it holds something else (application {application:#x}, version {version}; "
                f"expected {self.application_id:#x}, {self.version})"
            )
