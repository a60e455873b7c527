"""Small records that outlive a process and that replicas share: tokens, keys, references.

They are few, and read whole; the registry of nodes is not kept here.
"""

from __future__ import annotations

import itertools
import re
from typing import Final, NamedTuple, Protocol

from meshnet.errors import Code, MeshError

__all__ = [
    "MAX_DOCUMENT_BYTES",
    "Document",
    "Documents",
    "MemoryDocuments",
    "check_document",
    "conflict",
    "put_if_unchanged",
]

MAX_DOCUMENT_BYTES: Final = 1 << 20

_KIND: Final = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_KEY: Final = re.compile(r"[!-~]{1,256}")


class Document(NamedTuple):
    """One record.

    Attributes:
        key: unique in its kind; 1 to 256 printable characters of ASCII, no spaces.
        value: at most `MAX_DOCUMENT_BYTES`.
        revision: grows with each change of any record; above 0.
    """

    key: str
    value: bytes
    revision: int


class Documents(Protocol):
    """Where records are kept; where that is away, methods raise MeshError UNAVAILABLE.

    One who opens a store sees at once what another one wrote, in this process or not.
    """

    async def open(self) -> None:
        """Open the store, once, before all else."""
        ...

    async def close(self) -> None:
        """Free everything."""
        ...

    async def get(self, kind: str, key: str) -> Document | None:
        """Give one record, as last written by anyone."""
        ...

    async def list(self, kind: str) -> list[Document]:
        """Give all records of a kind, in order of key."""
        ...

    async def put(self, kind: str, key: str, value: bytes, *, expected: int | None = None) -> int:
        """Write a record; gives its new revision.

        Args:
            kind: as ``join-tokens``; 1 to 63 of ``a-z0-9-``.
            key: of the record.
            value: of the record.
            expected: only if this is its revision; 0 if there is to be none yet; None
                in any case.

        Raises:
            MeshError: ABORTED (reason CONFLICT), it is not as expected; INVALID_ARGUMENT,
                kind, key or value is out of bounds; UNAVAILABLE, it may have been written
                nevertheless.
        """
        ...

    async def delete(self, kind: str, key: str) -> bool:
        """Delete a record; tells whether there was one."""
        ...


class MemoryDocuments:
    """Records that end with the process."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, str], Document] = {}
        self._revisions = itertools.count(1)

    async def open(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    async def get(self, kind: str, key: str) -> Document | None:
        """Give one record."""
        return self._kept.get((kind, key))

    async def list(self, kind: str) -> list[Document]:
        """Give all records of a kind, in order of key."""
        return [self._kept[found] for found in sorted(self._kept) if found[0] == kind]

    async def put(self, kind: str, key: str, value: bytes, *, expected: int | None = None) -> int:
        """Write a record; gives its new revision.

        Raises:
            MeshError: ABORTED, it is not as expected; INVALID_ARGUMENT.
        """
        check_document(kind, key, value)
        had = self._kept.get((kind, key))
        if expected is not None and expected != (0 if had is None else had.revision):
            raise conflict(kind, key)
        revision = next(self._revisions)
        self._kept[kind, key] = Document(key, value, revision)
        return revision

    async def delete(self, kind: str, key: str) -> bool:
        """Delete a record; tells whether there was one."""
        return self._kept.pop((kind, key), None) is not None


async def put_if_unchanged(
    documents: Documents, kind: str, key: str, value: bytes, expected: int
) -> bool:
    """Write a record that still has this revision, 0 for none yet; tells whether it had.

    Raises:
        MeshError: as `Documents.put` but for ABORTED.
    """
    try:
        await documents.put(kind, key, value, expected=expected)
    except MeshError as error:
        if error.code is not Code.ABORTED:
            raise
        return False
    return True


def check_document(kind: str, key: str, value: bytes) -> None:
    """Check what is to be written.

    Raises:
        MeshError: INVALID_ARGUMENT, naming what is out of bounds.
    """
    if not _KIND.fullmatch(kind):
        raise _invalid("kind", f"{kind[:80]!r}; expected 1 to 63 of a-z, 0-9 and -")
    if not _KEY.fullmatch(key):
        raise _invalid("key", f"{key[:80]!r}; expected 1 to 256 printable ASCII characters")
    if len(value) > MAX_DOCUMENT_BYTES:
        raise _invalid("value", f"{len(value)} bytes; expected at most {MAX_DOCUMENT_BYTES}")


def conflict(kind: str, key: str) -> MeshError:
    """Give the error for a record that is not as its writer expected."""
    return MeshError(Code.ABORTED, f"{kind} {key!r} was changed meanwhile", reason="CONFLICT")


def _invalid(field: str, message: str) -> MeshError:
    return MeshError(Code.INVALID_ARGUMENT, f"document {field}: {message}", field=field)
