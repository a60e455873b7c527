"""Header fields in fuzzed bytes and in seeds: one ``name: value`` a line."""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["read_fields", "write_fields"]


def read_fields(data: bytes) -> list[tuple[str, str]]:
    """Read lines as header fields; bytes are latin-1, as HTTP's are here."""
    lines = data.decode("latin-1").split("\n")
    return [(name, value) for name, _, value in (line.partition(": ") for line in lines)]


def write_fields(fields: Iterable[tuple[str, str]]) -> bytes:
    """Write header fields as `read_fields` reads them."""
    text = "\n".join(f"{name}: {value}" for name, value in fields)
    return text.encode("latin-1", "replace")
