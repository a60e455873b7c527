"""A secured mesh of processes, who attacks it, and how an attack is made and judged."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import ssl
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from google.protobuf import descriptor_pool, json_format, message_factory

from meshnet.authority import Authority
from meshnet.control.client import ControlClient
from meshnet.control.documents import Documents
from meshnet.control.grant_issuer import KIND as GRANT_KEYS
from meshnet.control.hops import to_hops
from meshnet.control.status import from_status, status_of
from meshnet.credentials import Credentials
from meshnet.grants import Grant, GrantKey, sign
from meshnet.identity import CONTROL_DNS_NAME, Identity, Role
from meshnet.membership import MembershipFolder
from meshnet.tls import TlsFiles, client_context
from meshnet.topology import Route, SessionId
from tests.control.secured import PATIENCE, make_credentials

BOUND_S = 30.0
FACES = ("grpc", "json")
MODEL = "models/stub"
LAYERS = {"alpha": (0, 1), "beta": (1, 2)}
_FIGURES = ("meshnet_sessions", "meshnet_cache_tokens_reserved", "meshnet_chunks_total")


@dataclass(frozen=True)
class Said:
    """What an attack was answered: HTTP status, or number of the gRPC code, and the reason."""

    status: int
    reason: str


UNHEARD = Said(0, "")
"""No call was heard: the connection did not come about."""


@dataclass(frozen=True)
class Granted:
    """A route, as a gateway is given it for a session."""

    session: SessionId
    hops: Route
    token: str

    @property
    def headers(self) -> dict[str, str]:
        """What opens the session at the first hop."""
        after = ",".join(f"{hop.node}@{hop.address}/{hop.layers}" for hop in self.hops[1:])
        return {
            "X-Meshnet-Grant": self.token,
            "X-Meshnet-Layers": str(self.hops[0].layers),
            "X-Meshnet-Route": after,
            "X-Meshnet-Max-Tokens": "8",
        }


class ReplicaKey:
    """A key that the control plane publishes, as that of another replica: it signs anything."""

    def __init__(self) -> None:
        self._private = Ed25519PrivateKey.generate()
        self._key = GrantKey(self._private.public_key(), int(time.time()) + 3600)

    async def publish(self, documents: Documents) -> None:
        """Have it handed to nodes."""
        public = base64.b64encode(self._key.public_bytes).decode()
        kept = json.dumps({"public_key": public, "expires_s": self._key.expires_s})
        await documents.put(GRANT_KEYS, self._key.key_id, kept.encode())

    def sign(self, grant: Grant) -> str:
        """Sign a grant."""
        return sign(grant, self._private, self._key.key_id)


@dataclass
class Mesh:
    """A control plane, nodes `alpha` and `beta`, and the gateway `front`, each a process.

    Attributes:
        folder: of the test; the control plane's state and a user's state lie below.
        http: ``host:port`` of the JSON face.
        grpc: of the gRPC face.
        nodes: of the activation plane, by name.
        gateway: URL of the OpenAI endpoint.
        key: an API key of it.
        node_token: admits nodes; its text.
        replica_key: signs what nodes take for grants.
        errors: lines that the processes wrote to standard error, by name.
    """

    folder: Path
    http: str
    grpc: str
    nodes: dict[str, str]
    gateway: str
    key: str
    node_token: str
    replica_key: ReplicaKey
    errors: Mapping[str, list[str]]

    @property
    def authority(self) -> Authority:
        """The mesh's."""
        return Authority(self.folder / "state")

    @property
    def admin(self) -> Credentials:
        """The administrator's."""
        return Credentials(MembershipFolder(self.folder / "state" / "admin").files)

    def port(self, face: str) -> str:
        """Give ``host:port`` of a face: grpc, json or, of the node `beta`, plane."""
        return {
            "grpc": self.grpc.removeprefix("grpcs://"),
            "json": self.http,
            "plane": self.nodes["beta"],
        }[face]

    def certified(self, role: Role, name: str = "mallory") -> Credentials:
        """Give a good certificate."""
        folder = self.folder / f"{role.value}-{name}"
        return make_credentials(self.authority, Identity(role, name), folder)

    def joined(self, name: str) -> Credentials:
        """Give the very files by which a node of the mesh joined, which its owner can read."""
        (folder,) = (self.folder / "user" / "members").glob(f"*.node.{name}")
        return Credentials(MembershipFolder(folder).files)

    @asynccontextmanager
    async def client(self, own: Credentials) -> AsyncIterator[ControlClient]:
        """Give an honest client of the gRPC face."""
        async with ControlClient(self.grpc, PATIENCE, own) as client:
            yield client

    async def ask_json(
        self,
        method: str,
        path: str,
        own: Credentials | None,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Ask the JSON face; gives status and parsed body."""
        url = f"https://{self.http}{path}"
        tls = client_context(self._anybody if own is None else own.files)
        async with aiohttp.ClientSession() as session:
            asked = session.request(
                method, url, ssl=tls, server_hostname=CONTROL_DNS_NAME, json=body, headers=headers
            )
            return await _answer(asked)

    async def ask_plane(
        self,
        node: str,
        method: str,
        path: str,
        own: Credentials | None,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> tuple[int, Any]:
        """Ask a node over the activation plane; gives status and body, parsed if it is JSON."""
        url = f"https://{self.nodes[node]}{path}"
        tls = client_context(self._anybody if own is None else own.files)
        tls.check_hostname = False
        async with aiohttp.ClientSession() as session:
            asked = session.request(method, url, ssl=tls, data=body, headers=headers)
            return await _answer(asked)

    @property
    def _anybody(self) -> TlsFiles:
        return TlsFiles(ca=self.folder / "state" / "control" / "ca.pem")

    async def grant(self, session: SessionId | None = None) -> Granted:
        """Have a session of the gateway `front` granted a route over both nodes."""
        session = session or SessionId(str(uuid.uuid4()))
        async with self.client(self.certified(Role.GATEWAY, "front")) as client:
            route = await client.select_route(MODEL, expected_tokens=8, session=session)
        return Granted(session, to_hops(route, tls=True), route.grant)

    async def state(self) -> dict[str, Any]:
        """Look at all that an attack could change."""
        admin, seen = self.admin, {}
        tls = client_context(admin.files)
        async with aiohttp.ClientSession() as session:
            for kind in ("nodes", "joinTokens", "members", "operators", "references"):
                url = f"https://{self.http}/v1/{kind}"
                asked = session.get(url, ssl=tls, server_hostname=CONTROL_DNS_NAME)
                status, answer = await _answer(asked)
                assert status == 200, answer
                seen[kind] = answer.get(kind, [])
        for node in seen["nodes"]:
            for passing in ("load", "heartbeatTime", "etag"):
                node.pop(passing, None)
        for node in self.nodes:
            seen[node] = await self.figures(node)
        return seen

    async def figures(self, node: str) -> dict[str, float]:
        """Look at a node's sessions and work."""
        status, text = await self.ask_plane(node, "GET", "/metrics", self.admin)
        assert status == 200, text
        lines = (line.split() for line in text.splitlines() if line[0] != "#")
        return {name: float(value) for name, value in lines if name in _FIGURES}

    @asynccontextmanager
    async def unharmed(self) -> AsyncIterator[None]:
        """See that the block changes nothing, and that the next honest request is served."""
        before = await self.state()
        yield
        assert await self.state() == before
        await self.serves()

    async def serves(self) -> None:
        """Make an honest request, through gateway, control plane and both nodes."""
        status, answer = await self.ask_gateway(
            {"prompt": "123", "max_tokens": 2, "temperature": 0}
        )
        assert status == 200, answer
        assert answer["usage"]["completion_tokens"] == 2

    async def ask_gateway(
        self,
        body: Mapping[str, Any] | bytes,
        *,
        path: str = "/v1/completions",
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Ask the OpenAI endpoint; `key` is the client's own unless said."""
        sent = {"Content-Type": "application/json", **(headers or {})}
        sent.setdefault("Authorization", f"Bearer {self.key if key is None else key}")
        data = body if isinstance(body, bytes) else json.dumps({"model": "stub", **body}).encode()
        async with aiohttp.ClientSession() as session:
            url = f"{self.gateway}{path}"
            asked = session.post(url, data=io.BytesIO(data), headers=sent)
            return await _answer(asked)


@dataclass(frozen=True)
class Call:
    """A call of the control plane, on either face.

    Attributes:
        method: ``Service/Method``.
        request: the message as JSON.
        http: the same on the JSON face: method and path.
        body: on the JSON face; None for none.
    """

    method: str
    request: Mapping[str, Any]
    http: tuple[str, str]
    body: Any = None

    async def on(
        self,
        face: str,
        mesh: Mesh,
        own: Credentials | None,
        headers: Mapping[str, str] | None = None,
    ) -> Said:
        """Make it; gives the answer, status 0 where no call was heard."""
        try:
            return await (self._grpc if face == "grpc" else self._json)(mesh, own, headers or {})
        except (aiohttp.ClientConnectionError, ssl.SSLError):
            return UNHEARD

    async def _json(self, mesh: Mesh, own: Credentials | None, headers: Mapping[str, str]) -> Said:
        status, answer = await mesh.ask_json(*self.http, own, self.body, headers)
        return Said(status, reason_of(answer))

    async def _grpc(self, mesh: Mesh, own: Credentials | None, headers: Mapping[str, str]) -> Said:
        pem = None if own is None else own.pem()
        ca = (mesh.folder / "state" / "control" / "ca.pem").read_bytes()
        tls = (
            grpc.ssl_channel_credentials(ca)
            if pem is None
            else grpc.ssl_channel_credentials(ca, pem.key, pem.chain)
        )
        options = (("grpc.ssl_target_name_override", CONTROL_DNS_NAME),)
        address = mesh.grpc.removeprefix("grpcs://")
        request = _message(f"meshnet.v1.{self.method.split('/')[1]}Request")
        json_format.ParseDict(self.request, request)
        async with grpc.aio.secure_channel(address, tls, options) as channel:
            metadata = tuple((name.lower(), value) for name, value in headers.items())
            call = channel.unary_unary(f"/meshnet.v1.{self.method}")
            try:
                await call(request.SerializeToString(), timeout=BOUND_S, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                code, _ = error.code().value
                if error.code() is grpc.StatusCode.UNAVAILABLE:
                    return UNHEARD
                status = status_of(code, error.details() or "", error.trailing_metadata())
                return Said(code, from_status(status).reason or "")
        return Said(200, "")


def end_of(own: Credentials) -> float:
    """Tell when a certificate ends, seconds since 1970."""
    return x509.load_pem_x509_certificate(own.pem().chain).not_valid_after_utc.timestamp()


def reason_of(answer: Any) -> str:
    """Give the reason of an error: of a Status in JSON, of problem details, of OpenAI's shape."""
    if not isinstance(answer, dict):
        return ""
    if "details" in answer:
        return str(answer["details"][0]["reason"])
    if "error" in answer:
        return str(answer["error"]["code"])
    return str(answer.get("reason", answer.get("code", "")))


def _message(name: str) -> Any:
    found = descriptor_pool.Default().FindMessageTypeByName(name)
    return message_factory.GetMessageClass(found)()


async def _answer(asked: AbstractAsyncContextManager[aiohttp.ClientResponse]) -> tuple[int, Any]:
    async with asyncio.timeout(BOUND_S), asked as answer:
        text = await answer.text(errors="replace")
        return answer.status, json.loads(text) if answer.content_type.endswith("json") else text
