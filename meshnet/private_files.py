"""Files that only their owner may read: keys, and what is kept beside them."""

from __future__ import annotations

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from meshnet.errors import ConfigError

__all__ = ["make_private_dir", "read_private", "write_private"]

_OTHERS = stat.S_IRWXG | stat.S_IRWXO


def make_private_dir(folder: Path) -> None:
    """Make a directory for its owner alone (0700) where there is none yet.

    Raises:
        ConfigError: it cannot be made, naming it.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}", field=str(folder)) from None


def write_private(path: Path, data: bytes, *, keep: bool = False) -> None:
    """Write a file of mode 0600 whole: who reads meanwhile reads the old one.

    Args:
        path: of the file.
        data: all of it.
        keep: leave a file that is there as it is, also one that another process makes now.

    Raises:
        ConfigError: it cannot be written, naming it.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if keep:
                with suppress(FileExistsError):
                    os.link(name, path)
            else:
                Path(name).replace(path)
        finally:
            with suppress(FileNotFoundError):
                Path(name).unlink()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", field=str(path)) from None


def read_private(path: Path, max_bytes: int) -> bytes | None:
    """Read a file that only its owner may read; None where there is none.

    Raises:
        ConfigError: others may read it, it is larger than `max_bytes`, or it cannot be read.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & _OTHERS:
                raise ConfigError(
                    f"{path} holds a secret that others may read; say: chmod 600 {path}",
                    field=str(path),
                )
            data = file.read(max_bytes + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}", field=str(path)) from None
    if len(data) > max_bytes:
        raise ConfigError(f"{path}: expected at most {max_bytes} bytes", field=str(path))
    return data
