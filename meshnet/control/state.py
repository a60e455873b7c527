"""The state directory of a control plane that knows its callers.

It holds the authority, the control plane's own certificate, and those of a gateway in the same
process and of the operator of this machine, who need no token: whoever can read the directory
has the authority's key anyway.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from meshnet.authority import DEFAULT_LIFE_S, Authority
from meshnet.credentials import Credentials
from meshnet.errors import MeshError
from meshnet.identity import Identity, Role
from meshnet.membership import MembershipFolder
from meshnet.tasks import Background

__all__ = ["ADMIN_FOLDER", "ControlState"]

ADMIN_FOLDER: Final = "admin"
_CONTROL_FOLDER: Final = "control"
_GATEWAY_FOLDER: Final = "gateway"
_DOCUMENTS_FILE: Final = "documents.sqlite"
_LOOK_S: Final = 1.0
_NAME: Final = "local"

_log = logging.getLogger(__name__)


class ControlState(Background):
    """A state directory in use: `start` keeps what is in it good, until `close`.

    Attributes:
        credentials: the control plane's own.
        gateway: of a gateway in the same process.

    Args:
        folder: made where there is none, with a new authority.
        life_s: how long certificates are good.
        hosts: DNS names and addresses that clients without a certificate reach this control
            plane at, for the certificate of the JSON face.
        wall_clock: seconds since 1970.

    Raises:
        ConfigError: the directory or a file in it cannot be used, naming it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        life_s: float = DEFAULT_LIFE_S,
        hosts: Sequence[str] = (),
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self.folder = folder
        self.authority = Authority(folder, life_s=life_s, wall_clock=wall_clock)
        self._own = MembershipFolder(folder / _CONTROL_FOLDER)
        self._gateway = MembershipFolder(folder / _GATEWAY_FOLDER)
        self._admin = MembershipFolder(folder / ADMIN_FOLDER)
        self._hosts = tuple(dict.fromkeys(hosts))
        self._wall_clock = wall_clock
        self._certify()
        self.credentials = Credentials(self._own.files)
        self.gateway = Credentials(self._gateway.files)

    @property
    def documents_url(self) -> str:
        """Where tokens and members are kept if the store ends with the process."""
        return f"sqlite:{self.folder / _DOCUMENTS_FILE}"

    def follow(self) -> None:
        """Have certificates of the authority as it is now; they are also renewed when due.

        Raises:
            MeshError: a file cannot be used, naming it.
        """
        is_due = self._wall_clock() >= self._renew_s
        if is_due or self.authority.bundle_pem != self._bundle_pem:
            self._certify()
            self.credentials.reload()
            self.gateway.reload()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK_S, self.authority.life_s / 20))
            try:
                self.follow()
            except MeshError as error:
                _log.error("the certificates in %s are not renewed: %s", self.folder, error)

    def _certify(self) -> None:
        """Issue all certificates anew."""
        for identity, folder, hosts in (
            (Identity(Role.CONTROL, _NAME), self._own, self._hosts),
            (Identity(Role.GATEWAY, _NAME), self._gateway, ()),
            (Identity(Role.ADMIN, _NAME), self._admin, ()),
        ):
            issued = self.authority.issue(identity, folder.key().public_key(), hosts)
            folder.keep_certificate(issued.chain_pem, issued.bundle_pem)
            self._renew_s, self._bundle_pem = issued.renew_s, issued.bundle_pem
