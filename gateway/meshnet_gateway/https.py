"""HTTPS for clients, with files that are read anew when they change.

Whoever renews a certificate (certbot, a secret that is mounted) replaces files and restarts
nobody, or tells it by a signal that each server has its own of. So the files are looked at now
and then, which needs neither; connections that are open go on with what they began with.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import Final

from meshnet.errors import ConfigError
from meshnet.tasks import Background
from meshnet.tls import TlsFiles, server_context

__all__ = ["Https"]

_LOOK_S: Final = 10.0

_log = logging.getLogger(__name__)

_Stamp = tuple[tuple[int, int, int], ...]


class Https(Background):
    """Certificate and key in use: `start`, until `close`.

    Attributes:
        listening: for a listener, which keeps it; each handshake uses the files read last.

    Args:
        files: certificate and key.

    Raises:
        ConfigError: one is missing, unreadable or not what it is to be, naming flag and file.
    """

    def __init__(self, files: TlsFiles) -> None:
        super().__init__()
        self._files = files
        self._read: _Stamp | None = _stamp(files)
        self._refused: tuple[_Stamp | None, str] = None, ""
        self._current = server_context(files)
        self.listening = server_context(files)

        # OpenSSL calls it in every handshake, with or without a server name.
        def use_current(
            connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext
        ) -> None:
            connection.context = self._current

        self.listening.sni_callback = use_current

    def look(self) -> bool:
        """Read the files again if they changed; tells whether others are in use now.

        A pair that cannot be used, as where one of the two is not replaced yet, is logged once
        and looked at again; the one before stays in use.
        """
        # Before they are read: what changes meanwhile is seen the next time.
        stamp = _stamp(self._files)
        if stamp == self._read:
            return False
        try:
            self._current = server_context(self._files)
        except ConfigError as error:
            if self._refused != (stamp, error.message):
                self._refused = stamp, error.message
                _log.warning("the certificate in use stays, the new one cannot be: %s", error)
            return False
        self._read = stamp
        _log.info("%s is read anew", self._files.certificate)
        return True

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_S)
            await asyncio.to_thread(self.look)


def _stamp(files: TlsFiles) -> _Stamp | None:
    """Tell what the files are by what changes with them; None where one is not there."""
    try:
        found = [path.stat() for path in (files.certificate, files.key) if path is not None]
    except OSError:
        return None
    return tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in found)
