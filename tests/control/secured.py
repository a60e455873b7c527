"""A control plane that knows its callers, with credentials for every role."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from meshnet.authority import Authority
from meshnet.certificates import make_key, pem_of_key
from meshnet.control.app import Addresses, ControlServer
from meshnet.control.client import ClientSettings, ControlClient
from meshnet.control.settings import ControlSettings
from meshnet.credentials import Credentials
from meshnet.identity import CONTROL_DNS_NAME, Identity, Role
from meshnet.tls import TlsFiles, client_context, files_in

PATIENCE = ClientSettings(timeout_s=20.0, attempt_timeout_s=10.0, backoff_s=0.01)
HASTE = ClientSettings(timeout_s=0.2, attempt_timeout_s=10.0)


def make_credentials(authority: Authority, identity: Identity, folder: Path) -> Credentials:
    """Write what somebody of a mesh has."""
    write_credentials(authority, identity, folder)
    return Credentials(files_in(folder))


def write_credentials(authority: Authority, identity: Identity, folder: Path) -> None:
    """Write a key and its certificate, over those that are there."""
    key = make_key()
    issued = authority.issue(identity, key.public_key(), ())
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "key.pem").write_bytes(pem_of_key(key))
    (folder / "cert.pem").write_text(issued.chain_pem)
    (folder / "ca.pem").write_text(issued.bundle_pem)


@dataclass
class Secured:
    """A running control plane and its authority."""

    folder: Path
    authority: Authority
    server: ControlServer
    addresses: Addresses

    def credentials(self, role: Role, name: str = "ann") -> Credentials:
        """Give new credentials of a role."""
        identity = Identity(role, name)
        folder = self.folder / f"{role.value}-{name}"
        return make_credentials(self.authority, identity, folder)

    @asynccontextmanager
    async def client(
        self, credentials: Credentials | None, settings: ClientSettings = PATIENCE
    ) -> AsyncIterator[ControlClient]:
        """Give a client of the gRPC face."""
        async with ControlClient(self.addresses.grpc, settings, credentials) as client:
            yield client

    async def json(
        self,
        method: str,
        path: str,
        credentials: Credentials | None = None,
        token: str | None = None,
        headers: dict[str, str] | None = None,
        **kwargs: Any,
    ) -> tuple[int, Any]:
        """Ask the JSON face; gives the status and the body, parsed if it is JSON."""
        anonymous = TlsFiles(ca=self.folder / "control" / "ca.pem")
        tls = client_context(anonymous if credentials is None else credentials.files)
        sent = {} if token is None else {"Authorization": f"Bearer {token}"}
        async with (
            aiohttp.ClientSession() as session,
            session.request(
                method,
                f"https://{self.addresses.http}{path}",
                ssl=tls,
                server_hostname=CONTROL_DNS_NAME,
                headers={**sent, **(headers or {})},
                **kwargs,
            ) as response,
        ):
            if response.content_type == "application/json":
                return response.status, await response.json()
            return response.status, await response.text()


@asynccontextmanager
async def secured(folder: Path, **settings: Any) -> AsyncIterator[Secured]:
    """Run a control plane that knows its callers."""
    server = ControlServer(
        ControlSettings(http_port=0, grpc_port=0, close_grace_s=0.2, state=folder, **settings)
    )
    addresses = await server.start()
    try:
        yield Secured(folder, Authority(folder), server, addresses)
    finally:
        await server.close()
