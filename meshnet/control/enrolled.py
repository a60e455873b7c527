"""A process that joined by a token: its credentials, kept good for as long as it runs."""

from __future__ import annotations

import time
from collections.abc import Callable

from meshnet.control.joining import join, renew
from meshnet.control.renewal import Due, Renewal
from meshnet.credentials import Credentials
from meshnet.identity import Role
from meshnet.join import JoinText
from meshnet.membership import Membership, MembershipFolder

__all__ = ["Enrolled"]


class Enrolled:
    """Somebody who has joined: `enroll`, then `start`, until `close`.

    Args:
        token: that admitted it, and admits it again if it was away until its certificate
            ended.
        name: of it.
        folder: keeps what joining gave.
        membership: what joining gave.
        wall_clock: seconds since 1970.

    Raises:
        ConfigError: a file of the folder cannot be used, naming it.
    """

    def __init__(
        self,
        token: JoinText,
        name: str,
        folder: MembershipFolder,
        membership: Membership,
        *,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.membership = membership
        self.credentials = Credentials(folder.files)
        self._token = token
        self._name = name
        self._folder = folder
        self._wall_clock = wall_clock
        self._renewal = Renewal(
            name, self._due(membership), self._again, self.credentials.reload, wall_clock=wall_clock
        )

    @classmethod
    async def enroll(
        cls, token: JoinText, name: str, folder: MembershipFolder, role: Role | None = None
    ) -> Enrolled:
        """Join, or go on with what an earlier process of the same name and token was given.

        Args:
            token: from an operator.
            name: wished.
            folder: keeps what joining gives.
            role: that the token is to be for; None for any.

        Raises:
            MeshError: as `join`.
            ConfigError: a file of the folder cannot be used, naming it.
        """
        return cls(token, name, folder, await join(token, name, folder, role))

    def start(self) -> None:
        """Begin to renew the certificate at half of its life."""
        self._renewal.start()

    async def close(self) -> None:
        """Stop to renew; what the folder keeps stays."""
        await self._renewal.close()

    async def _again(self) -> Due:
        if self._folder.expire_s() > self._wall_clock():
            return self._due(await renew(self._folder))
        joined = await join(self._token, self._name, self._folder, wall_clock=self._wall_clock)
        return self._due(joined)

    def _due(self, membership: Membership) -> Due:
        return Due(membership.renew_s, self._folder.expire_s())
