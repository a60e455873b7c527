"""A mesh that knows its members: joined by tokens, through renewals and a rotation under load."""

from __future__ import annotations

import asyncio
import json
import stat
import time
import urllib.request
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from cryptography import x509
from typer.testing import CliRunner

from meshnet.authority import Authority
from meshnet.cli import control as control_commands
from meshnet.compression import CompressionPolicies
from meshnet.control.app import ControlServer
from meshnet.control.client import ControlClient
from meshnet.control.enrolled import Enrolled
from meshnet.control.settings import ControlSettings
from meshnet.credentials import Credentials
from meshnet.join import JoinText
from meshnet.membership import MembershipFolder
from meshnet.topology import LayerRange, NodeId
from meshnet.v1 import enrollment_service_pb2 as pb
from meshnet_gateway.app import Gateway, GatewaySettings
from meshnet_gateway.model_text import ModelText
from meshnet_node.app import Node
from meshnet_node.heartbeat import Heartbeat, Registration
from meshnet_node.settings import NodeSettings
from meshnet_node.stub import StubBackend
from tests.e2e.commands import meshnet, meshnet_json, running
from tests.gateway.fakes import write_model

POLICIES = CompressionPolicies()
LIFE_S = 6.0
OVERLAP_S = 9.0


class Paced(StubBackend):
    """A shard that takes as long for a step as is said at the time."""

    def __init__(self, step_s: Callable[[], float], *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._step_s = step_s

    def forward(self, *arguments: Any, **options: Any) -> Any:
        time.sleep(self._step_s())
        return super().forward(*arguments, **options)


class Mesh:
    """A control plane with a state directory, and those who joined it, in this process."""

    def __init__(self, stack: AsyncExitStack, folder: Path) -> None:
        self.members: list[Enrolled] = []
        self.nodes: dict[str, Node] = {}
        self.step_s = 0.0
        self._heartbeats: dict[str, Heartbeat] = {}
        self._stack = stack
        self._folder = folder
        settings = ControlSettings(
            http_port=0,
            grpc_port=0,
            state=folder / "state",
            certificate_life_s=LIFE_S,
            require_probe=False,
        )
        self._server = ControlServer(settings)
        self._grpc = ""

    async def start(self) -> None:
        addresses = self._server.urls(await self._server.start())
        self._stack.push_async_callback(self._server.close)
        self._grpc = addresses.grpc

    async def join(self, role: pb.Role, name: str) -> Enrolled:
        admin = Credentials(MembershipFolder(self._folder / "state" / "admin").files)
        async with ControlClient(self._grpc, credentials=admin) as client:
            made = await client.create_join_token(pb.JoinToken(role=role, max_uses=1))
        public, _, secret = made.token.partition(".")
        token = JoinText(public, secret, made.ca_spki_sha256, tuple(made.http_addresses))
        enrolled = await Enrolled.enroll(token, name, MembershipFolder(self._folder / name))
        enrolled.start()
        self._stack.push_async_callback(enrolled.close)
        self.members.append(enrolled)
        return enrolled

    async def add_node(self, name: str, first: int, end: int) -> Node:
        enrolled = await self.join(pb.ROLE_NODE, name)
        tls = enrolled.credentials
        backend = Paced(
            lambda: self.step_s,
            LayerRange(first, end),
            hidden_size=8,
            num_layers=2,
            head=True,
            vocab_size=300,
        )
        node = Node(
            NodeSettings(NodeId(name), port=0, grace_s=1.0, tls=tls), lambda: backend, POLICIES
        )
        self.nodes[name] = node
        self._stack.push_async_callback(node.close)
        address = await node.listen()
        registration = Registration(NodeId(name), backend.spec, address, "", tls=tls)
        heartbeat = Heartbeat(enrolled.membership.control_url, registration, node)
        await heartbeat.start()
        self._heartbeats[name] = heartbeat
        self._stack.push_async_callback(heartbeat.close)
        await node.load()
        await heartbeat.beat()
        return node

    async def lose(self, name: str) -> None:
        """End a node whose sessions are not warned of it."""
        await self.nodes[name].close()
        await self._heartbeats[name].close()

    async def drain(self, name: str) -> None:
        """Have a node left, as an operator does."""
        admin = Credentials(MembershipFolder(self._folder / "state" / "admin").files)
        async with ControlClient(self._grpc, credentials=admin) as client:
            await client.drain(NodeId(name), grace_s=60.0, reason="a test")

    async def add_gateway(self, text: ModelText) -> str:
        enrolled = await self.join(pb.ROLE_GATEWAY, "front")
        settings = GatewaySettings(
            port=0,
            control_url=enrolled.membership.control_url,
            tls=enrolled.credentials,
            grace_s=1.0,
        )
        gateway = Gateway(settings, {"stub": text}, POLICIES)
        self._stack.push_async_callback(gateway.close)
        return await gateway.start()


@asynccontextmanager
async def mesh_of_two(folder: Path, text: ModelText) -> AsyncIterator[tuple[Mesh, str]]:
    async with AsyncExitStack() as stack:
        mesh = Mesh(stack, folder)
        await mesh.start()
        await mesh.add_node("alpha", 0, 1)
        await mesh.add_node("beta", 1, 2)
        yield mesh, await mesh.add_gateway(text)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("text"))


async def until(condition, within_s: float = 90.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.05)


def roots_of(member: Enrolled) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(member.credentials.pem().ca)


async def test_no_request_is_lost_when_certificates_end_and_the_authority_is_rotated(
    tmp_path: Path, model: Path
) -> None:
    """Every certificate of the start ends meanwhile, and so does the root of the start."""
    answers: list[tuple[int, str]] = []
    is_over = asyncio.Event()

    async def ask_on(http: aiohttp.ClientSession, url: str) -> None:
        body = {"model": "stub", "prompt": "hello", "max_tokens": 4}
        while not is_over.is_set():
            async with http.post(url, json=body) as answer:
                answers.append((answer.status, await answer.text()))

    async with (
        mesh_of_two(tmp_path, ModelText.load(model)) as (mesh, address),
        aiohttp.ClientSession() as http,
    ):
        first = [member.credentials.pem().chain for member in mesh.members]
        url = f"http://{address}/v1/completions"
        asking = [asyncio.create_task(ask_on(http, url)) for _ in range(2)]
        await until(lambda: all(member.credentials.generation for member in mesh.members))
        old = roots_of(mesh.members[0])
        Authority(tmp_path / "state").rotate(OVERLAP_S)
        await until(lambda: all(len(roots_of(member)) == 2 for member in mesh.members))
        await until(
            lambda: all(
                len(roots_of(member)) == 1 and roots_of(member) != old for member in mesh.members
            )
        )
        so_far = len(answers)
        await until(lambda: len(answers) >= so_far + 4)
        is_over.set()
        await asyncio.gather(*asking)
        assert all(
            member.credentials.pem().chain != chain
            for member, chain in zip(mesh.members, first, strict=True)
        )
    assert [answer for answer in answers if answer[0] != 200] == []


def complete(url: str) -> int:
    """Ask a gateway for a completion; gives the number of its tokens."""
    asked = {"model": "stub", "prompt": [5, 6, 7], "max_tokens": 2, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["usage"]["completion_tokens"]


async def test_a_session_goes_on_without_a_lost_node_and_off_one_that_drains(
    tmp_path: Path, model: Path
) -> None:
    """Nodes let only its gateway and the nodes of its route act for it, whichever these are."""

    def held(node: Node) -> int:
        return 0 if node.stage is None else len(node.stage.sessions)

    async with (
        mesh_of_two(tmp_path, ModelText.load(model)) as (mesh, address),
        aiohttp.ClientSession() as http,
    ):
        url = f"http://{address}"
        body = {"model": "stub", "prompt": "hello", "max_tokens": 200, "temperature": 0}

        async def ask() -> str:
            async with http.post(f"{url}/v1/completions", json=body) as answer:
                assert answer.status == 200, await answer.text()
                text: str = (await answer.json())["choices"][0]["text"]
                return text

        undisturbed = await ask()
        mesh.step_s = 0.1  # 200 tokens take 40 s, unless all has happened before
        asked = asyncio.create_task(ask())
        await until(lambda: held(mesh.nodes["beta"]) == 1)
        gamma = await mesh.add_node("gamma", 1, 2)
        await mesh.lose("beta")
        await until(lambda: held(gamma) == 1)
        delta = await mesh.add_node("delta", 1, 2)
        await mesh.drain("gamma")
        await until(lambda: (held(gamma), held(delta)) == (0, 1))
        mesh.step_s = 0.0
        assert await asked == undisturbed
        async with http.get(f"{url}/metrics") as answer:
            lines = (await answer.text()).splitlines()
        assert 'meshnet_recoveries_total{way="journal"} 1.0' in lines
        assert "meshnet_sessions_moved_total 1.0" in lines
        assert [held(mesh.nodes["alpha"]), held(delta)] == [0, 0]


def test_all_that_a_person_types_is_a_token(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The control plane is inside a gateway, which serves over a node that joined; so does one
    that joined itself."""
    env = {"MESHNET_STATE_DIR": str(tmp_path / "user")}
    state = tmp_path / "state"
    model = write_model(tmp_path_factory.mktemp("models") / "stub")
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8}
    (model / "config.json").write_text(json.dumps(config))
    gateway = ("gateway", "--model", str(model), "--listen", "127.0.0.1:0")
    faces = ("--control-listen", "127.0.0.1:0", "--control-grpc-listen", "127.0.0.1:0")
    faces += ("--state", str(state), "--no-require-probe")  # stubs have no numbers to compare
    with running(*gateway, *faces) as first:
        addresses = first.event("listening")
        url = addresses["control"]
        assert url.startswith("grpcs://")
        admin = ("--control", url, "--credentials", str(state / "admin"))

        def token(role: str, *flags: str) -> str:
            done = meshnet("token", "create", "--role", role, *flags, *admin)
            assert done.returncode == 0, done.stderr
            assert done.stdout.count("\n") == 1
            return done.stdout.strip()

        for_node, for_gateway = token("node", "--layers", "0:1"), token("gateway")
        (tmp_path / "token").write_text(for_node)
        node = ("node", "--join", f"@{tmp_path / 'token'}", "--backend", "stub", "--id", "alpha")
        node += ("--listen", "127.0.0.1:0")
        wrong = meshnet(*gateway, "--join", for_node, **env)
        assert (wrong.returncode, "is for the role node" in wrong.stderr) == (1, True)
        with (
            running(*node, **env) as started,
            running(*gateway, MESHNET_JOIN=for_gateway, **env) as front,
        ):
            assert started.event("ready")["layers"] == "0-1"
            joined = front.event("listening")
            assert [complete(where["http"]) for where in (addresses, joined)] == [2, 2]
            listed = meshnet_json("nodes", "list", *admin)["nodes"]
            assert [node["name"] for node in listed] == ["nodes/alpha"]
            assert listed[0]["state"] == "NODE_STATE_READY"
            assert listed[0]["endpoints"][0]["uri"].startswith("https://")
            assert started.interrupt() == 0
            assert not any(
                "Traceback" in line for line in [*started.errors, *front.errors, *first.errors]
            )
        typed = (node[0], "--join", for_node, *node[3:])
        with running(*typed, **env) as again:  # its one use is taken: what it kept is enough
            again.event("ready")
            shown = " ".join(psutil.Process(again.process.pid).cmdline())
            assert " node --join TOKEN --backend stub " in shown
        done = meshnet("login", token("read"), "--name", "ann", **env)
        assert done.returncode == 0, done.stderr
        assert "ann, who may read" in done.stdout
        own = json.loads(meshnet("token", "list", "--json", **env).stdout)
        assert [token["used"] for token in own["joinTokens"]] == [1, 1, 1]
        refused = meshnet("token", "delete", own["joinTokens"][0]["name"], **env)
        assert "expected one of admin" in refused.stderr
    for secret in (for_node, for_gateway):
        hidden = secret.split(".")[2]
        kept = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "token"]
        assert all(hidden.encode() not in path.read_bytes() for path in kept)
    private = [path for path in kept if path.suffix in (".pem", ".json")]
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}


def test_an_authority_is_rotated_by_a_command(tmp_path: Path) -> None:
    before = Authority(tmp_path / "state").spki_sha256
    for folder, code, said in (
        (tmp_path / "state", 0, "the new root's key has SHA-256"),
        (tmp_path, 2, "holds no authority"),
    ):
        done = CliRunner().invoke(control_commands.app, ["rotate-ca", "--state", str(folder)])
        text = done.output + (done.exception.message if code else "")
        assert said in text
    assert Authority(tmp_path / "state").spki_sha256 != before
